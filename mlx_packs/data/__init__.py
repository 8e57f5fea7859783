"""Data: rows of a file to tokens to batches. `tiny_path` is the embedded data set."""

from .rows import tiny_path as tiny_path
