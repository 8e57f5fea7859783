"""Benchmarks of mlx_packs against its peers; run from a checkout, never stock in the wheel."""
