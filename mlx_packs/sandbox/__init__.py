"""Processes with limits, for work on templates, tokenizers and images of strangers."""
