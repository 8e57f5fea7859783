"""Guards of external resources of a run: one file per guard; registry.py lists them."""
