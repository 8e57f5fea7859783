"""One LoRA training step: ours against mlx-lm's real trainer, in one process, interleaved.

Everything runs inside mlx-lm's own ``train()``. It asks for its next batch, and while it waits the
other implementations take their turns, in the order A B C C B A. Losses and counted tokens of all
of them are compared first; if they differ, no speed is printed and the exit is 1.

    python -m benchmarks.train_step --workload tiny
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from mlx_packs.bases.files import TINY
from mlx_packs.bench.implementations import SCALE, Adapters, MlxLmTrainer, Ours, TokenRows
from mlx_packs.bench.race import TOLERANCE, Entry, LossesDiffer, race
from mlx_packs.config.choices import MATMUL_PATHS, POLICIES
from mlx_packs.errors import PackError
from mlx_packs.packs.base import Base

from . import history, patched, report, stock
from .history import Environment, Record, percentiles, record
from .implementations import PATCHED, SAME_BLAS, STOCK, conditions, mlx_lm, ours_name
from .workloads import WORKLOADS, activation_dtype, base_name, load


def _tokens_per_s(entry: Entry) -> list[float]:
    """Supervised tokens per second, step by step."""
    return [1e3 * entry.rows.targets / ms for ms in entry.all_ms]


def records(entries: list[Entry], task: str, dtype: str, rank: int) -> list[Record]:
    """Milliseconds per step and supervised tokens per second of every entry, against the first."""
    here = Environment.here()
    baseline = entries[0]
    note = ""
    if any(e.rows.tokens.shape != baseline.rows.tokens.shape for e in entries):
        note = "Batches differ in rows; ratios are of supervised tokens per second."
    base_speed = percentiles(_tokens_per_s(baseline))["p50"]
    new_records = []
    for entry in entries:
        count, width = entry.rows.tokens.shape
        shape = f"{count} x {width - 1}, {entry.rows.targets} targets, rank {rank}"
        about = {
            "dtype": dtype,
            "baseline": baseline.name,
            "peak_mb": entry.peak_bytes / 1e6,
            "stock_blas": entry.name == STOCK and stock.blas_is_replaced(),
            "note": note,
        }
        speed = _tokens_per_s(entry)
        ratio = percentiles(speed)["p50"] / base_speed
        new_records.append(
            record(here, task, entry.name, shape, "step", "ms", entry.all_ms, **about)
        )
        new_records.append(
            record(
                here,
                task,
                entry.name,
                shape,
                "speed",
                "supervised tokens/s",
                speed,
                ratio=ratio,
                **about,
            )
        )
    return new_records


def run(options: argparse.Namespace) -> list[Record]:
    """Build the implementations, race them, and record. Raises: LossesDiffer, PackError."""
    workload = WORKLOADS[options.workload]
    batch_size, length = (
        options.batch_size or workload.batch_size,
        options.length or workload.length,
    )

    def fresh() -> Base:
        return load(workload, options.model, options.seed)

    base = fresh()
    dtype, vocab_size = activation_dtype(base), base.vocab_size
    adapters = Adapters.random(base, options.rank, SCALE, options.seed)
    del base
    rows = TokenRows.random(batch_size, length, vocab_size, options.seed)
    count = options.mlx_lm_rows or workload.mlx_lm_rows or batch_size
    baseline_rows = TokenRows(rows.tokens[:count], rows.offset)
    _say("loading")
    trainer = mlx_lm(fresh, adapters)
    entries = _entries_of_mlx_lm(trainer, baseline_rows)
    for entry in entries:
        entry.steps = options.mlx_lm_steps or workload.mlx_lm_steps
    for path in options.matmul_path or workload.matmul_paths:
        ours = Ours(fresh, adapters, path, options.recompute)
        name = ours_name(path, options.recompute)
        entries.append(Entry(name, ours, rows, rows.for_ours(), options.steps, untimed=1))
    race(adapters, entries, range(2 * options.rounds), TOLERANCE[dtype])
    task = f"train_step {base_name(options.workload, options.model)}"
    return records(entries, task, dtype, options.rank)


def _entries_of_mlx_lm(trainer: MlxLmTrainer, rows: TokenRows) -> list[Entry]:
    """Stock, with our BLAS where that is another one, and patched, which keeps its buffers."""
    batch = rows.for_mlx_lm()
    replaced = stock.blas_is_replaced()
    own = partial(conditions, trainer, False)
    # losses do not depend on the BLAS, and the reference takes long
    entries = [
        Entry(STOCK, trainer, rows, batch, around=partial(own, replaced), checked=not replaced)
    ]
    if replaced:
        entries.append(Entry(SAME_BLAS, trainer, rows, batch, around=partial(own, False)))
    around = partial(conditions, trainer, True, False)
    targets = patched.with_targets(*batch)
    return [*entries, Entry(PATCHED, trainer, rows, targets, untimed=1, around=around)]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "python -m benchmarks.train_step",
        description="One LoRA training step: ours against mlx-lm's real trainer, interleaved.",
        allow_abbrev=False,
    )

    def number(flag: str, default: int | None, sentence: str) -> None:
        shown = "the workload's" if default is None else default
        p.add_argument(
            flag, type=_positive, default=default, metavar="N", help=f"{sentence} [{shown}]"
        )

    p.add_argument("--workload", choices=WORKLOADS, default="tiny", help="base and batch [tiny]")
    p.add_argument(
        "--model", default=TINY, help="another checkpoint for a workload on the tiny base"
    )
    p.add_argument(
        "--matmul-path",
        action="append",
        choices=MATMUL_PATHS,
        help="our matmul path, repeatable [the workload's]",
    )
    p.add_argument(
        "--recompute",
        choices=POLICIES,
        default="none",
        help="our activation checkpointing policy [%(default)s]",
    )
    number("--batch-size", None, "rows of a batch")
    number("--length", None, "tokens of a row; half are targets")
    number("--rank", 8, "of the adapters, on all projections")
    number("--rounds", 2, "forth and back, A B B A")
    number("--steps", 3, "timed steps of ours each turn")
    number("--mlx-lm-steps", None, "timed steps of mlx-lm each turn")
    number("--mlx-lm-rows", None, "rows of mlx-lm's batch")
    p.add_argument("--seed", type=int, default=0, help="of rows, adapters, random bases [0]")
    p.add_argument(
        "--history",
        type=Path,
        default=history.HISTORY,
        metavar="FILE",
        help="where records are appended [benchmarks/history.jsonl]",
    )
    return p


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, but got {value}")
    return value


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    asked = parser()
    options = asked.parse_args(arguments)
    workload = WORKLOADS[options.workload]
    if options.model != TINY and workload.config is not None:
        asked.error(f"--model: the base of {options.workload} is random")
    if (options.mlx_lm_rows or 0) > (options.batch_size or workload.batch_size):
        asked.error("--mlx-lm-rows: must not be more than --batch-size")
    try:
        new_records = run(options)
    except (LossesDiffer, PackError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1 if isinstance(error, LossesDiffer) else 2
    history.append(new_records, options.history)
    print(report.render(new_records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
