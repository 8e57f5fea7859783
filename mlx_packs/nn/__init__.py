"""Modules that replace a base model's modules while it is trained."""
