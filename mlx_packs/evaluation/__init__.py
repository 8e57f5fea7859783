"""How good a base and its packs are on held-out examples."""
