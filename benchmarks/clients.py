"""Clients of `packs serve --train` whose calls wait at once: in one pass, and in one pass each.

A step is a pass over the rows of every client, and the update of each client's model. All rows have
as many tokens. The server's trainer computes them, without HTTP.

    python -m benchmarks clients --clients 2 --tokens 88,304
    python -m benchmarks clients --predicted --model qwen3-4b,qwen3-0.6b --tokens 88,304,1024
"""

import sys
import time
from collections.abc import Sequence

import numpy as np

from mlx_packs.packs.base import Base
from mlx_packs.serving.slots import PackSlots
from mlx_packs.serving.train.batches import Row, batch_of
from mlx_packs.serving.train.losses import LOSSES
from mlx_packs.serving.train.passes import Part
from mlx_packs.serving.train.trainer import AdamStep, Adapters, Trainer

from .apple_gpu.capture import StepJob
from .joint import Joint, Options, Seconds

RANK = 16
_STEP = AdamStep(1e-4, (0.9, 0.95), 1e-8, 0.0, 0.0)
_WARM_UP = 2  # steps of both that are not timed


def parts_of(trainer: Trainer, tokens: int, options: Options) -> list[Part]:
    """Return the rows of each client, with a model of its own."""
    parts = []
    for seed in range(options.number):
        model = trainer.create(Adapters(RANK, seed))
        inputs = np.random.default_rng(seed).integers(0, 4000, tokens).astype(np.int32)
        row = Row(inputs, inputs, {"weights": 1.0})
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


def measure(base: Base, tokens: int, options: Options) -> Seconds:
    """Return seconds of steps of the clients in turn, and together, alternating."""
    slots = PackSlots(base, options.path)
    trainer = Trainer(slots)
    parts = parts_of(trainer, tokens, options)
    in_turn = []
    together = []
    for _ in range(options.rounds * options.steps + _WARM_UP):
        in_turn.append(step(trainer, [[part] for part in parts]))
        together.append(step(trainer, [parts]))

    slots.close()
    return in_turn[_WARM_UP:], together[_WARM_UP:]


def job(number: int, config: dict, batch: int, length: int) -> StepJob:
    """Return a step of the server for a number of clients."""
    return StepJob(config=config, batch=batch, length=length, packs=number, clients=True)


CLIENTS = Joint("clients", "clients", "clients", "mlx_packs in turn", measure, job)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure or predict, print and record."""
    parser = CLIENTS.parser(__doc__.split("\n")[0], 2, [88, 304])
    return CLIENTS.run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
