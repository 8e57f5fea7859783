"""What benchmarks of joint steps share: several models in one step, against their steps in turn."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlx_packs.packs.base import Base, load_base

from . import history
from .apple_gpu.capture import OURS, StepJob
from .apple_gpu.seconds import CHIPS, DEFAULT_CHIPS, STEP_S
from .apple_gpu.step import lay_out
from .apple_gpu.tables import predicted
from .history import Environment, Record, record
from .workloads import CONFIGS

TOGETHER = "mlx_packs together"
_FIXED_S = 1.0  # of a step, as published timings of short rows on an M1 Max have it: 0.6 to 1.4 s

Options = argparse.Namespace
Seconds = tuple[list[float], list[float]]  # of steps in turn, and of joint ones


@dataclass(frozen=True)
class Joint:
    """A kind of joint step.

    Attributes:
        name: Of the benchmark.
        task: Of measured records; predictions have "graph " before it.
        unit: What there are several of, such as "packs"; the name of an option.
        in_turn: The implementation that takes their steps in turn.
        measure: Returns the seconds of steps on a base, with rows of a number of tokens.
        job: Returns the step of a number of them, of a model's config, a batch size and a length.
    """

    name: str
    task: str
    unit: str
    in_turn: str
    measure: Callable[[Base, int, Options], Seconds]
    job: Callable[[int, dict, int, int], StepJob]

    def parser(
        self, description: str, number: int, tokens: Sequence[int]
    ) -> argparse.ArgumentParser:
        """Return the parser of the command line."""
        p = argparse.ArgumentParser(f"python -m benchmarks {self.name}", description=description)
        add = p.add_argument
        add("--predicted", action="store_true", help="predict steps of Macs, not measure here")
        add("--model", metavar="NAME", help="base, or with --predicted geometries [tiny; qwen3-4b]")
        add(
            f"--{self.unit}",
            dest="number",
            type=int,
            default=number,
            metavar="N",
            help=f"[{number}]",
        )
        add("--batch", type=int, default=1, metavar="N", help="rows of each [1]")
        shown = ",".join(map(str, tokens))
        add("--tokens", type=_numbers, default=tokens, metavar="N,...", help=f"of a row [{shown}]")
        add("--steps", type=int, default=8, metavar="N", help="that are timed in a round [8]")
        add("--rounds", type=int, default=2, metavar="N", help="of both [2]")
        add("--path", default="dense", metavar="PATH", help="matmul path, when measuring [dense]")
        chips = list(CHIPS)
        add("--chip", nargs="+", default=list(DEFAULT_CHIPS), choices=chips, help="of Macs")
        history.add_option(p)
        return p

    def run(self, options: Options) -> int:
        """Measure or predict, print and record."""
        records = self._predict(options) if options.predicted else self._measure(options)
        history.append(records, options.history)
        return 0

    def _measure(self, options: Options) -> list[Record]:
        base = load_base(options.model or "tiny")
        records = []
        for tokens in options.tokens:
            in_turn, together = self.measure(base, tokens, options)
            ratio = float(np.median(together) / np.median(in_turn))
            shape = self._shape(Path(base.name).name, tokens, options)
            print(
                f"{shape}: {np.median(together):.3f} s, in turn {np.median(in_turn):.3f} s, "
                f"ratio {ratio:.2f}",
                flush=True,
            )
            fields = {"metric": "CPU time", "note": f"matmul path {options.path}"}
            records += self._records(self.task, shape, (in_turn, together), fields)
        return records

    def _predict(self, options: Options) -> list[Record]:
        note = predicted(options.chip)
        models = (options.model or "qwen3_4b").replace("-", "_").replace(".", "_")
        records = []
        for model in models.split(","):
            for tokens in options.tokens:
                shape = self._shape(model, tokens, options)
                jobs = [
                    self.job(number, CONFIGS[model], options.batch, tokens)
                    for number in (1, options.number)
                ]
                one, joint = (step.whole for step in lay_out([(OURS, job) for job in jobs]))

                shown = []
                for chip in options.chip:
                    in_turn = options.number * one.seconds[chip]
                    seconds = joint.seconds[chip]
                    slow_in_turn = in_turn + options.number * (_FIXED_S - STEP_S)
                    with_fixed = (seconds - STEP_S + _FIXED_S) / slow_in_turn
                    ratio = f"ratio {seconds / in_turn:.2f} ({with_fixed:.2f})"
                    shown.append(f"{chip} {seconds:.2f} s, {ratio}")
                    fields = {"metric": chip, "note": note, "dtype": "bfloat16"}
                    both = ([in_turn], [seconds])
                    records += self._records(f"graph {self.task}", shape, both, fields)
                print(f"{shape}: {'; '.join(shown)}", flush=True)

        print(f"In brackets: with a fixed time of {_FIXED_S:g} s a step. {note}")
        return records

    def _shape(self, model: str, tokens: int, options: Options) -> str:
        return f"{model}, {options.number} {self.unit} of {options.batch} x {tokens}"

    def _records(self, task: str, shape: str, seconds: Seconds, fields: dict) -> list[Record]:
        in_turn, together = seconds
        ratio = float(np.median(together) / np.median(in_turn))
        here = Environment.here()
        common = {"shape": shape, "unit": "s", "baseline": self.in_turn, **fields}
        return [
            record(here, task, self.in_turn, samples=in_turn, ratio=1.0, **common),
            record(here, task, TOGETHER, samples=together, ratio=ratio, **common),
        ]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
