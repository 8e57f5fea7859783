"""Architectures that mlx-lm has not."""
