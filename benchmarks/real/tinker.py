"""The unmodified SDK of Tinker on a real model: losses as those of `packs train`, rewards that rise.

A server has the base; the SDK is in processes of its own. It needs the package `tinker`.

    python -m benchmarks.real.tinker --work DIR --steps 50
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mlx_packs import Observer, train_pack
from mlx_packs.errors import PackError

from .. import alone, history
from ..history import Environment, record
from ..serve import free_port
from ..server_load import Target
from . import files
from .jobs import PARTS, RANK, RATE, WEIGHT_DECAY, Job, lora, prepare
from .trainers import train_config

ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
ADAM |= {"weight_decay": WEIGHT_DECAY}


@contextmanager
def served(model: str, states: Path) -> Iterator[str]:
    """Run a server that trains, and yield its address."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlx_packs", "serve", "--model", model]
    command += ["--no-key", "--train", str(states), "--port", str(port)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        _wait_for(url, server)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def _wait_for(url: str, server: subprocess.Popen) -> None:
    while server.poll() is None:
        try:
            Target(url).models()
            return
        except PackError:
            time.sleep(0.2)
    raise RuntimeError("the server ended")


def client(loop: str, url: str, **settings: Any) -> dict[str, Any]:
    """Return what a loop of the SDK results, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "settings.json"
        file.write_text(json.dumps(settings), encoding="utf-8")
        return alone.run("real.tinker_client", [loop, url, str(file)])


def losses_of_train(job: Job, rate: float) -> list[float]:
    """Return the loss of each step of `packs train` on a job, with the server's first adapters."""
    losses: list[float] = []

    class Steps(Observer):
        def on_step(self, line: dict) -> None:
            losses.append(line["loss"])

    out = Path(job.folder) / "tinker-pack"
    train_pack(
        job.model,
        str(job.data),
        lora(),
        replace(train_config(job), learning_rate=rate),
        out,
        callbacks=[Steps()],
        overwrite=True,
    )
    return losses


def compare(job: Job, url: str, clients: int, rate: float) -> tuple[dict[str, Any], float]:
    """Return what the SDK results on the batches of a job, and the largest difference of a loss."""
    settings = {
        "batches": job.batches,
        "adam": ADAM | {"learning_rate": rate},
        "lora": {"rank": RANK, "seed": job.seed, "train_unembed": False},
    }
    with ThreadPoolExecutor(clients) as pool:
        runs = [pool.submit(client, "supervised", url, **settings) for _ in range(clients)]
        results = [run.result() for run in runs]

    expected = np.array(losses_of_train(job, rate))
    seen = np.array([each["losses"] for each in results])
    return results[0], float(np.abs(seen / expected - 1).max())


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.real.tinker", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="folder for runs")
    parser.add_argument("--steps", type=int, default=50, metavar="N", help="[50]")
    parser.add_argument("--clients", type=int, default=2, metavar="N", help="at once [2]")
    parser.add_argument("--rate", type=float, default=RATE, metavar="RATE", help=f"[{RATE}]")
    parser.add_argument("--rl-steps", type=int, default=15, metavar="N", help="0 for none [15]")
    history.add_option(parser)
    options = parser.parse_args(arguments)

    part = replace(PARTS["banking77"], steps=options.steps)
    job = prepare(part, "tinker", 0, options.steps, files.smollm2(), options.work)
    with served(job.model, options.work / "states") as url:
        result, difference = compare(job, url, options.clients, options.rate)
        print(
            f"cross_entropy: {options.steps} steps of {options.clients} clients, loss "
            f"{result['losses'][0]:.4f} -> {result['losses'][-1]:.4f}; largest difference from "
            f"packs train {difference:.1e}",
            flush=True,
        )
        records = [_difference(options, difference)]
        if options.rl_steps:
            records += reinforced(job, url, result["path"], options.rl_steps)

    history.append(records, options.history)
    return 0


def reinforced(job: Job, url: str, path: str, steps: int) -> list[history.Record]:
    """Train a saved model by rewards on the messages of the first batch; print and record these."""
    rows = job.batches[0]
    adam = ADAM | {"learning_rate": 3e-4}
    settings = {"path": path, "rows": rows, "samples": 8, "steps": steps, "adam": adam}
    rewards = client("reinforce", url, **settings)["rewards"]

    shown = " ".join(f"{reward:.2f}" for reward in rewards)
    print(f"importance_sampling: right answers of 8 samples of {len(rows)} messages: {shown}")
    shape = f"{len(rows)} x 8 samples, {steps} steps"
    right = (100 * np.array(rewards)).tolist()
    return [
        _record(shape, "right answers at first", "%", right[:1]),
        _record(shape, "right answers at last", "%", right[-3:]),
    ]


def _difference(options: argparse.Namespace, difference: float) -> history.Record:
    shape = f"8 x {options.steps}, {options.clients} clients, rate {options.rate:g}"
    return _record(shape, "loss: difference from packs train", "", [difference])


def _record(shape: str, metric: str, unit: str, samples: Sequence[float]) -> history.Record:
    return record(
        Environment.here(), "tinker smollm2-135m banking77", "SDK", shape, metric, unit, samples
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
