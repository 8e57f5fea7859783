"""A whole run on the tiny base and the passages: seconds until the same held-out loss.

Ours trains for ``--iters`` batches; the mean held-out loss it reaches is the target. mlx-lm's real
trainer then runs, with the same recipe, until it reaches that loss; between two evaluations the time is
interpolated. The clock counts loading, tokenizing, training and writing the adapters. It is
stopped during imports and evaluations: a separate process evaluates every implementation on the
held-out examples.

    python -m benchmarks.train_run
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import mlx.optimizers as optimizers
import mlx_lm
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.tuner.datasets import CacheDataset, load_dataset
from mlx_lm.tuner.trainer import TrainingArgs, TrainingCallback, iterate_batches, train
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_packs.bases.files import TINY, tiny_checkpoint
from mlx_packs.config.schema import DataConfig, LoRAConfig, TrainConfig
from mlx_packs.data.batches import evaluation_batches
from mlx_packs.data.dataset import Batch
from mlx_packs.data.encoding import EncodingOptions, encode
from mlx_packs.errors import PackError
from mlx_packs.evaluation.perplexity import Scorer
from mlx_packs.evaluation.rows import evaluation_rows
from mlx_packs.nn.quantized import apply_matmul_path
from mlx_packs.objectives.causal_lm import split_head
from mlx_packs.packs.base import Base, load_base
from mlx_packs.runtime import mx
from mlx_packs.training.run import train_pack

from . import alone, history, patched, report, stock
from .history import Environment, Record, record
from .implementations import PATCHED, SAME_BLAS, STOCK
from .workloads import PASSAGES

OURS, EVALUATION = "mlx_packs", "evaluation"
RANK, SCALE, RATE, WARMUP, BATCH_SIZE, MAX_LENGTH = 16, 2.0, 1e-3, 5, 4, 256
MLX_LM_LAYERS = {"rank": RANK, "scale": SCALE, "dropout": 0.0}
_FARTHER = 2  # mlx-lm gives up after so many times the batches of ours


def held_out(base: Base, rows: int) -> list[Batch]:
    """The first so many held-out rows, as ours reads them."""
    columns = DataConfig(data=str(PASSAGES))
    chosen = evaluation_rows(columns, "test")[:rows]
    options = EncodingOptions("completion", MAX_LENGTH, base.vocab_size)
    examples = encode(chosen, base.tokenizer, columns, options)
    return evaluation_batches(examples, BATCH_SIZE, MAX_LENGTH)


def held_out_loss(options: argparse.Namespace) -> float:
    """Mean held-out loss of a target, in nats: of the base, with a pack or with mlx-lm's adapters.
    Weights are dense, which is the fastest."""
    base = load_base(TINY)
    if options.pack:
        base.attach(options.pack, "dense")
    else:
        if options.adapters:
            linear_to_lora_layers(base.model, -1, MLX_LM_LAYERS)
            base.model.load_weights(options.adapters, strict=False)
        apply_matmul_path(base.model, "dense")
    batches = held_out(base, options.held_out)
    return Scorer(base.model, split_head(base.model)).score(batches).nll


def evaluation(options: argparse.Namespace, *what: str) -> float:
    """The `held_out_loss`, by a process of its own with our BLAS. Raises: alone.Failed."""
    arguments = ["--alone", EVALUATION, "--held-out", str(options.held_out), *what]
    return alone.run("train_run", arguments, "auto")["loss"]


class Clock:
    """Seconds that count."""

    def __init__(self):
        self.start = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def stopped(self, evaluation: Callable[[], float]) -> float:
        """Return the result of ``evaluation``, with the clock stopped."""
        before = time.perf_counter()
        results = evaluation()
        self.start += time.perf_counter() - before
        return results


def measure_ours(options: argparse.Namespace) -> dict:
    """Train by `train_pack`, timed from beginning to end; held-out losses before and after."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "pack"
        clock = Clock()
        run = train_pack(
            TINY,
            str(PASSAGES),
            LoRAConfig(rank=RANK, alpha=SCALE * RANK),
            TrainConfig(
                iters=options.iters,
                batch_size=BATCH_SIZE,
                max_seq_length=MAX_LENGTH,
                learning_rate=RATE,
                warmup_steps=WARMUP,
                lr_schedule="constant",
                max_grad_norm=0.0,
                loss_on="completion",
                val_batches=0,
                test_batches=1,
            ),
            out,
        )
        seconds, peak = clock.seconds, mx.get_peak_memory()
        start, end = evaluation(options), evaluation(options, "--pack", str(out))
    print(f"{OURS}: {seconds:.1f} s, loss {start:.4f} to {end:.4f}", file=sys.stderr)
    return {
        "curve": [[0, 0.0, start], [options.iters, seconds, end]],
        "peak": peak,
        "matmul_path": run.report["matmul_path"],
    }


