"""``python -m benchmarks report``: print the tables of the latest runs as markdown."""

import argparse
import sys
from pathlib import Path

from . import history, report


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    shown = commands.add_parser("report", help="markdown tables from the history of measurements")
    shown.add_argument("--history", type=Path, default=history.HISTORY, metavar="FILE",
                       help="records to show [benchmarks/history.jsonl]")  # fmt: skip
    shown.add_argument("--task", default="", metavar="TEXT", help="tasks that contain TEXT")
    options = parser.parse_args(arguments)
    records = [r for r in history.read(options.history) if options.task in r.task]
    if not records:
        print("no such records there yet: python -m benchmarks.train_step", file=sys.stderr)
        return 2
    print(report.render(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
