"""One LoRA training step: ours against mlx-lm's real trainer, in one process, interleaved.

Everything runs inside mlx-lm's own ``train()``. It asks for its next batch, and while it waits the
other implementations take their turns, in the order A B C C B A. Losses and counted tokens of all
of them are held against each other first; if they differ, no speed is printed and the exit is 1.

    python -m benchmarks.train_step --geometry tiny
"""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.nn as nn

from mlx_packs import runtime
from mlx_packs.config import BASE_PATHS
from mlx_packs.errors import PackError
from mlx_packs.loading import TINY, Base, load_base
from mlx_packs.runtime import mx

from . import history, report, shipped
from .history import Environment, Record, percentiles
from .sides import Adapters, Entry, MlxLm, Ours, Rows

CHECKED_STEPS = 2  # the second loss has gradients and optimizer in it
TOLERANCE = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 1e-2}  # of the loss, by activations
SCALE = 2.0
SHIPPED = "mlx-lm as shipped"
SAME_BLAS = "mlx-lm with our BLAS"


class LossesDiffer(Exception):
    """The implementations do not compute the same thing, so their speeds say nothing."""


@dataclass(frozen=True)
class Geometry:
    """A base and the defaults that suit it.

    config: of a random model, None loads one.   base_paths: of ours.   mlx_lm_rows: of mlx-lm's
    batch, None is as many as ours.   mlx_lm_steps: timed each turn.
    """

    config: dict | None
    base_paths: tuple[str, ...]
    mlx_lm_rows: int | None
    mlx_lm_steps: int


GEOMETRIES = {
    "tiny": Geometry(None, ("quantized", "transient", "dense"), mlx_lm_rows=None, mlx_lm_steps=3),
    "qwen3_4b_block": Geometry(
        {
            "model_type": "qwen3",
            "hidden_size": 2560,
            "num_hidden_layers": 1,
            "intermediate_size": 9728,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-6,
            "vocab_size": 8192,
            "max_position_embeddings": 40960,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": True,
        },
        ("transient", "dense"),
        mlx_lm_rows=1,
        mlx_lm_steps=1,
    ),
}


def load(geometry: Geometry, model: str, seed: int) -> Base:
    """The base of a geometry: loaded, or random 4-bit weights in groups of 64 from its config."""
    if geometry.config is None:
        return load_base(model)
    from mlx_lm.models import qwen3

    mx.random.seed(seed)
    made = qwen3.Model(qwen3.ModelArgs.from_dict(geometry.config))
    if not runtime.on_cpu():
        made.set_dtype(mx.bfloat16)
    nn.quantize(made, group_size=64, bits=4)
    made.freeze()
    mx.eval(made.parameters())
    return Base("random", Path(), made, None, geometry.config, "")


def activation_dtype(base: Base) -> str:
    """The dtype that hidden states have, without the ``mlx.core.`` before its name."""
    return str(base.model.layers[0].input_layernorm.weight.dtype).rsplit(".", 1)[-1]


@dataclass(frozen=True)
class Turns:
    """``rounds`` of forth and back, and how many steps a side takes each time it comes up."""

    rounds: int
    steps: int
    mlx_lm_steps: int


def race(peer: MlxLm, entries: list[Entry], turns: Turns, tolerance: float) -> None:
    """Check that all entries compute the same on the peer's rows, then time them in turns.

    mlx-lm steps with `mx.compile` on, as shipped, whatever mlx_packs has set; ours as mlx_packs has
    it. Each turn starts as that side would find things alone: mlx-lm's trainer empties MLX's buffer
    cache after every step; ours keeps it, and so takes one untimed step first.
    Raises: LossesDiffer before anything is timed.
    """
    peers = [e for e in entries if e.side is peer]
    ours = [e for e in entries if e.side is not peer]
    rows = peers[0].rows
    peer_batch = rows.for_mlx_lm()

    def batches() -> Iterator[tuple[mx.array, mx.array]]:
        _say("checking mlx-lm")
        expected = []
        with shipped.mlx(reference_blas=False):
            for _ in range(CHECKED_STEPS):
                yield peer_batch
                expected.append(peer.loss)
        if (counted := peer.trained_tokens) != rows.targets * CHECKED_STEPS:
            raise LossesDiffer(f"mlx-lm counts {counted} targets in {CHECKED_STEPS} steps, "
                               f"ours {rows.targets} in each")  # fmt: skip
        for entry in ours:
            _say(f"checking {entry.name}")
            check_losses(expected, entry, rows, tolerance)
        for turn in range(2 * turns.rounds):
            for entry in entries if turn % 2 == 0 else entries[::-1]:
                _say(f"turn {turn + 1} of {2 * turns.rounds}: {entry.name}")
                if entry.side is not peer:
                    _time_ours(entry, turns.steps)
                    continue
                mx.clear_cache()
                with shipped.mlx(reference_blas=entry.blas_as_shipped):
                    for _ in range(turns.mlx_lm_steps):
                        with entry.memory():
                            yield peer_batch
                        entry.step_ms.append(peer.step_ms)

    with contextlib.closing(batches()) as schedule:
        peer.train(schedule)