class _Reached(Exception):
    """The target loss, or the last batch that is waited for."""


class _Evaluations(TrainingCallback):
    """Evaluates on the held-out rows every few batches of mlx-lm's trainer, with the clock stopped."""

    def __init__(self, clock: Clock, evaluation: Callable[[], float], target: float, limit: int):
        self.clock, self.evaluation, self.target, self.limit = clock, evaluation, target, limit
        self.curve: list[tuple[int, float, float]] = []

    def on_train_loss_report(self, train_info: dict) -> None:
        seconds, iteration = self.clock.seconds, train_info["iteration"]
        loss = self.clock.stopped(self.evaluation)
        self.curve.append((iteration, seconds, loss))
        print(f"  batch {iteration}: {seconds:.1f} s, loss {loss:.4f}", file=sys.stderr)
        if loss <= self.target or iteration >= self.limit:
            raise _Reached


def measure_mlx_lm(options: argparse.Namespace) -> dict:
    """mlx-lm's load, data sets, LoRA layers and trainer, until the target loss."""
    is_patched = options.alone == PATCHED
    mx.random.seed(options.seed)
    np.random.seed(options.seed)
    with tempfile.TemporaryDirectory() as folder, stock.mlx(reference_blas=False):
        clock = Clock()
        model, tokenizer = mlx_lm.load(str(tiny_checkpoint()))
        data = SimpleNamespace(
            data=str(PASSAGES), mask_prompt=True, train=True, test=False, hf_dataset=False
        )
        rows, *_ = load_dataset(data, tokenizer)
        model.freeze()
        linear_to_lora_layers(model, -1, MLX_LM_LAYERS)

        def look_at_adapters() -> float:
            file = Path(folder) / "looked_at.safetensors"
            mx.save_safetensors(str(file), dict(tree_flatten(model.trainable_parameters())))
            return evaluation(options, "--adapters", str(file))

        rise = optimizers.linear_schedule(RATE / (WARMUP + 1), RATE, WARMUP)
        rate = optimizers.join_schedules([rise, lambda _: mx.array(RATE)], [WARMUP])
        evaluations = _Evaluations(
            clock, look_at_adapters, options.target, _FARTHER * options.iters
        )
        try:
            train(
                model,
                optimizers.AdamW(learning_rate=rate),
                patched.RowsByLength(rows) if is_patched else CacheDataset(rows),
                args=TrainingArgs(
                    batch_size=BATCH_SIZE,
                    iters=evaluations.limit + 1,
                    max_seq_length=MAX_LENGTH,
                    steps_per_report=options.eval_every,
                    clear_cache_threshold=patched.KEEP_CACHE if is_patched else 0,
                    adapter_file=str(Path(folder) / "adapters.safetensors"),
                ),
                loss=patched.loss,
                iterate_batches=patched.batches if is_patched else iterate_batches,
                training_callback=evaluations,
            )
        except _Reached:
            pass
    return {"curve": evaluations.curve, "peak": mx.get_peak_memory()}


def time_at(curve: list, target: float) -> tuple[float, float] | None:
    """Batches and seconds at which a curve of (batch, seconds, loss) first is at the target."""
    for (batch, seconds, loss), (batch_2, seconds_2, loss_2) in zip(curve, curve[1:], strict=False):
        if loss_2 <= target:
            share = (loss - target) / (loss - loss_2)
            return batch + share * (batch_2 - batch), seconds + share * (seconds_2 - seconds)
    return None


