"""Clients of `packs serve --train` whose calls wait at once: in one pass, and in one pass each.

A step is a pass over the rows of every client, and the update of each client's model. All rows have
as many tokens. The server's trainer computes them, without HTTP.

    python -m benchmarks clients --clients 2 --tokens 88,304
    python -m benchmarks clients --predicted --model qwen3-4b,qwen3-0.6b --tokens 88,304,1024
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mlx_packs.packs.base import Base, load_base
from mlx_packs.serving.slots import PackSlots
from mlx_packs.serving.train.batches import Row, batch_of
from mlx_packs.serving.train.losses import LOSSES
from mlx_packs.serving.train.passes import Part
from mlx_packs.serving.train.trainer import AdamStep, Adapters, Trainer

from . import history
from .apple_gpu.capture import OURS, StepJob
from .apple_gpu.seconds import CHIPS, DEFAULT_CHIPS
from .apple_gpu.step import lay_out
from .apple_gpu.tables import predicted
from .history import Environment, Record, record
from .workloads import CONFIGS

IN_TURN, TOGETHER = "mlx_packs in turn", "mlx_packs together"
RANK = 16
_STEP = AdamStep(1e-4, (0.9, 0.95), 1e-8, 0.0, 0.0)
_WARM_UP = 2  # steps of both that are not timed


def parts_of(trainer: Trainer, tokens: int, options: argparse.Namespace) -> list[Part]:
    """Return the rows of each client, with a model of its own."""
    parts = []
    for seed in range(options.clients):
        model = trainer.create(Adapters(RANK, seed))
        inputs = np.random.default_rng(seed).integers(0, 4000, tokens).astype(np.int32)
        row = Row(inputs, inputs, {"weights": 1.0}, inputs.shape)
        batch = batch_of([row] * options.batch, range(options.batch), tokens)
        parts.append(Part(model, batch, LOSSES["cross_entropy"]))
    return parts


def step(trainer: Trainer, passes: Sequence[Sequence[Part]]) -> float:
    """Compute passes, and update each model; return CPU seconds of this process."""
    began = time.process_time()
    for parts in passes:
        for part, done in zip(parts, trainer.run(parts, backward=True), strict=True):
            trainer.add(part.model, done.grads)
            trainer.update(part.model, _STEP)
    return time.process_time() - began


def measure(base: Base, tokens: int, options: argparse.Namespace) -> tuple[list, list]:
    """Return seconds of steps of the clients in turn, and together, alternating."""
    slots = PackSlots(base, options.path)
    trainer = Trainer(slots)
    parts = parts_of(trainer, tokens, options)
    in_turn = []
    together = []
    for _ in range(options.steps + _WARM_UP):
        in_turn.append(step(trainer, [[part] for part in parts]))
        together.append(step(trainer, [parts]))

    slots.close()
    return in_turn[_WARM_UP:], together[_WARM_UP:]


def measured(here: Environment, options: argparse.Namespace) -> list[Record]:
    """Measure steps of this device, and print them."""
    base = load_base(options.model or "tiny")
    records = []
    for tokens in options.tokens:
        in_turn, together = measure(base, tokens, options)
        ratio = float(np.median(together) / np.median(in_turn))
        shape = f"{Path(base.name).name}, {options.clients} clients of {options.batch} x {tokens}"
        print(
            f"{shape}: {np.median(together):.3f} s, in turn {np.median(in_turn):.3f} s, "
            f"ratio {ratio:.2f}"
        )
        for name, samples, times in ((IN_TURN, in_turn, 1.0), (TOGETHER, together, ratio)):
            fields = {"baseline": IN_TURN, "ratio": times, "note": f"matmul path {options.path}"}
            records.append(record(here, "clients", name, shape, "CPU time", "s", samples, **fields))
    return records


def predict(here: Environment, options: argparse.Namespace) -> list[Record]:
    """Predict steps of Macs from their graphs, and print them."""
    records = []
    note = predicted(options.chip)
    for model in (options.model or "qwen3_4b").replace("-", "_").replace(".", "_").split(","):
        for tokens in options.tokens:
            job = {"config": CONFIGS[model], "batch": options.batch, "length": tokens}
            jobs = [StepJob(**job, packs=count, clients=True) for count in (1, options.clients)]
            one, several = (each.whole for each in lay_out([(OURS, job) for job in jobs]))

            shape = f"{model}, {options.clients} clients of {options.batch} x {tokens}"
            shown = []
            for chip in options.chip:
                in_turn = options.clients * one.seconds[chip]
                together = several.seconds[chip]
                ratio = together / in_turn
                shown.append(f"{chip} {together:.2f} s, ratio {ratio:.2f}")
                for name, value, times in ((IN_TURN, in_turn, 1.0), (TOGETHER, together, ratio)):
                    fields = {"dtype": "bfloat16", "baseline": IN_TURN, "note": note}
                    records.append(
                        record(
                            here, "graph clients", name, shape, chip, "s", [value],
                            ratio=times, **fields,
                        )
                    )  # fmt: skip
            print(f"{shape}: {'; '.join(shown)}", flush=True)
    print(note)
    return records


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser("python -m benchmarks clients", description=__doc__.split("\n")[0])
    add = p.add_argument
    add("--predicted", action="store_true", help="predict steps of Macs, instead of measuring here")
    add("--model", metavar="NAME", help="base, or with --predicted geometries [tiny; qwen3-4b]")
    add("--clients", type=int, default=2, metavar="N", help="whose calls wait at once [2]")
    add("--batch", type=int, default=1, metavar="N", help="rows of each client [1]")
    add("--tokens", type=_numbers, default=[88, 304], metavar="N,...", help="of a row [88,304]")
    add("--steps", type=int, default=12, metavar="N", help="that are timed [12]")
    add("--path", default="dense", metavar="PATH", help="matmul path, when measuring [dense]")
    chips = list(CHIPS)
    add("--chip", nargs="+", default=list(DEFAULT_CHIPS), choices=chips, help="of Macs")
    history.add_option(p)
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure or predict, print and record."""
    options = parser().parse_args(arguments)
    here = Environment.here()
    run = predict if options.predicted else measured
    history.append(run(here, options), options.history)
    return 0


if __name__ == "__main__":
    sys.exit(main())
