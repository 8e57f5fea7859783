"""Text from a base with packs, and how fast it is generated."""
