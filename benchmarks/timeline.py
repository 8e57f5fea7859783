"""MLX's memory over one training step, as a thread sees it about a thousand times a second.

Drawn above what lies still (the base as it was loaded, what the matmul path adds, adapters and
optimizer), beside the sizes of what a step should not hold: whole logits, one block's T x T scores,
all weights dense. Marks show how long a forward pass takes by itself, and the peak.

    python -m benchmarks.timeline --workload qwen3_4b_block --recompute block
"""

import argparse
import functools
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlx.utils import tree_flatten

from mlx_packs.bases.files import TINY
from mlx_packs.bases.geometry import Heads
from mlx_packs.bench.implementations import SCALE, Adapters, Ours, TokenRows
from mlx_packs.config.choices import MATMUL_PATHS, POLICIES
from mlx_packs.errors import PackError
from mlx_packs.memory.matmul_path import dense_bytes
from mlx_packs.objectives.causal_lm import CausalLM, split_head
from mlx_packs.objectives.objective import arrays_of
from mlx_packs.packs.base import Base
from mlx_packs.runtime import mx

from . import figures, history, report
from .history import Environment, Record, record
from .implementations import ours_name
from .workloads import WORKLOADS, activation_dtype, base_bytes, base_name, load

_PERIOD_S = 1e-3


@dataclass(frozen=True)
class Timeline:
    """Memory in use over the time of a step."""

    seconds: list[float]  # since the step began
    bytes: list[int]  # in use by MLX then
    forward_s: float  # seconds that the forward and the loss take alone
    still: dict[str, int]  # bytes in use all the time, by part

    @property
    def peak(self) -> tuple[float, int]:
        """When, and how much."""
        return max(zip(self.seconds, self.bytes, strict=True), key=lambda at: at[1])


def sampled(call: Callable[[], object]) -> tuple[list[float], list[int]]:
    """MLX's memory while ``call`` runs. Its evaluation does not hold Python's lock."""
    seconds, results = [], []
    done = threading.Event()

    def watch() -> None:
        start = time.perf_counter()
        while not done.is_set():
            seconds.append(time.perf_counter() - start)
            results.append(mx.get_active_memory())
            time.sleep(_PERIOD_S)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        call()
    finally:
        done.set()
        thread.join()
    return seconds, results


def measure(options: argparse.Namespace) -> tuple[Timeline, dict[str, int], str, str]:
    """One step after one that is not watched; with it what to show beside it, shape and dtype."""
    workload = WORKLOADS[options.workload]
    base = load(workload, options.model, options.seed)
    packed = base_bytes(base)
    adapters = Adapters.random(base, options.rank, SCALE, options.seed)
    rows = TokenRows.random(
        options.batch_size or workload.batch_size,
        options.length or workload.length,
        base.vocab_size,
        options.seed,
    )
    path = options.matmul_path or workload.matmul_paths[0]
    ours = Ours(lambda: base, adapters, path, options.recompute)
    del adapters
    batch = rows.for_ours()
    ours.step(batch)
    mx.clear_cache()
    own = [
        *tree_flatten(base.model.trainable_parameters()),
        *tree_flatten(ours.stepper.optimizer.state),
    ]
    learned = sum(a.nbytes for _, a in own)
    copies = max(0, mx.get_active_memory() - packed - learned)
    still = {"base": packed, "of the matmul path": copies, "adapters and optimizer": learned}
    inputs = arrays_of(batch)

    def forward() -> float:
        start = time.perf_counter()
        mx.eval(CausalLM(base.model, split_head(base.model)).loss(inputs)[0])
        return time.perf_counter() - start

    forward_s = min(forward(), forward())
    mx.clear_cache()
    call = functools.partial(ours.stepper, batch, last=True, alone=True)
    seconds, results = sampled(call)
    line = Timeline(seconds, results, forward_s, still)
    shape = f"{ours_name(path, options.recompute)}, {_shape(rows)}, rank {options.rank}"
    return line, unwanted(base, rows), shape, activation_dtype(base)


