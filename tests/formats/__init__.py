"""Packs and runs as earlier programs wrote them."""
