"""One LoRA training step: ours against mlx-lm's real trainer, in one process, interleaved.

Everything runs inside mlx-lm's own ``train()``. It asks for its next batch, and while it waits the
other implementations take their turns, in the order A B C C B A. Losses and counted tokens of all
of them are compared first; if they differ, no speed is printed and the exit is 1.

    python -m benchmarks.train_step --workload tiny
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlx_packs.bases.files import TINY
from mlx_packs.config.choices import MATMUL_PATHS, POLICIES
from mlx_packs.errors import PackError
from mlx_packs.packs.base import Base
from mlx_packs.runtime import mx

from . import history, patched, report, stock
from .history import Environment, Record, percentiles, record
from .implementations import (
    PATCHED,
    SAME_BLAS,
    STOCK,
    Adapters,
    Entry,
    MlxLm,
    Ours,
    Rows,
    ours_name,
)
from .workloads import WORKLOADS, activation_dtype, base_name, load

CHECKED_STEPS = 2  # the second loss has gradients and optimizer in it
TOLERANCE = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 1e-2}  # of the loss, by activations
SCALE = 2.0


class LossesDiffer(Exception):
    """The implementations do not compute the same thing, so their speeds say nothing."""


@dataclass(frozen=True)
class Turns:
    """``rounds`` of forth and back, and how many steps an implementation takes each time it comes up."""

    rounds: int
    steps: int
    mlx_lm_steps: int


def race(
    peer: MlxLm, adapters: Adapters, entries: list[Entry], turns: Turns, tolerance: float
) -> None:
    """Check that all entries compute the same on the peer's rows, then time them in turns.

    mlx-lm steps with `mx.compile` on, stock, whatever mlx_packs has set; ours as mlx_packs has
    it. Each turn starts as that implementation would find things alone: mlx-lm's trainer empties MLX's buffer
    cache after every step; ours keeps it, and so takes one untimed step first, as does the patched
    mlx-lm.
    Raises: LossesDiffer before anything is timed.
    """
    peers = [e for e in entries if e.implementation is peer]
    ours = [e for e in entries if e.implementation is not peer]
    rows = peers[0].rows
    stock_batch = rows.for_mlx_lm()
    batch_with_targets = patched.with_targets(*stock_batch)

    def checked(batch: tuple, losses: list[float]) -> Iterator[tuple[mx.array, ...]]:
        """The peer's first steps on a batch, and what they lose."""
        before = peer.trained_tokens
        with stock.mlx(reference_blas=False):
            for _ in range(CHECKED_STEPS):
                yield batch
                losses.append(peer.loss)
        if (counted := peer.trained_tokens - before) != rows.targets * CHECKED_STEPS:
            raise LossesDiffer(
                f"mlx-lm counts {counted} targets in {CHECKED_STEPS} steps, "
                f"ours {rows.targets} in each"
            )

    def turn_of_peer(entry: Entry) -> Iterator[tuple[mx.array, ...]]:
        batch = batch_with_targets if entry.patched else stock_batch
        peer.patch(entry.patched)
        mx.clear_cache()
        with stock.mlx(reference_blas=entry.stock_blas):
            if entry.patched:
                yield batch
            for _ in range(turns.mlx_lm_steps):
                with entry.memory():
                    yield batch
                entry.step_ms.append(peer.step_ms)

    def batches() -> Iterator[tuple[mx.array, ...]]:
        _say("checking mlx-lm")
        expected: list[float] = []
        yield from checked(stock_batch, expected)
        for entry in (e for e in peers if e.patched):
            _say(f"checking {entry.name}")
            peer.reset(adapters)
            results: list[float] = []
            yield from checked(batch_with_targets, results)
            check_losses(expected, results, entry.name, tolerance)
        for entry in ours:
            _say(f"checking {entry.name}")
            batch = rows.for_ours()
            results = [entry.implementation.step(batch)[1] for _ in expected]
            check_losses(expected, results, entry.name, tolerance)
        for turn in range(2 * turns.rounds):
            for entry in entries if turn % 2 == 0 else entries[::-1]:
                _say(f"turn {turn + 1} of {2 * turns.rounds}: {entry.name}")
                if entry.implementation is peer:
                    yield from turn_of_peer(entry)
                else:
                    _time_ours(entry, turns.steps)

    with contextlib.closing(batches()) as schedule:
        peer.train(schedule)


def check_losses(expected: list[float], results: list[float], name: str, tolerance: float) -> None:
    """Hold the losses of an implementation's first steps against mlx-lm's. Raises: LossesDiffer."""
    if not all(abs(a - b) <= tolerance * a for a, b in zip(expected, results, strict=True)):
        raise LossesDiffer(
            f"losses of mlx-lm {expected} and of {name} {results} differ by "
            f"more than {tolerance:g} of mlx-lm's"
        )


def _time_ours(entry: Entry, steps: int) -> None:
    batch = entry.rows.for_ours()
    entry.implementation.step(batch)
    for _ in range(steps):
        with entry.memory():
            entry.step_ms.append(entry.implementation.step(batch)[0])


def records(entries: list[Entry], task: str, dtype: str, rank: int) -> list[Record]:
    """Milliseconds a step and supervised tokens a second of every entry, against the first."""
    here = Environment.here()
    baseline = entries[0]
    note = ""
    if any(e.rows.tokens.shape != baseline.rows.tokens.shape for e in entries):
        note = "Batches differ in rows; ratios are of supervised tokens a second."
    base_speed = percentiles(baseline.tokens_per_s)["p50"]
    new_records = []
    for entry in entries:
        count, width = entry.rows.tokens.shape
        shape = f"{count} x {width - 1}, {entry.rows.targets} targets, rank {rank}"
        about = {
            "dtype": dtype,
            "baseline": baseline.name,
            "peak_mb": entry.peak_mb,
            "stock_blas": entry.stock_blas,
            "note": note,
        }
        speed = entry.tokens_per_s
        ratio = percentiles(speed)["p50"] / base_speed
        new_records.append(
            record(here, task, entry.name, shape, "step", "ms", entry.step_ms, **about)
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
    rows = Rows.random(batch_size, length, vocab_size, options.seed)
    peer_rows = rows.first(options.mlx_lm_rows or workload.mlx_lm_rows or batch_size)
    _say("loading")
    peer = MlxLm(fresh, adapters)
    replaced = stock.blas_is_replaced()
    entries = [Entry(STOCK, peer, peer_rows, stock_blas=replaced)]
    if replaced:
        entries.append(Entry(SAME_BLAS, peer, peer_rows))
    entries.append(Entry(PATCHED, peer, peer_rows, patched=True))
    for path in options.matmul_path or workload.matmul_paths:
        ours = Ours(fresh, adapters, path, options.recompute)
        entries.append(Entry(ours_name(path, options.recompute), ours, rows))
    turns = Turns(options.rounds, options.steps, options.mlx_lm_steps or workload.mlx_lm_steps)
    race(peer, adapters, entries, turns, TOLERANCE[dtype])
    task = f"train_step {base_name(options.workload, options.model)}"
    return records(entries, task, dtype, options.rank)


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
        help="of ours, repeatable [the workload's]",
    )
    p.add_argument(
        "--recompute",
        choices=POLICIES,
        default="none",
        help="what ours computes again in the backward [%(default)s]",
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
