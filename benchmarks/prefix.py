"""Adapters on the top quarter of the blocks, 5 epochs: ours with cached frozen activations and without.

Both take the same rows in the same order; the time is that of the whole run, computing the cache
included. Losses of all steps are compared first; if they differ, no time is printed and the exit is 1. Then
the two implementations alternate, in the order A B B A.

    python -m benchmarks prefix --workload tiny
"""

import argparse
import os
import sys
import time
from dataclasses import dataclass, field

import mlx.optimizers as optimizers
import numpy as np
from mlx.utils import tree_map

from mlx_packs.adapters.attach import attach
from mlx_packs.bases.files import TINY
from mlx_packs.bench.implementations import LEARNING_RATE, SCALE, TokenRows
from mlx_packs.bench.race import TOLERANCE, LossesDiffer
from mlx_packs.config.choices import MATMUL_PATHS
from mlx_packs.config.schema import LoRAConfig, TrainConfig
from mlx_packs.data.batches import training_set
from mlx_packs.data.encoding import Example, Examples
from mlx_packs.data.sampler import Sampler
from mlx_packs.data.shapes import sequence_inputs
from mlx_packs.display import QUIET, Display
from mlx_packs.files import CACHE_VARIABLE
from mlx_packs.objectives.causal_lm import CausalLM, split_head
from mlx_packs.objectives.frozen_activations import open_frozen_activations
from mlx_packs.packs.base import Base
from mlx_packs.runtime import mx
from mlx_packs.training.step import Stepper

from . import history, report
from .history import Environment, Record, record
from .workloads import QWEN3_4B, WORKLOADS, Workload, activation_dtype, base_name, load

EPOCHS = 5
EIGHT_BLOCKS = Workload(  # of the tiny base's geometry, which has six: a quarter of eight is whole
    QWEN3_4B
    | {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 768, "vocab_size": 4096}
    | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},
    4,
    128,
    ("transient", "dense"),
)
_WORKLOADS = {"eight_blocks": EIGHT_BLOCKS}


def work_named(name: str) -> Workload:
    """A workload of this benchmark, or of all that train."""
    return _WORKLOADS[name] if name in _WORKLOADS else WORKLOADS[name]


@dataclass
class Implementation:
    """Ours on one matmul path, with the cache or without, and the seconds of its runs."""

    base: Base
    examples: Examples
    train: TrainConfig
    lora: LoRAConfig
    seconds: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)

    def __post_init__(self):
        model = self.base.model
        self.attached = attach(self.base, self.lora, matmul_path=self.train.matmul_path)
        keys = mx.random.split(mx.random.key(self.train.seed), len(self.attached.specs))
        started = self.attached.tensors()
        for path, key in zip(self.attached.specs, keys, strict=True):  # so A has gradients at once
            shape = started[f"{path}.lora_b"].shape
            started[f"{path}.lora_b"] = mx.random.normal(shape, key=key) * (shape[0] ** -0.5 / 4)
        self.started = started
        self.attached.recompute(self.train.recomputes)
        head = split_head(model)
        self.cache = open_frozen_activations(
            self.attached,
            head,
            self.train,
            self.examples,
            None,
            Display(QUIET),
        )
        self.optimizer = optimizers.Adam(learning_rate=LEARNING_RATE)
        self.optimizer.init(model.trainable_parameters())
        self.stepper = Stepper(
            model,
            CausalLM(model, head).loss,
            self.optimizer,
            max_grad_norm=None,
        )
        model.train()
        mx.eval(model.parameters(), self.optimizer.state)

    def run(self) -> list[float]:
        """All epochs from the start, with nothing cached; the losses of the steps."""
        self.attached.load(self.started, "benchmark")
        self.optimizer.state.update(tree_map(mx.zeros_like, self.optimizer.state))
        self.optimizer.learning_rate = LEARNING_RATE
        mx.eval(self.base.model.parameters(), self.optimizer.state)
        if self.cache is not None:
            self.cache.close()
        mx.clear_cache()
        mx.reset_peak_memory()
        start = time.perf_counter()
        train = self.train
        sampler = Sampler(
            self.examples.lengths,
            train.batch_size,
            sequence_inputs(train.max_seq_length),
            train.seed,
        )
        batches = training_set(self.examples, sampler).batches()
        losses = []
        for _ in range(self.train.iters):
            batch = next(batches)
            if self.cache is not None:
                batch = self.cache.prepare(batch)
            losses.append(self.stepper(batch, last=True, alone=True)[0])
        self.seconds.append(time.perf_counter() - start)
        self.peaks.append(mx.get_peak_memory())
        return losses


