"""Packs merged, combined, and exchanged with other tools."""
