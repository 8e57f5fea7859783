"""Measured steps of batches whose rows begin alike: as trees, as rows, and mlx-lm's, alternating.

A model of few blocks has the geometry of a Qwen3, and a vocabulary that is as much smaller than its
own. mlx-lm trains the same weights without quantization, since its 4-bit products are slow on CPUs.
Where a batch of rows is long, rows are timed in parts of it, and time and memory of a part count as
often as the batch has it. `python -m benchmarks graph trees` predicts the same steps for Macs.

    python -m benchmarks trees --model qwen3-0.6b --blocks 1
"""

import argparse
import copy
import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.nn as nn
import numpy as np

from mlx_packs import runtime
from mlx_packs.bench.implementations import SCALE, Adapters, MlxLmTrainer, Ours, TokenRows
from mlx_packs.bench.race import TOLERANCE, LossesDiffer, Steps, check_losses
from mlx_packs.data.dataset import Batch, Tree
from mlx_packs.data.trees import planted, prefix_of
from mlx_packs.nn.frozen_weight import frozen_weight
from mlx_packs.nn.quantized import quantized_modules
from mlx_packs.nn.surgery import replace_modules
from mlx_packs.packs.base import Base
from mlx_packs.runtime import memory_limits, mx

from . import history
from .apple_gpu.trees import SHAPES, TreeShape
from .history import Environment, Record, record
from .implementations import SAME_BLAS
from .workloads import QWEN3_0_6B, QWEN3_4B, random_base

MODELS = {"qwen3-0.6b": QWEN3_0_6B, "qwen3-4b": QWEN3_4B}
ROWS, TREE = "mlx_packs rows", "mlx_packs tree"
RANK = 16
_MOST_INPUTS = 10_000  # of rows that are computed at once


@dataclass
class Side:
    """One implementation and what it has shown: seconds of a whole batch, and its largest step.

    ``batch`` is one of ``parts`` of the batch; ``checked`` has the rows that losses are compared on.
    """

    implementation: MlxLmTrainer | Ours
    batch: Any
    checked: Any
    parts: int = 1
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    def step(self, batch: Any) -> Generator[tuple, None, tuple[float, float]]:
        """Take a step, and return its milliseconds and loss; mlx-lm trains on what is yielded."""
        if isinstance(self.implementation, MlxLmTrainer):
            yield batch
            return self.implementation.step_ms, self.implementation.loss
        with memory_limits():
            return self.implementation.step(batch)

    def timed(self) -> Steps:
        """Take a step that counts."""
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        milliseconds, _ = yield from self.step(self.batch)

        self.seconds.append(self.parts * milliseconds / 1e3)
        peak = mx.get_peak_memory() - before
        self.peak_bytes = max(self.peak_bytes, self.parts * peak)


def tokens_of(shape: TreeShape, vocab_size: int, seed: int = 0) -> np.ndarray:
    """Return the rows [R, T + 1] of a batch, which begin as the shape says."""
    random = np.random.default_rng(seed)
    width = shape.common + shape.own + 1
    tokens = random.integers(1, vocab_size, (shape.rows, width), dtype=np.int32)

    together = shape.rows // shape.groups
    common = tokens[::together, : shape.common].copy()
    common[:, : shape.root] = common[0, : shape.root]
    tokens[:, : shape.common] = np.repeat(common, together, axis=0)
    return tokens


