"""Everything that follows a training run: one file per observer; registry.py lists them."""
