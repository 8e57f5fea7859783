"""Rows to tokens to batches."""

from .rows import tiny_path as tiny_path
