"""Everything that follows a training run; registry.py lists the observers."""
