"""``python -m benchmarks NAME``: one benchmark by name, or the report of their results."""

import importlib
import sys

# What each shows is the first line of its module.
NAMES = (
    "targets",
    "train_step",
    "memory",
    "train_run",
    "load",
    "data",
    "stream",
    "generate",
    "serve",
    "serve_soak",
    "mixed_load",
    "swap",
    "ops",
    "steady",
    "soak",
    "profile",
    "timeline",
    "whole",
    "prefix",
    "offload",
    "trees",
    "image_steps",
    "quantization_error",
    "plan_accuracy",
    "quantize",
    "cost_tables",
    "graph",
    "methods",
    "quality",
    "answers",
    "classify",
    "first",
    "real",
    "report",
    "scaling",
)


def main(arguments: list[str] | None = None) -> int:
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print("usage: python -m benchmarks NAME [--help] ...\n")
        for each in NAMES:
            print(f"  {each:<20} {_first_line(each)}")
        return 0
    if name not in NAMES:
        print(f"benchmarks: no '{name}'; there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    return importlib.import_module(f"benchmarks.{name}").main(rest)


def _first_line(name: str) -> str:
    return importlib.import_module(f"benchmarks.{name}").__doc__.split("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
