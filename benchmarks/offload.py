"""Training steps with the base in memory and on disk, in turn, on the same batch.

Losses must be exactly equal. *Waited* is the most that a step can have waited for the disk: what it
read, by the rate that the disk was measured to have. The files are in the page cache if the machine
has room for them there.

    python -m benchmarks offload --model Qwen/Qwen3-8B --length 512 --batch-size 4
"""

import argparse
import sys
from dataclasses import dataclass, field

from mlx_packs.bases.files import TINY
from mlx_packs.bench.implementations import SCALE, Adapters, Ours, TokenRows
from mlx_packs.data.dataset import Batch
from mlx_packs.offload.disk import disk_rate
from mlx_packs.packs.base import Base, load_base
from mlx_packs.runtime import mx

from . import history, report
from .history import Environment, Record, record
from .workloads import activation_dtype, base_name

IN_MEMORY, ON_DISK = "in memory", "on disk"


@dataclass
class Place:
    """Where the base of an implementation is, and the steps that it took there."""

    base: Base
    ours: Ours
    resident_bytes: int
    step_ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    def step(self, batch: Batch) -> None:
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        milliseconds, loss = self.ours.step(batch)
        self.step_ms.append(milliseconds)
        self.losses.append(loss)
        transient = mx.get_peak_memory() - before
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes + transient)


def run(options: argparse.Namespace) -> tuple[list[Record], bool]:
    """Take the steps of both in turn; return their records and whether all losses are equal."""
    adapters = _adapters(options)
    places = {name: _place(name == ON_DISK, adapters, options) for name in (IN_MEMORY, ON_DISK)}
    rows = TokenRows.random(
        options.batch_size, options.length, places[ON_DISK].base.vocab_size, options.seed
    )
    batch = rows.for_ours()
    read_before = places[ON_DISK].base.blocks_on_disk.bytes_read

    for turn in range(options.rounds):
        order = list(places.values())
        for place in order if turn % 2 == 0 else order[::-1]:
            place.step(batch)
    same = places[IN_MEMORY].losses == places[ON_DISK].losses
    read = places[ON_DISK].base.blocks_on_disk.bytes_read - read_before
    return _records(places, read / options.rounds, options), same


def _adapters(options: argparse.Namespace) -> Adapters:
    base = load_base(options.model, offload=True)
    return Adapters.random(base, options.rank, SCALE, options.seed)


def _place(offload: bool, adapters: Adapters, options: argparse.Namespace) -> Place:
    before = mx.get_active_memory()
    base = load_base(options.model, offload=offload)
    ours = Ours(lambda: base, adapters, options.matmul_path, recompute="block")
    return Place(base, ours, mx.get_active_memory() - before)


def _records(
    places: dict[str, Place], step_bytes: float, options: argparse.Namespace
) -> list[Record]:
    here, memory, disk = Environment.here(), places[IN_MEMORY], places[ON_DISK]
    task = f"offload {base_name(TINY, options.model)}"
    shape = f"{options.batch_size} x {options.length}, rank {options.rank}"
    read_ms = 1e3 * step_bytes / disk_rate()
    waited = [read_ms / step for step in disk.step_ms]
    note = f"{disk.base.blocks_on_disk.on_disk} blocks; {step_bytes / 1e9:.3g} GB a step"
    slower = sorted(b / a for a, b in zip(memory.step_ms, disk.step_ms, strict=True))

    def of(name: str, metric: str, unit: str, samples: list[float], **fields: object) -> Record:
        dtype = activation_dtype(disk.base)
        return record(here, task, name, shape, metric, unit, samples, dtype=dtype, **fields)

    return [
        of(IN_MEMORY, "step", "ms", memory.step_ms, peak_mb=memory.peak_bytes / 1e6),
        of(
            ON_DISK,
            "step",
            "ms",
            disk.step_ms,
            peak_mb=disk.peak_bytes / 1e6,
            baseline=IN_MEMORY,
            ratio=slower[len(slower) // 2],
            note=note,
        ),
        of(ON_DISK, "times in memory", "x", slower),
        of(ON_DISK, "waited at most", "share", waited),
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks offload", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--model", default=TINY, help="base [tiny]")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--length", type=int, default=256, help="tokens of a row [256]")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--matmul-path", choices=("quantized", "transient"), default="transient")
    parser.add_argument("--rounds", type=int, default=4, help="steps of each [4]")
    parser.add_argument("--seed", type=int, default=0)
    history.add_option(parser)
    options = parser.parse_args(arguments)

    new_records, same = run(options)
    if not same:
        print("benchmarks: the losses in memory and on disk differ", file=sys.stderr)
        return 1
    history.append(new_records, options.history)
    print(report.render(new_records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
