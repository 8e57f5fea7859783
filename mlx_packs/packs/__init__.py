"""Packs: in memory, on disk, on a base, on the Hub."""
