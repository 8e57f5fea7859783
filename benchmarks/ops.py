"""Every op: its ``bench_*`` one after another, with the same options.

python -m benchmarks.ops --rounds 2 --only "512 rows"
"""

import importlib
import sys
from pathlib import Path

from . import op_race

NAMES = sorted(p.stem.removeprefix("bench_") for p in Path(__file__).parent.glob("bench_*.py"))


def main(arguments: list[str] | None = None) -> int:
    """Race each op's contests; an op none of whose shapes was asked for is passed over."""
    arguments = sys.argv[1:] if arguments is None else arguments
    only = op_race.parser("ops").parse_args(arguments).only
    raced = 0
    for name in NAMES:
        module = importlib.import_module(f"benchmarks.bench_{name}")
        contests = [contest for contest in module.contests() if only in contest.shape]
        if contests:
            op_race.main(name, contests, arguments)
            raced += 1
    if not raced:
        print(f"benchmarks: --only {only}: no op has a shape that contains that", file=sys.stderr)
    return 0 if raced else 2


if __name__ == "__main__":
    sys.exit(main())