def unwanted(base: Base, rows: TokenRows) -> dict[str, int]:
    """Bytes of what a step should not hold."""
    batch_size, length = rows.tokens.shape[0], rows.tokens.shape[1] - 1
    size = base.model.layers[0].input_layernorm.weight.dtype.size
    heads = Heads.of(base.config).heads
    return {
        "whole logits": batch_size * length * base.vocab_size * size,
        "T x T scores of a block": batch_size * heads * length * length * size,
        "all weights dense": dense_bytes(base.model),
    }


def _shape(rows: TokenRows) -> str:
    count, width = rows.tokens.shape
    return f"{count} x {width - 1}, {rows.targets} targets"


def plot(line: Timeline, limits: dict[str, int], title: str, file: Path) -> None:
    """Constant parts as bands, the step above them, marks, and the unwanted as bars beside it."""
    with figures.saved(file) as (ax,):
        ms = [1e3 * s for s in line.seconds]
        below = 0.0
        for shade, (name, size) in zip("468", line.still.items(), strict=True):
            ax.fill_between(ms, below, below + size / 1e6, color=f"0.{shade}", lw=0, label=name)
            below += size / 1e6
        megabytes = [size / 1e6 for size in line.bytes]
        ax.fill_between(
            ms, below, [max(below, h) for h in megabytes], alpha=0.6, lw=0, label="step"
        )
        when, most = line.peak
        ax.plot(1e3 * when, most / 1e6, "k.")
        ax.annotate(
            f"{most / 1e6:,.0f} MB",
            (1e3 * when, most / 1e6),
            textcoords="offset points",
            xytext=(6, 4),
        )
        ax.axvline(1e3 * line.forward_s, color="k", ls=":", lw=1, label="forward pass only")
        end = ms[-1]
        for i, (name, size) in enumerate(limits.items(), 1):
            ax.bar(
                end * (1 + 0.06 * i),
                size / 1e6,
                width=end * 0.04,
                bottom=below,
                color=f"C{i}",
                alpha=0.8,
                label=f"for scale: {name}",
            )
        ax.set(title=title, xlabel="ms", ylabel="MB in MLX", ylim=(0, None))
        ax.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))


def records(
    line: Timeline, limits: dict[str, int], task: str, shape: str, dtype: str
) -> list[Record]:
    """Megabytes of every part and of the step's own peak."""
    here = Environment.here()
    still = sum(line.still.values())
    sizes = {**line.still, "step, at most": line.peak[1] - still}
    sizes |= {f"for scale: {name}": size for name, size in limits.items()}
    note = f"{len(line.seconds)} samples; a sample may miss what lives for less than a millisecond."
    return [
        record(here, task, name, shape, "memory", "MB", [size / 1e6], dtype=dtype, note=note)
        for name, size in sizes.items()
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.timeline", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--workload", choices=WORKLOADS, default="tiny", help="base and batch [tiny]"
    )
    parser.add_argument(
        "--model", default=TINY, help="another checkpoint in place of the tiny base"
    )
    parser.add_argument("--matmul-path", choices=MATMUL_PATHS, help="[the workload's first]")
    parser.add_argument(
        "--recompute",
        choices=POLICIES,
        default="none",
        help="activation checkpointing policy [%(default)s]",
    )
    parser.add_argument("--batch-size", type=int, metavar="N", help="rows [the workload's]")
    parser.add_argument("--length", type=int, metavar="N", help="tokens of a row [the workload's]")
    parser.add_argument("--rank", type=int, default=8, metavar="N", help="of the adapters [8]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the plot [benchmarks/images/timeline_WORKLOAD.png]",
    )
    history.add_option(parser)
    options = parser.parse_args(arguments)
    name = base_name(options.workload, options.model)
    try:
        line, limits, shape, dtype = measure(options)
    except PackError as error:
        print(f"benchmarks: {error.message}", file=sys.stderr)
        return 2
    out = options.out or figures.IMAGES / f"timeline_{name}.png"
    plot(line, limits, f"{name}: {shape}", out)
    new_records = records(line, limits, f"timeline {name}", shape, dtype)
    history.append(new_records, options.history)
    print(report.render(new_records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
