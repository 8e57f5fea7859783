"""Modules that stand in for those of a base while it is trained."""
