"""Evaluation of a base and its packs on held-out examples."""
