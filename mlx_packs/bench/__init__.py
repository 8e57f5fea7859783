"""Training steps of mlx-lm and of this library, timed alternately on a user's machine."""
