"""Examples from files to tokens to batches; ``tiny_path()`` is the folder of the bundled data."""

from .rows import tiny_path as tiny_path
