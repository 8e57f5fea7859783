"""A real model on real data: ours beside mlx-lm and PEFT, MiniLM beside sentence-transformers.

python -m benchmarks real --work DIR                     # every part; a stopped run continues
python -m benchmarks real --work DIR --part banking77    # one of them
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; the modules that train are imported only then."""
    from .command import main

    return main(arguments)