def race(
    name: str, plain: Implementation, cached: Implementation, rounds: int, tolerance: float
) -> None:
    """Compare all losses of both implementations, then time them in alternation.

    Raises: LossesDiffer before anything is timed.
    """
    _say(f"checking {name}")
    expected, results = plain.run(), cached.run()
    if not np.allclose(expected, results, rtol=tolerance, atol=0):
        worst = np.abs(np.array(results) / expected - 1).max()
        raise LossesDiffer(f"losses with the cache differ by {worst:.1e} from those without")
    for implementation in (plain, cached):
        implementation.seconds.clear()
        implementation.peaks.clear()
    for turn in range(2 * rounds):
        _say(f"turn {turn + 1} of {2 * rounds}: {name}")
        for implementation in (plain, cached) if turn % 2 == 0 else (cached, plain):
            implementation.run()


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr)


def _records(
    here: Environment,
    task: str,
    shape: str,
    path: str,
    dtype: str,
    plain: Implementation,
    cached: Implementation,
) -> list[Record]:
    without, ours = f"without the cache, {path}", f"mlx_packs {path}"
    whole = f"{EPOCHS} epochs"
    times = [a / b for a, b in zip(plain.seconds, cached.seconds, strict=True)]
    states = cached.cache.total_bytes / 1e6
    note = f"states of all rows: {states:.1f} MB; computing them is part of the time"
    new_records = []
    for name, implementation in ((without, plain), (ours, cached)):
        ratio = float(np.median(plain.seconds) / np.median(implementation.seconds))
        new_records.append(
            record(
                here,
                task,
                name,
                shape,
                whole,
                "s",
                implementation.seconds,
                dtype=dtype,
                baseline=without,
                ratio=ratio,
                peak_mb=max(implementation.peaks) / 1e6,
                note=note,
            )
        )
    new_records.append(record(here, task, ours, shape, "times without", "x", times, dtype=dtype))
    return new_records


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks prefix", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--workload", choices=[*_WORKLOADS, *WORKLOADS], default="eight_blocks")
    parser.add_argument("--model", default=TINY, help="base of the tiny workloads [tiny]")
    parser.add_argument("--matmul-path", choices=MATMUL_PATHS)
    parser.add_argument("--rows", type=int, default=32, help="rows of the data [32]")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2, help="of forth and back [2]")
    parser.add_argument("--seed", type=int, default=0)
    history.add_option(parser)
    options = parser.parse_args(arguments)
    os.environ[CACHE_VARIABLE] = "off"  # a run of before must not pay for this one
    workload = work_named(options.workload)
    here, new_records = Environment.here(), []
    for path in (options.matmul_path,) if options.matmul_path else workload.matmul_paths:
        bases = [load(workload, options.model, options.seed) for _ in range(2)]
        blocks = len(bases[0].model.layers)
        top = max(1, blocks // 4)
        rows = TokenRows.random(options.rows, workload.length, bases[0].vocab_size, options.seed)
        target = np.arange(rows.tokens.shape[1]) >= rows.offset
        examples = Examples(
            [Example(row, target, "benchmark") for row in rows.tokens], "text", "all"
        )
        dtype = activation_dtype(bases[0])
        plain, cached = (
            Implementation(
                base,
                examples,
                TrainConfig(
                    iters=EPOCHS * -(-options.rows // workload.batch_size),
                    batch_size=workload.batch_size,
                    max_seq_length=workload.length + 1,
                    matmul_path=path,
                    cache_frozen=cache,
                    recompute="none",
                    seed=options.seed,
                ),
                LoRAConfig(rank=options.rank, alpha=SCALE * options.rank, num_layers=top),
            )
            for base, cache in zip(bases, ("off", "on"), strict=True)
        )
        try:
            race(path, plain, cached, options.rounds, TOLERANCE[dtype])
        except LossesDiffer as error:
            print(f"benchmarks: {error}", file=sys.stderr)
            return 1
        shape = (
            f"{options.rows} rows of {workload.length}, batch {workload.batch_size}, top {top} of "
            f"{blocks} blocks, rank {options.rank}"
        )
        task = f"prefix {base_name(options.workload, options.model)}"
        new_records += _records(here, task, shape, path, dtype, plain, cached)
    history.append(new_records, options.history)
    print(report.render(new_records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
