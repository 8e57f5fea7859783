"""Ten thousand steps, swaps and texts on the tiny base, and whether memory stays as it is.

Each of the three runs in a process of its own: `train_pack` with its checkpoints, `Base.attach` among
packs of two shapes (and no pack), `complete` with and without a pack. The slope is that of a straight
line through the resident bytes after the first tenth; its noise is what the samples around that line
make of it, corrected for how alike neighbours are. Memory alone is looked at, so that a busy machine
does not matter.

    nice python -m benchmarks soak
"""

import argparse
import csv
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlx_packs.bases.files import TINY
from mlx_packs.config.schema import LoRAConfig, TrainConfig
from mlx_packs.inference.generate import complete
from mlx_packs.packs.base import load_base
from mlx_packs.runtime import mx
from mlx_packs.training.run import train_pack

from . import alone, figures, history, report
from .history import Environment, Record, record
from .steady import Samples
from .swap import random_pack

_SETTLED = 0.1  # share of a run before its memory counts
Line = tuple[int, float, float]  # count, resident MB, MB that MLX keeps


@dataclass(frozen=True)
class Slope:
    """MB of growth over a run after its first tenth, and the standard error of that."""

    growth_mb: float
    noise_mb: float

    @property
    def within_noise(self) -> bool:
        """Whether it is less than three standard errors, or than a megabyte."""
        return abs(self.growth_mb) <= max(3 * self.noise_mb, 1.0)


def slope(counts: Sequence[float], sizes: Sequence[float]) -> Slope:
    """Return the growth that a straight line through the settled samples shows."""
    first = int(len(counts) * _SETTLED)
    x, y = np.asarray(counts[first:], float), np.asarray(sizes[first:], float)
    line = np.polyfit(x, y, 1)
    rest = y - np.polyval(line, x)
    spread = np.sqrt((rest**2).sum() / max(1, len(x) - 2) / ((x - x.mean()) ** 2).sum())
    total = float((rest**2).sum())
    alike = float((rest[:-1] * rest[1:]).sum()) / total if total else 0.0
    alike = min(max(alike, 0.0), 0.99)
    length = x[-1] - x[0]
    noise = spread * np.sqrt((1 + alike) / (1 - alike)) * length
    return Slope(round(float(line[0] * length), 3) + 0.0, round(float(noise), 3))  # no -0.0


def _line(count: int) -> Line:
    return count, alone.rss_bytes() / 1e6, (mx.get_active_memory() + mx.get_cache_memory()) / 1e6


def _repeated(count: int, every: int, action: Callable[[int], None]) -> list[Line]:
    """Do something so many times, and note the memory every so often."""
    lines = []
    for i in range(1, count + 1):
        action(i)
        if i % every == 0:
            lines.append(_line(i))
    return lines


def steps(count: int, every: int) -> list[Line]:
    """Train, with checkpoints every hundred batches."""
    display = Samples(every)
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            json.dumps({"text": f"Example {i} has a few words, of no meaning."}) for i in range(500)
        ]
        data = Path(folder) / "rows.jsonl"
        data.write_text("\n".join(rows), encoding="utf-8")
        train = TrainConfig(
            iters=count,
            batch_size=1,
            max_seq_length=16,
            learning_rate=1e-4,
            matmul_path="dense",
            val_batches=2,
            test_batches=2,
        )
        lora = LoRAConfig(rank=4, num_layers=2)
        train_pack(TINY, str(data), lora, train, Path(folder) / "p", progress=display)
    return [(s.batch, s.rss_mb, s.active_mb + s.cache_mb) for s in display.samples]


def swaps(count: int, every: int) -> list[Line]:
    """Swap three packs, of two shapes, and none; a token goes through each."""
    base = load_base(TINY)
    packs = [random_pack(base, seed, rank) for seed, rank in ((0, 4), (1, 4), (2, 5))]
    token = mx.array([[1]])

    def swap(i: int) -> None:
        if i % 4 == 3:
            base.detach()
        else:
            base.attach(packs[i % 4])
        mx.eval(base.model(token))

    return _repeated(count, every, swap)