def records(results: dict[str, dict], target: float, options: argparse.Namespace) -> list[Record]:
    """Seconds and batches to the target of every implementation; an implementation that gave up has those until then."""
    here = Environment.here()
    reached = {
        name: time_at(implementation["curve"], target) for name, implementation in results.items()
    }
    spent = {
        name: reached[name] or implementation["curve"][-1][:2]
        for name, implementation in results.items()
    }
    new_records = []
    for name, implementation in results.items():
        batches, seconds = spent[name]
        shape = f"{options.iters} batches of ours of {BATCH_SIZE}, rank {RANK}"
        note = f"Held-out loss {implementation['curve'][0][2]:.3f} to {target:.3f}, seconds without imports."
        if reached[name] is None:
            note = (
                f"{name} had not reached {target:.4f} after {batches:.0f} batches (loss "
                f"{implementation['curve'][-1][2]:.4f}): its time is a lower bound."
            )
        if "matmul_path" in implementation:
            note = f"Matmul path chosen by ours: {implementation['matmul_path']}."
        about = {
            "baseline": STOCK,
            "peak_mb": implementation["peak"] / 1e6,
            "note": note,
            "stock_blas": name == STOCK and stock.blas_is_replaced(),
        }
        ratio = spent[STOCK][1] / seconds if STOCK in spent else None
        new_records += [
            record(
                here,
                "train_run tiny",
                name,
                shape,
                "to the loss",
                "s",
                [seconds],
                ratio=ratio,
                **about,
            ),
            record(here, "train_run tiny", name, shape, "batches", "", [batches], **about),
        ]
    return new_records


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "python -m benchmarks.train_run", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    p.add_argument("--iters", type=int, default=48, metavar="N", help="batches of our run [48]")
    p.add_argument(
        "--eval-every",
        type=int,
        default=6,
        metavar="N",
        help="batches of mlx-lm between evaluations at the held-out rows [6]",
    )
    p.add_argument("--held-out", type=int, default=60, metavar="N", help="rows evaluated at [60]")
    p.add_argument(
        "--implementation",
        action="append",
        choices=(STOCK, SAME_BLAS, PATCHED),
        help="of mlx-lm, repeatable [all]",
    )
    p.add_argument("--seed", type=int, default=0, help="of mlx-lm's adapters [0]")
    p.add_argument("--alone", help=argparse.SUPPRESS)
    p.add_argument("--target", type=float, help=argparse.SUPPRESS)
    p.add_argument("--pack", help=argparse.SUPPRESS)
    p.add_argument("--adapters", help=argparse.SUPPRESS)
    history.add_option(p)
    return p


def run(options: argparse.Namespace, arguments: list[str]) -> list[Record]:
    """Ours, then each implementation of mlx-lm to the loss of ours; one that fails is left out, and reported.

    Raises: alone.Failed if nothing is left to compare with.
    """
    print(OURS, file=sys.stderr)
    ours = alone.run("train_run", [*arguments, "--alone", OURS])
    start, target = ours["curve"][0], ours["curve"][-1][2]
    if not target < start[2]:
        raise PackError(f"--iters {options.iters}: ours has not learned anything in so few.")
    results = {}
    for implementation in options.implementation:
        print(implementation, file=sys.stderr)
        try:
            if implementation != SAME_BLAS:  # once for each kind of step, g++ compiles its kernels
                short = ["--alone", implementation, "--target", "inf", "--eval-every", "2"]
                alone.run("train_run", [*arguments, *short])
            results[implementation] = alone.run(
                "train_run",
                [*arguments, "--alone", implementation, "--target", str(target)],
                "off" if implementation == STOCK else None,
            )
            results[implementation]["curve"].insert(0, start)
        except alone.Failed as error:
            if not results:
                raise
            print(f"benchmarks: {error}; recorded without it.", file=sys.stderr)
    return records(results | {OURS: ours}, target, options)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(arguments)
    try:
        if options.alone:
            measured = {OURS: measure_ours, EVALUATION: lambda of: {"loss": held_out_loss(of)}}
            print(json.dumps(measured.get(options.alone, measure_mlx_lm)(options)))
            return 0
        options.implementation = options.implementation or [
            STOCK,
            *[SAME_BLAS] * stock.blas_is_replaced(),
            PATCHED,
        ]
        new_records = run(options, arguments)
    except (PackError, alone.Failed) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    history.append(new_records, options.history)
    print(report.render(new_records))
    return 0 if set(options.implementation) <= {r.implementation for r in new_records} else 1


if __name__ == "__main__":
    sys.exit(main())
