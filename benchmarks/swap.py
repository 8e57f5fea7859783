"""Swapping packs: `Base.attach` against loading again with mlx-lm.

Packs are opened beforehand, as in a server; loading reads base and adapter from disk.

    python -m benchmarks.swap --model tiny
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import mlx_lm

from mlx_packs import LoRAConfig, Pack
from mlx_packs.adapters.attach import attach
from mlx_packs.bases.files import TINY
from mlx_packs.errors import PackError
from mlx_packs.packs.base import Base, load_base
from mlx_packs.packs.making import pack_of
from mlx_packs.runtime import mx

from . import history, report
from .history import Environment, Record, percentiles, record

BASELINE = "mlx_lm.load with the adapter"
# as earlier records name them
SAME, OTHER, ON_OFF = "swap_pack, same shape", "swap_pack, other shape", "applied, on and off"


def random_pack(base: Base, seed: int, rank: int) -> Pack:
    """A pack of random adapters on every projection."""
    attached = attach(base, LoRAConfig(rank=rank), seed=seed)
    try:
        mx.random.seed(seed)
        noise = {n: mx.random.normal(t.shape) * 0.01 for n, t in attached.tensors().items()}
        attached.load(noise, "noise")
        pack = pack_of(attached)
        mx.eval(pack.tensors)
        return pack
    finally:
        attached.detach()


def samples(base: Base, rank: int, rounds: int) -> dict[str, list[float]]:
    """Return milliseconds of every implementation, alternating; each swap is warm, as in a running server."""
    one, two = (random_pack(base, seed, rank) for seed in (0, 1))
    other = random_pack(base, 2, rank + 1)
    results: dict[str, list[float]] = {BASELINE: [], SAME: [], OTHER: [], ON_OFF: []}

    def timed(name: str, action) -> None:
        start = time.perf_counter()
        action()
        results[name].append((time.perf_counter() - start) * 1e3)

    def on_and_off(pack: Pack) -> None:
        with base.applied(pack):
            pass

    with tempfile.TemporaryDirectory() as folder:
        adapter = str(one.save(Path(folder) / "p").path)
        for turn in range(rounds):
            if turn % 20 == 0:
                timed(BASELINE, lambda: mlx_lm.load(str(base.path), adapter_path=adapter))
            base.attach(one)
            timed(SAME, lambda: base.attach(two))
            timed(OTHER, lambda: base.attach(other))
            timed(OTHER, lambda: base.attach(one))
            base.detach()
            timed(ON_OFF, lambda: on_and_off(two))
    return {name: values[min(2, len(values) - 1) :] for name, values in results.items()}


def records(results: dict[str, list[float]], model: str, rank: int) -> list[Record]:
    """Milliseconds of each way."""
    here = Environment.here()
    base = percentiles(results[BASELINE])["p50"]
    return [
        record(
            here,
            f"swap {Path(model).name}",
            way,
            f"rank {rank}, all projections",
            "swap",
            "ms",
            values,
            ratio=base / percentiles(values)["p50"],
            baseline=BASELINE,
        )
        for way, values in results.items()
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.swap", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--model", default=TINY, help="checkpoint folder [tiny]")
    parser.add_argument("--rank", type=int, default=16, help="of all adapters [16]")
    parser.add_argument("--rounds", type=int, default=200, help="swaps of each kind [200]")
    history.add_option(parser)
    options = parser.parse_args(arguments)
    try:
        base = load_base(options.model)
        new_records = records(
            samples(base, options.rank, options.rounds), options.model, options.rank
        )
    except PackError as error:
        print(f"benchmarks: {error.message}", file=sys.stderr)
        return 2
    history.append(new_records, options.history)
    print(report.render(new_records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