def texts(count: int, every: int) -> list[Line]:
    """Generate four tokens, with a pack and without one."""
    base = load_base(TINY)
    pack = random_pack(base, 0, 4)
    prompts = [base.tokenizer.encode(text) for text in ("The", "A list is", "She said that he")]

    def generate(i: int) -> None:
        if i % 100 < 50:
            base.attach(pack)
        else:
            base.detach()
        complete(base, prompts[i % len(prompts)], 4)

    return _repeated(count, every, generate)


WORK = {"training steps": steps, "swaps": swaps, "texts": texts}


def plot(lines: dict[str, list[Line]], file: Path) -> None:
    """Resident memory and what MLX keeps, a row for each kind of work."""
    with figures.saved(file, rows=len(lines), height=1.8) as axes:
        for ax, (name, samples) in zip(axes, lines.items(), strict=True):
            counts, resident, kept = zip(*samples, strict=True)
            grown = slope(counts, resident)
            ax.plot(counts, resident, label="process")
            ax.plot(counts, kept, label="MLX, kept and cached")
            change = f"{grown.growth_mb:+.1f} ± {grown.noise_mb:.1f} MB after the first tenth"
            ax.set(title=f"{counts[-1]:,} {name}: {change}", ylabel="MB", ylim=(0, None))
        axes[0].legend(loc="center right")


def records_of(lines: dict[str, list[Line]]) -> list[Record]:
    """Return the growth of each kind of work, for the history."""
    here, records = Environment.here(), []
    for name, samples in lines.items():
        counts, resident, kept = zip(*samples, strict=True)
        shape = f"{counts[-1]} {name}"
        for metric, sizes in (("process", resident), ("kept in MLX", kept)):
            grown = slope(counts, sizes)
            verdict = "within noise" if grown.within_noise else "more than noise"
            note = (
                f"{verdict}: standard error {grown.noise_mb:.2f} MB; growth by a straight line after "
                "the first tenth. Sizes alone count, the machine was not idle."
            )
            metric = f"growth: {metric}"
            records.append(
                record(
                    here,
                    "soak tiny",
                    "mlx_packs",
                    shape,
                    metric,
                    "MB",
                    [grown.growth_mb],
                    note=note,
                )
            )
    return records


def write_csv(lines: dict[str, list[Line]], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="", encoding="utf-8") as f:
        writer = csv.writer(f)
        writer.writerow(["work", "count", "rss_mb", "mlx_mb"])
        for name, samples in lines.items():
            writer.writerows((name, c, f"{rss:.6g}", f"{kept:.6g}") for c, rss, kept in samples)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks soak", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--count", type=int, default=10_000, metavar="N", help="[10000]")
    parser.add_argument("--every", type=int, default=50, metavar="N", help="samples [50]")
    parser.add_argument("--alone", choices=list(WORK), help=argparse.SUPPRESS)
    parser.add_argument(
        "--out",
        type=Path,
        default=figures.IMAGES / "soak",
        metavar="FILE",
        help="where .csv and .png go [benchmarks/images/soak]",
    )
    history.add_option(parser)
    options = parser.parse_args(arguments)
    if options.count < 3 * options.every:
        parser.error("--every: there must be three samples of each at least")
    size = ["--count", str(options.count), "--every", str(options.every)]
    if options.alone:
        lines = WORK[options.alone](options.count, options.every)
        print(json.dumps(lines))
        return 0
    try:
        lines = {name: alone.run("soak", ["--alone", name, *size]) for name in WORK}
    except alone.Failed as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    write_csv(lines, options.out.with_suffix(".csv"))
    plot(lines, options.out.with_suffix(".png"))
    new_records = records_of(lines)
    history.append(new_records, options.history)
    print(report.render(new_records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
