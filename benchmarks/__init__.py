"""Benchmarks of mlx_packs against its peers; run from a checkout, never shipped in the wheel."""
