"""A training step of every method beside plain LoRA's: speed, memory, and what Apple GPUs should take.

Each method is attached to the same base in a process of its own, and takes the same steps; methods
alternate. The base has the widths of Qwen3-0.6B, four blocks and random weights, which are quantized
as they are read. Beside the measured figures are those of Qwen3-4B, predicted from lazy graphs
(`python -m benchmarks graph`); no Mac was timed.

    python -m benchmarks methods
"""

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from mlx_packs import LoRAConfig, TrainConfig, load_base
from mlx_packs.adapters.trainable import find_method
from mlx_packs.config.choices import METHODS
from mlx_packs.objectives.causal_lm import CausalLM, split_head
from mlx_packs.optim import make_optimizer
from mlx_packs.runtime import mx
from mlx_packs.training.step import Stepper

from . import alone, history, report
from .apple_gpu.capture import OURS, Failed, StepJob
from .apple_gpu.libmlx import Unsupported
from .apple_gpu.step import lay_out
from .history import Environment, Record, record
from .workloads import QWEN3_4B

LORA = "lora"
BLOCKS, BATCH, LENGTH, TARGETS, RANK = 4, 2, 256, 128, 16
STEPS = 6  # that are timed, after two that are not
SHAPE = f"{BATCH} x {LENGTH}, {TARGETS} targets, rank {RANK}"
CASES = {name: {"method": name} for name in METHODS}
# Which graph a method's step has, on a GPU; full fine-tuning is not laid out.
GRAPHS = {LORA: LORA, "dora": "dora", "pissa": "pissa", "olora": "pissa", "loftq": LORA}
CHIP = "M4 Max"


def write_base(folder: Path) -> Path:
    """Write the dense checkpoint, by the script of the examples."""
    file = Path(__file__).parents[1] / "examples" / "random_checkpoint.py"
    spec = importlib.util.spec_from_file_location("random_checkpoint", file)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.write_checkpoint(folder, "qwen3-0.6b", BLOCKS, 8192, 0, dense=True)
    return folder


def measure(method: str, folder: str) -> dict:
    """Return seconds of attaching and of each step, and the peak of memory beyond the base."""
    train = TrainConfig(**CASES[method])
    base = load_base(folder, "none" if method == "full" else "affine4")
    lora = LoRAConfig(rank=RANK, num_layers=BLOCKS if method == "full" else -1)
    began = time.perf_counter()
    trainable = find_method(train.method).attach(base, lora, train, "dense")
    mx.eval(trainable.model.parameters())
    attach_s = time.perf_counter() - began
    base.model.train()
    optimizer = make_optimizer(train)
    optimizer.init(base.model.trainable_parameters())
    objective = CausalLM(base.model, split_head(base.model))
    stepper = Stepper(base.model, objective.loss, optimizer, train.max_grad_norm)
    tokens = mx.random.randint(1, 8000, (BATCH, LENGTH), key=mx.random.key(1))
    positions = mx.arange(0, BATCH * LENGTH, BATCH * LENGTH // TARGETS)
    targets = mx.random.randint(1, 8000, (TARGETS,), key=mx.random.key(2))
    batch = tokens, positions, targets, mx.ones((TARGETS,))
    for _ in range(2):
        stepper(batch, TARGETS, True, True)
    mx.reset_peak_memory()
    weights, seconds = mx.get_active_memory(), []
    for _ in range(STEPS):
        began = time.perf_counter()
        stepper(batch, TARGETS, True, True)
        seconds.append(time.perf_counter() - began)
    peak = (mx.get_peak_memory() - weights) / 1e6
    return {"attach_s": attach_s, "step_s": seconds, "peak_mb": peak}


def predicted() -> dict[str, float]:
    """Return the times of a step of Qwen3-4B on an Apple GPU over LoRA's, by method."""
    names = list(dict.fromkeys(GRAPHS.values()))
    size = {"config": QWEN3_4B, "batch": 4, "length": 512, "rank": RANK}
    steps = lay_out([(OURS, StepJob(**size, method=name)) for name in names], [CHIP])
    seconds = {name: step.whole.seconds[CHIP] for name, step in zip(names, steps, strict=True)}
    return {method: seconds[graph] / seconds[LORA] for method, graph in GRAPHS.items()}


def records(results: dict[str, list[dict]], ratios: dict[str, float]) -> list[Record]:
    here, lines = Environment.here(), []
    rates = {
        method: [BATCH * LENGTH / s for run in runs for s in run["step_s"]]
        for method, runs in results.items()
    }
    lora = statistics.median(rates[LORA])
    for method, runs in results.items():
        of_method = partial(record, here, "methods", method, SHAPE, baseline=LORA)
        ratio = statistics.median(rates[method]) / lora
        lines += [
            of_method("trained", "tokens/s", rates[method], ratio=ratio),
            of_method("step beyond weights", "MB", [run["peak_mb"] for run in runs]),
            of_method("attaching", "s", [run["attach_s"] for run in runs]),
        ]
        if method in ratios:
            title = f"predicted {CHIP}, Qwen3-4B"
            lines.append(of_method(title, f"times {LORA}'s seconds", [ratios[method]]))
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks methods", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=3, help="of all methods [3]")
    parser.add_argument("--alone", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--base", help=argparse.SUPPRESS)
    history.add_option(parser)
    options = parser.parse_args(arguments)
    if options.alone:
        print(json.dumps(measure(options.alone, options.base)))
        return 0
    results: dict[str, list[dict]] = {method: [] for method in CASES}
    try:
        ratios = predicted()
        with tempfile.TemporaryDirectory() as folder:
            base = write_base(Path(folder) / "base")
            for turn in range(options.rounds):
                for method in list(CASES)[:: 1 if turn % 2 == 0 else -1]:
                    print(f"round {turn + 1}: {method}", file=sys.stderr)
                    own = alone.run("methods", ["--alone", method, "--base", str(base)])
                    results[method].append(own)
    except (alone.Failed, Failed, Unsupported) as error:
        print(f"benchmarks: methods: {error}", file=sys.stderr)
        return 2
    new_records = records(results, ratios)
    history.append(new_records, options.history)
    print(report.render(new_records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
