"""``python -m benchmarks graph``: its options and its parts."""

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from mlx_packs.config.choices import MATMUL_PATHS, POLICIES

from .. import history
from ..history import Environment, Record
from ..workloads import CONFIGS
from . import published, tables, trees
from .capture import MLX_LM, OURS, WEIGHTS, Failed, StepJob
from .costs import Unpriced
from .epoch import Examples, epochs
from .libmlx import Unsupported, check_supported
from .seconds import CHIPS, DEFAULT_CHIPS, STEP_S
from .step import lay_out

_LENGTHS = Examples(mean=300, sigma=0.7, supervised=1.0, count=4000, max_length=2048)


def _steps(options: argparse.Namespace, here: Environment) -> list[Record]:
    """A step of ours beside mlx-lm's and its checkpointed one."""
    sizes = [(options.batch or 1, options.length or 2048)]
    if not (options.batch or options.length):
        sizes = [(1, 2048), (4, 512)]
    jobs = [
        ("quantized", "none"),
        ("transient", "none"),
        ("quantized", "block"),
        ("transient", "block"),
    ]
    if options.path or options.recompute:
        policies = options.recompute or ["none"]
        jobs = [(path, policy) for path in options.path or ["quantized"] for policy in policies]
    records = []
    for model in options.model or ["qwen3_4b", "qwen3_0_6b"]:
        for batch, length in sizes:
            size = {"config": CONFIGS[model], "batch": batch, "length": length}
            size |= {"rank": options.rank, "weights": options.weights or "affine4"}
            methods = options.method or ["lora"]
            theirs = [
                (MLX_LM, StepJob(**size, recompute=p, method=m))
                for m in dict.fromkeys(("lora", *(m for m in methods if m == "dora")))
                for p in ("none", "block")
            ]
            for supervised in options.supervised or [1.0]:
                ours = [
                    (
                        OURS,
                        StepJob(
                            **size,
                            path=path,
                            recompute=policy,
                            supervised=supervised,
                            method=method,
                            compiled=compiled,
                        ),
                    )
                    for method in methods
                    for path, policy in jobs
                    for compiled in ([True, False] if options.uncompiled else [True])
                ]
                steps = lay_out(theirs + ours, options.chip, _fixed_s(options))
                shape = (
                    f"{model}, {batch} x {length}, {supervised:.0%} supervised, rank {options.rank}"
                )
                print(f"{shape}\n{tables.step_table(steps, options.chip)}\n", flush=True)
                task = f"graph {options.weights}" if options.weights else "graph"
                records += tables.step_records(here, steps, shape, options.chip, task)
    print(tables.STEP_LEGEND)
    return records


def _batches(options: argparse.Namespace, here: Environment) -> list[Record]:
    """An epoch over examples of lognormal lengths (`_LENGTHS`), padded and packed."""
    records, count = [], options.examples or _LENGTHS.count
    for model in options.model or ["qwen3_4b"]:
        size = {"config": CONFIGS[model], "batch": options.batch or 4, "length": 0}
        size["rank"] = options.rank
        asked = [(MLX_LM, StepJob(**size))] + [
            (OURS, StepJob(**size, path=path, packed=packed))
            for path in options.path or ["quantized", "transient"]
            for packed in (False, True)
        ]
        for supervised in options.supervised or [1.0, 0.3]:
            examples = Examples(
                _LENGTHS.mean, _LENGTHS.sigma, supervised, count, _LENGTHS.max_length
            )
            results = epochs(asked, examples, options.chip)
            shape = (
                f"{model}, {size['batch']} sequences of at most {examples.max_length}, {count} "
                f"examples, {supervised:.0%} supervised, rank {options.rank}"
            )
            print(f"{shape}\n{tables.epoch_table(results, options.chip)}\n", flush=True)
            records += tables.epoch_records(here, results, shape, options.chip)
    print(tables.EPOCH_LEGEND)
    return records