def check_losses(expected: list[float], entry: Entry, rows: Rows, tolerance: float) -> None:
    """Take as many steps as mlx-lm took and hold each loss against its. Raises: LossesDiffer."""
    batch = rows.for_ours()
    found = [entry.side.step(batch)[1] for _ in expected]
    if not all(abs(a - b) <= tolerance * a for a, b in zip(expected, found, strict=True)):
        raise LossesDiffer(f"losses of mlx-lm {expected} and of {entry.name} {found} differ by "
                           f"more than {tolerance:g} of mlx-lm's")  # fmt: skip


def _time_ours(entry: Entry, steps: int) -> None:
    batch = entry.rows.for_ours()
    entry.side.step(batch)
    for _ in range(steps):
        with entry.memory():
            entry.step_ms.append(entry.side.step(batch)[0])


def records(entries: list[Entry], task: str, dtype: str, rank: int) -> list[Record]:
    """Milliseconds a step and supervised tokens a second of every entry, against the first."""
    here = dataclasses.asdict(Environment.here())
    baseline = entries[0]
    note = ""
    if any(e.rows.tokens.shape != baseline.rows.tokens.shape for e in entries):
        note = "Batches differ in rows; ratios are of supervised tokens a second."
    base_speed = percentiles(baseline.tokens_per_s)["p50"]
    made = []
    for entry in entries:
        count, width = entry.rows.tokens.shape
        speed = percentiles(entry.tokens_per_s)
        facts = {
            "task": task,
            "implementation": entry.name,
            "shape": f"{count} x {width - 1}, {entry.rows.targets} targets, rank {rank}",
            "dtype": dtype,
            "samples": len(entry.step_ms),
            "baseline": baseline.name,
            "peak_mb": float(f"{entry.peak_mb:.4g}"),
            "blas": shipped.REFERENCE_BLAS if entry.blas_as_shipped else shipped.blas_name(),
            "blas_threads": 1 if entry.blas_as_shipped else runtime.BLAS.threads,
            "note": note,
            **here,
        }
        ratio = float(f"{speed['p50'] / base_speed:.4g}")
        time = percentiles(entry.step_ms)
        made.append(Record(metric="step", unit="ms", ratio=None, **time, **facts))
        made.append(Record(metric="speed", unit="supervised tokens/s", ratio=ratio,
                           **speed, **facts))  # fmt: skip
    return made


def run(options: argparse.Namespace) -> list[Record]:
    """Build the sides, race them, and record. Raises: LossesDiffer, PackError."""
    geometry = GEOMETRIES[options.geometry]
    name = options.geometry if options.model == TINY else Path(options.model).name

    def fresh() -> Base:
        return load(geometry, options.model, options.seed)

    base = fresh()
    dtype, vocab_size = activation_dtype(base), base.vocab_size
    adapters = Adapters.random(base, options.rank, SCALE, options.seed)
    del base
    rows = Rows.random(options.batch_size, options.length, vocab_size, options.seed)
    peer_rows = rows.first(options.mlx_lm_rows or geometry.mlx_lm_rows or options.batch_size)
    _say("loading")
    peer = MlxLm(fresh, adapters)
    entries = [Entry(SHIPPED, peer, peer_rows, blas_as_shipped=shipped.blas_is_replaced())]
    if shipped.blas_is_replaced():
        entries.append(Entry(SAME_BLAS, peer, peer_rows))
    for path in options.base_path or geometry.base_paths:
        entries.append(Entry(f"mlx_packs {path}", Ours(fresh, adapters, path), rows))
    turns = Turns(options.rounds, options.steps, options.mlx_lm_steps or geometry.mlx_lm_steps)
    race(peer, entries, turns, TOLERANCE[dtype])
    return records(entries, f"train_step {name}", dtype, options.rank)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "python -m benchmarks.train_step",
        description="One LoRA training step: ours against mlx-lm's real trainer, interleaved.",
        allow_abbrev=False,
    )

    def number(flag: str, default: int | None, sentence: str) -> None:
        shown = "the geometry's" if default is None else default
        p.add_argument(flag, type=_positive, default=default, metavar="N",
                       help=f"{sentence} [{shown}]")  # fmt: skip

    p.add_argument("--geometry", choices=GEOMETRIES, default="tiny", help="which base [tiny]")
    p.add_argument("--model", default=TINY, help="another checkpoint for the geometry 'tiny'")
    p.add_argument("--base-path", action="append", choices=BASE_PATHS[1:],
                   help="of ours, repeatable [the geometry's]")  # fmt: skip
    number("--batch-size", 4, "rows of a batch")
    number("--length", 128, "tokens of a row; half are targets")
    number("--rank", 8, "of the adapters, on all projections")
    number("--rounds", 2, "forth and back, A B B A")
    number("--steps", 3, "timed steps of ours each turn")
    number("--mlx-lm-steps", None, "timed steps of mlx-lm each turn")
    number("--mlx-lm-rows", None, "rows of mlx-lm's batch")
    p.add_argument("--seed", type=int, default=0, help="of rows, adapters, random bases [0]")
    p.add_argument("--history", type=Path, default=history.HISTORY, metavar="FILE",
                   help="where records are appended [benchmarks/history.jsonl]")  # fmt: skip
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
    if options.model != TINY and options.geometry != "tiny":
        asked.error(f"--model: the base of {options.geometry} is random")
    if (options.mlx_lm_rows or 0) > options.batch_size:
        asked.error("--mlx-lm-rows: must not be more than --batch-size")
    try:
        made = run(options)
    except (LossesDiffer, PackError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1 if isinstance(error, LossesDiffer) else 2
    history.append(made, options.history)
    print(report.render(made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
