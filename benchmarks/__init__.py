"""Benchmarks of mlx_packs against baselines; they run from a checkout and are not in the wheel."""
