"""Packs in one batch against each alone: measured steps of this device, and predicted ones of Macs.

All rows have as many tokens. A step of several packs is timed against as many steps of one.

    python -m benchmarks together --packs 3 --tokens 84,300
    python -m benchmarks together --predicted --model qwen3-4b,qwen3-0.6b --tokens 84,300,2048
"""

import argparse
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
from mlx_packs.packs.base import Base, load_base
from mlx_packs.training.observer import Observer
from mlx_packs.training.settings import Request
from mlx_packs.training.together import train_together

from . import history
from .apple_gpu.capture import OURS, StepJob
from .apple_gpu.seconds import CHIPS, DEFAULT_CHIPS, STEP_S
from .apple_gpu.step import lay_out
from .apple_gpu.tables import predicted
from .history import Environment, Record, record
from .workloads import CONFIGS

ALONE, TOGETHER = "mlx_packs alone", "mlx_packs together"
RANK = 16
_WARM_UP = 2  # steps that are not timed
_FIXED_S = 1.0  # of a step, as published timings of short rows on an M1 Max have it: 0.6 to 1.4 s


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
    """Write texts of so many inputs each."""
    text = " word" * (tokens + 1)
    count = len(base.tokenizer.encode(text, add_special_tokens=False))
    if count != tokens + 1:
        text = base.tokenizer.decode([100] * (tokens + 1))
    for split, rows in (("train", 64), ("valid", 2)):
        lines = json.dumps({"text": text}) + "\n"
        (folder / f"{split}.jsonl").write_text(lines * rows, encoding="utf-8")


def measure(base: Base, tokens: int, options: argparse.Namespace) -> tuple[list, list]:
    """Return CPU seconds of steps of one pack, and of steps of all packs, one after the other."""
    alone: list[float] = []
    together: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder, base, tokens)
        for number in range(options.rounds):
            for packs, seconds in ((1, alone), (options.packs, together)):
                out = folder / f"{number}-{packs}"
                seconds += _train(base, folder, out, packs, tokens, options)
    return alone, together


def _train(
    base: Base, data: Path, out: Path, packs: int, tokens: int, options: argparse.Namespace
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


def measured(here: Environment, options: argparse.Namespace) -> list[Record]:
    """Measure steps of this device, and print them."""
    base = load_base(options.model or "tiny")
    records = []
    for tokens in options.tokens:
        alone, together = measure(base, tokens, options)
        one = float(np.median(alone))
        ratio = float(np.median(together)) / (options.packs * one)
        shape = f"{Path(base.name).name}, {options.packs} packs of {options.batch} x {tokens}"
        print(f"{shape}: {np.median(together):.3f} s, alone {one:.3f} s each, ratio {ratio:.2f}")
        for name, samples, times in ((ALONE, alone, 1.0), (TOGETHER, together, ratio)):
            fields = {"baseline": ALONE, "ratio": times, "note": f"matmul path {options.path}"}
            shown = [sample * (options.packs if name == ALONE else 1) for sample in samples]
            records.append(
                record(here, "packs together", name, shape, "CPU time", "s", shown, **fields)
            )
    return records


def predict(here: Environment, options: argparse.Namespace) -> list[Record]:
    """Predict steps of Macs from their graphs, and print them."""
    records = []
    for model in (options.model or "qwen3_4b").replace("-", "_").replace(".", "_").split(","):
        for tokens in options.tokens:
            job = {"config": CONFIGS[model], "batch": options.batch, "length": tokens}
            jobs = [StepJob(**job, rank=RANK, packs=packs) for packs in (1, options.packs)]
            one, several = (step.whole for step in lay_out([(OURS, job) for job in jobs]))
            shape = f"{model}, {options.packs} packs of {options.batch} x {tokens}"
            shown = []
            for chip in options.chip:
                times = [each.seconds[chip] for each in (one, several)]
                ratio = times[1] / (options.packs * times[0])
                slow = [seconds - STEP_S + _FIXED_S for seconds in times]
                with_fixed = slow[1] / (options.packs * slow[0])
                shown.append(f"{chip} {times[1]:.2f} s, ratio {ratio:.2f} ({with_fixed:.2f})")
                records += _predictions(here, shape, chip, times, ratio, options)
            print(f"{shape}: {'; '.join(shown)}", flush=True)
    print(f"In brackets: with a fixed time of {_FIXED_S:g} s a step. {predicted(options.chip)}")
    return records


def _predictions(
    here: Environment,
    shape: str,
    chip: str,
    times: Sequence[float],
    ratio: float,
    options: argparse.Namespace,
) -> list[Record]:
    values = ((ALONE, options.packs * times[0], 1.0), (TOGETHER, times[1], ratio))
    fields = {"dtype": "bfloat16", "baseline": ALONE, "note": predicted(options.chip)}
    return [
        record(here, "graph packs together", name, shape, chip, "s", [value], ratio=own, **fields)
        for name, value, own in values
    ]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser("python -m benchmarks together", description=__doc__.split("\n")[0])
    add = p.add_argument
    add("--predicted", action="store_true", help="predict steps of Macs, instead of measuring here")
    add("--model", metavar="NAME", help="base, or with --predicted geometries [tiny; qwen3-4b]")
    add("--packs", type=int, default=3, metavar="N", help="in one batch [3]")
    add("--batch", type=int, default=1, metavar="N", help="rows of each pack [1]")
    add("--tokens", type=_numbers, default=[84, 300], metavar="N,...", help="of a row [84,300]")
    add("--steps", type=int, default=8, metavar="N", help="that are timed in a round [8]")
    add("--rounds", type=int, default=2, metavar="N", help="of both [2]")
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
