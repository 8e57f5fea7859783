"""Training steps of mlx-lm and of this library, timed side by side on a user's machine."""
