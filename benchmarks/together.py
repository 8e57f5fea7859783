"""Packs in one batch against each alone: measured steps of this device, and predicted ones of Macs.

All rows have as many tokens. A step of several packs is timed against as many steps of one.

    python -m benchmarks together --packs 3 --tokens 84,300
    python -m benchmarks together --predicted --model qwen3-4b,qwen3-0.6b --tokens 84,300,2048
"""

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mlx_packs.config.data import DataConfig
from mlx_packs.config.lora import LoRAConfig
from mlx_packs.config.recipe import Recipe
from mlx_packs.config.schema import TrainConfig
from mlx_packs.display import QUIET, Display
from mlx_packs.packs.base import Base
from mlx_packs.training.observer import Observer
from mlx_packs.training.settings import Request
from mlx_packs.training.together import train_together

from .apple_gpu.capture import StepJob
from .joint import Joint, Options, Seconds

RANK = 16
_WARM_UP = 2  # steps that are not timed


class _Clock(Observer):
    """Notes when each step was over, in CPU time of this process: others may use the machine."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step(self, line: dict) -> None:
        self.times.append(time.process_time())

    def seconds(self) -> list[float]:
        """Seconds of steps; before the end of the last one the other packs are evaluated."""
        return np.diff(self.times)[_WARM_UP:-1].tolist()


def write_rows(folder: Path, base: Base, tokens: int) -> None:
    """Write texts that have this number of inputs each."""
    text = " word" * (tokens + 1)
    count = len(base.tokenizer.encode(text, add_special_tokens=False))
    if count != tokens + 1:
        text = base.tokenizer.decode([100] * (tokens + 1))
    for split, rows in (("train", 64), ("valid", 2)):
        lines = json.dumps({"text": text}) + "\n"
        (folder / f"{split}.jsonl").write_text(lines * rows, encoding="utf-8")


def measure(base: Base, tokens: int, options: Options) -> Seconds:
    """Return CPU seconds of as many steps as packs, each of one pack, and of joint steps."""
    alone: list[float] = []
    together: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder, base, tokens)
        for number in range(options.rounds):
            for packs, seconds in ((1, alone), (options.number, together)):
                out = folder / f"{number}-{packs}"
                seconds += _train(base, folder, out, packs, tokens, options)
    return [options.number * seconds for seconds in alone], together


def _train(
    base: Base, data: Path, out: Path, packs: int, tokens: int, options: Options
) -> list[float]:
    clock = _Clock()
    requests = []
    for seed in range(packs):
        train = TrainConfig(
            iters=options.steps + _WARM_UP + 2,
            batch_size=options.batch,
            max_seq_length=tokens + 1,
            seed=seed,
            matmul_path=options.path,
            recompute="none",
            test_batches=1,
            save_every=10_000,
            cache_frozen="off",
            share_prefix="off",
        )
        recipe = Recipe(
            LoRAConfig(rank=RANK),
            train,
            DataConfig(data=str(data)),
            run={"model": base.name, "out": str(out / str(seed))},
            names_data=True,
        )
        callbacks = (clock,) if seed == 0 else ()
        requests.append(Request(recipe, base, Display(QUIET), callbacks=callbacks))
    train_together(requests)
    return clock.seconds()


def job(number: int, config: dict, batch: int, length: int) -> StepJob:
    """Return a step of a number of packs."""
    return StepJob(config=config, batch=batch, length=length, rank=RANK, packs=number)


PACKS = Joint("together", "packs together", "packs", "mlx_packs alone", measure, job)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure or predict, print and record."""
    parser = PACKS.parser(__doc__.split("\n")[0], 3, [84, 300])
    return PACKS.run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
