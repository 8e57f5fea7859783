"""What a run depends on besides itself: one file per guard; registry.py lists them."""