def _ops(options: argparse.Namespace, here: Environment) -> list[Record]:
    """The ops of a block, by kind, those that take longest first; nothing is recorded."""
    models, paths = options.model or ["qwen3_4b"], options.path or ["quantized"]
    for model, path, recompute in product(models, paths, options.recompute or ["none"]):
        size = {"config": CONFIGS[model], "batch": options.batch or 1, "rank": options.rank}
        size["length"] = options.length or 2048
        ours = StepJob(**size, path=path, recompute=recompute)
        theirs = StepJob(**size, recompute="block" if recompute == "block" else "none")
        steps, chip = lay_out([(OURS, ours), (MLX_LM, theirs)], options.chip), options.chip[0]
        print(f"{model}, {size['batch']} x {size['length']}, one block on {chip}: {steps[0].name}")
        print(f"beside {steps[1].name}\n{tables.ops_table(*steps, chip)}\n", flush=True)
    return []


def _trees(options: argparse.Namespace, here: Environment) -> list[Record]:
    """Steps of batches whose rows begin alike: as a tree, as rows, and mlx-lm's."""
    records = []
    for model in options.model or ["qwen3_4b", "qwen3_0_6b"]:
        for shape in trees.SHAPES:
            jobs = shape.jobs(CONFIGS[model], options.rank)
            steps = lay_out(jobs, options.chip, _fixed_s(options))
            title = f"{model}, {shape.name}, rank {options.rank}"
            print(f"{title}\n{tables.step_table(steps, options.chip)}")
            print(f"{shape.gains(steps, options.chip)}\n", flush=True)
            records += tables.step_records(here, steps, title, options.chip, "graph trees")
    print(tables.STEP_LEGEND)
    return records


def _published(options: argparse.Namespace, here: Environment) -> list[Record]:
    """Steps that somebody timed on a Mac and published, beside what the model predicts of them."""
    compared = published.compare(_fixed_s(options))
    print(f"{published.table(compared)}\n\n{published.LEGEND}", flush=True)
    return published.records(here, compared)


@dataclass(frozen=True)
class _Part:
    """What can be asked for by name, and the options that it takes beside ``rank``, ``chip``."""

    run: Callable[[argparse.Namespace, Environment], list[Record]]
    options: frozenset[str]


_PARTS = {
    "steps": _Part(
        _steps,
        frozenset(
            {
                *("model", "batch", "length", "supervised", "path", "recompute", "method"),
                *("weights", "step_ms", "uncompiled"),
            }
        ),
    ),
    "batches": _Part(_batches, frozenset({"model", "batch", "supervised", "path", "examples"})),
    "trees": _Part(_trees, frozenset({"model", "step_ms"})),
    "published": _Part(_published, frozenset({"step_ms"})),
    "ops": _Part(_ops, frozenset({"model", "batch", "length", "path", "recompute"})),
}
_DEFAULT_PARTS = ("steps", "batches")