def tree_of(rows: TokenRows, shape: TreeShape) -> Batch:
    """Return whole groups of the rows of a shape as a tree, or some rows of one group."""
    count = rows.tokens.shape[0]
    groups = max(shape.groups * count // shape.rows, 1)
    root = prefix_of(shape.root) if groups > 1 else 0
    return planted(rows.for_ours(), Tree(groups, prefix_of(shape.common), root=root))


def parts_of(shape: TreeShape) -> int:
    """Return in how many equal parts the rows of a batch are computed one after the other."""
    length = shape.common + shape.own
    counts = (n for n in range(1, shape.rows) if shape.rows % n == 0)
    fitting = (n for n in counts if shape.rows // n * length <= _MOST_INPUTS)
    return next(fitting, shape.rows)


def sides_of(config: dict, shape: TreeShape) -> dict[str, Side]:
    """Return the implementations with their batches of one shape."""
    base = random_base(config, 0)
    adapters = Adapters.random(base, RANK, SCALE, 0)

    def fresh() -> Base:
        return replace(base, model=copy.deepcopy(base.model))

    def dense() -> Base:
        own = fresh()
        modules = [(path, _dense(module)) for path, module in quantized_modules(own.model)]
        replace_modules(own.model, modules)
        return own

    rows = TokenRows(tokens_of(shape, config["vocab_size"]), shape.common + 1)
    parts = parts_of(shape)
    part = TokenRows(rows.tokens[: shape.rows // parts], rows.offset)
    of_mlx_lm, of_rows = part.for_mlx_lm(), part.for_ours()
    return {
        SAME_BLAS: Side(MlxLmTrainer(dense, adapters), of_mlx_lm, of_mlx_lm, parts),
        ROWS: Side(Ours(fresh, adapters, "dense"), of_rows, of_rows, parts),
        TREE: Side(Ours(fresh, adapters, "dense"), tree_of(rows, shape), tree_of(part, shape)),
    }


def measure(sides: dict[str, Side], rounds: int) -> None:
    """Compare the first losses of all sides, and time so many steps of each, forth and back.

    Raises:
        LossesDiffer: a side has another loss of the same rows at its first step.
    """

    def batches() -> Steps:
        expected: list[float] = []
        for name, side in sides.items():
            _, loss = yield from side.step(side.checked)
            expected = expected or [loss]
            check_losses(expected, [loss], name, TOLERANCE[_dtype()])

        for number in range(rounds):
            for name in list(sides) if number % 2 == 0 else reversed(sides):
                yield from sides[name].timed()

    sides[SAME_BLAS].implementation.train(batches())


def _dtype() -> str:
    """Return the dtype of a random base, by name."""
    return "float32" if runtime.on_cpu() else "bfloat16"


def _dense(module: nn.Module) -> nn.Module:
    """Return a linear or an embedding with the weights of a quantized one."""
    weight = frozen_weight(module).dense()
    kind = nn.Embedding if isinstance(module, nn.QuantizedEmbedding) else nn.Linear
    dense = kind(1, 1) if kind is nn.Embedding else kind(1, 1, bias=False)
    dense.weight = weight
    dense.freeze()
    return dense


def table(sides: dict[str, Side]) -> str:
    """Return seconds, memory and ratios of the sides, for people."""
    tree = min(sides[TREE].seconds)
    lines = []
    for name, side in sides.items():
        seconds, gb = min(side.seconds), side.peak_bytes / 1e9
        parts = f", {side.parts} parts" if side.parts > 1 else ""
        lines.append(f"{name:22} {seconds:8.2f} s  {seconds / tree:6.2f}  {gb:6.2f} GB{parts}")
    return "\n".join(lines)


def records(
    here: Environment, name: str, blocks: int, shape: TreeShape, sides: dict[str, Side]
) -> list[Record]:
    """Return the seconds of a step and the peak of every side, against rows."""
    rows = min(sides[ROWS].seconds)
    about = f"{shape.name}, rank {RANK}, {blocks} block{'s' * (blocks > 1)}"

    new_records = []
    for side_name, side in sides.items():
        note = f"{_dtype()}; the vocabulary is cut as the number of blocks is."
        if side.parts > 1:
            note += f" Timed on a part of the rows, {side.parts} times."
        new_records.append(
            record(
                here,
                f"trees {name}",
                side_name,
                about,
                "step",
                "s",
                side.seconds,
                dtype=_dtype(),
                baseline=ROWS,
                ratio=min(side.seconds) / rows,
                peak_mb=side.peak_bytes / 1e6,
                note=note,
            )
        )
    return new_records


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser("python -m benchmarks trees", description=__doc__.split("\n")[0])
    p.add_argument(
        "--model", action="append", choices=MODELS, help="geometry, repeatable: %(choices)s [all]"
    )
    p.add_argument("--blocks", type=_positive, default=1, metavar="N", help="of the model [1]")
    p.add_argument("--rounds", type=_positive, default=2, metavar="N", help="that are timed [2]")
    p.add_argument(
        "--shape",
        type=int,
        action="append",
        metavar="N",
        help="number of a shape, repeatable [all]",
    )
    history.add_option(p)
    return p


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, but is {value}")
    return value


def _cut(config: dict, blocks: int) -> dict:
    """Return a config of few blocks, with a vocabulary that is as much smaller."""
    share = blocks / config["num_hidden_layers"]
    vocab_size = round(config["vocab_size"] * share / 64) * 64
    return config | {"num_hidden_layers": blocks, "vocab_size": vocab_size}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all shapes; 1 if losses differ."""
    options = parser().parse_args(arguments)
    here, new_records = Environment.here(), []
    chosen = options.shape or range(1, len(SHAPES) + 1)

    try:
        for name in options.model or MODELS:
            for number in chosen:
                shape = SHAPES[number - 1]
                sides = sides_of(_cut(MODELS[name], options.blocks), shape)
                measure(sides, options.rounds)
                print(f"{name}, {shape.name}\n{table(sides)}\n", flush=True)
                new_records += records(here, name, options.blocks, shape, sides)
    except LossesDiffer as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1

    history.append(new_records, options.history)
    return 0


if __name__ == "__main__":
    sys.exit(main())
