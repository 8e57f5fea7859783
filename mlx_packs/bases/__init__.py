"""Checkpoints: their files, weight formats, geometry, loading and writing."""