def _several(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a parser of names with commas between them, ``qwen3-4b`` for ``qwen3_4b``."""

    def plain(name: str) -> str:
        return re.sub(r"[-. ]", "_", name.strip().lower())

    def parse(text: str) -> list[str]:
        names = {plain(name): name for name in known}
        if unknown := [part for part in text.split(",") if plain(part) not in names]:
            raise argparse.ArgumentTypeError(f"no '{unknown[0]}'; there are {', '.join(known)}")
        return [names[plain(part)] for part in text.split(",")]

    return parse


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no number of 1 or more")
    return int(text)


def _milliseconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 60_000:
        raise argparse.ArgumentTypeError(f"'{text}' is no number of milliseconds")
    return value


def _fixed_s(options: argparse.Namespace) -> float:
    """Return the seconds that every step takes beside what its graph shows."""
    return STEP_S if options.step_ms is None else options.step_ms / 1e3


def _shares(text: str) -> list[float]:
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = [0.0]
    if not all(0 < share <= 1 for share in shares):
        raise argparse.ArgumentTypeError(f"'{text}' has a share that is not above 0 and at most 1")
    return shares


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "python -m benchmarks graph",
        description="Primitives, bytes and predicted seconds of training on Apple GPUs. steps: one "
        "training step beside mlx-lm's. batches: an epoch over examples of many lengths, padded and "
        "packed. trees: steps of batches whose rows begin alike, computed once and in every row. "
        "published: steps that were timed on Macs, beside what is predicted of them. "
        "ops: a block by kind of op, not recorded.",
        epilog="Without a PART, steps and batches run, or that of them which takes the options.",
        allow_abbrev=False,
    )
    add = p.add_argument
    add("part", nargs="?", metavar="PART", choices=_PARTS, help=f"one of {', '.join(_PARTS)}")
    for flag, known, shown in (
        ("--model", CONFIGS, "Models by geometry [qwen3_4b; steps: and qwen3_0_6b]"),
        ("--path", MATMUL_PATHS, "Matmul paths of ours [quantized; steps, batches: and transient]"),
        ("--recompute", POLICIES, "Activation checkpointing of ours, in steps and ops [none]"),
        (
            "--method",
            ("lora", "dora", "pissa", "images", "images-with-axes"),
            "Methods, in steps; of mlx-lm lora and dora [lora]",
        ),
    ):
        names = list(known)
        add(flag, type=_several(names), metavar="NAMES", help=f"{shown}; of {', '.join(names)}")
    for flag, shown in (
        ("--batch", "Sequences of a batch [1; steps: and 4 of 512; batches: 4]"),
        ("--length", "Inputs of a sequence, in steps and ops [2048]"),
        ("--examples", "Examples of an epoch, in batches [4000]"),
    ):
        add(flag, type=_positive, metavar="N", help=shown)
    add("--weights", choices=list(WEIGHTS), help="Format of the frozen weights, in steps [affine4]")
    add("--rank", type=_positive, default=16, metavar="N", help="Rank of all adapters [16]")
    add(
        "--supervised",
        type=_shares,
        metavar="SHARES",
        help="Shares of the inputs that predict a target [1; batches: and 0.3]",
    )
    add(
        "--chip",
        type=_several(list(CHIPS)),
        default=list(DEFAULT_CHIPS),
        metavar="NAMES",
        help=f"Chips of Macs, M1 to M5 Max [{', '.join(DEFAULT_CHIPS)}]; ops takes the first",
    )
    add(
        "--step-ms",
        type=_milliseconds,
        metavar="MS",
        help="What every step takes beside its graph, as benchmarks.rates measures it, in steps, "
        f"trees and published [{1e3 * STEP_S:g}]; such predictions are not recorded",
    )
    add(
        "--uncompiled",
        action="store_true",
        default=None,
        help="Steps of ours also as they are with blocks on disk, not compiled, in steps",
    )
    history.add_option(p)
    return p


def _chosen_parts(p: argparse.ArgumentParser, options: argparse.Namespace) -> list[_Part]:
    """Return the parts that are asked for, or those of the defaults that take all options."""
    names = frozenset().union(*(part.options for part in _PARTS.values()))
    used = {name for name in names if getattr(options, name) is not None}
    asked = [options.part] if options.part else _DEFAULT_PARTS
    parts = [_PARTS[name] for name in asked if used <= _PARTS[name].options]
    if not parts:
        lacking = {name: used - _PARTS[name].options for name in asked}
        p.error("; ".join(f"{n} takes no --{', --'.join(sorted(o))}" for n, o in lacking.items()))
    return parts


def main(arguments: list[str] | None = None) -> int:
    p = parser()
    options = p.parse_args(arguments)
    parts = _chosen_parts(p, options)
    records, here = [], Environment.here()
    try:
        check_supported()
        for part in parts:
            records += part.run(options, here)
            print()
    except (Failed, Unpriced, Unsupported) as error:
        print(f"benchmarks: graph: {error}", file=sys.stderr)
        return 2
    print(textwrap.fill(tables.predicted(options.chip, _fixed_s(options)), 98))
    if options.step_ms is None:
        history.append(records, options.history)
    return 0
