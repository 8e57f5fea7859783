"""Modules that replace those of a base model while it is trained."""
