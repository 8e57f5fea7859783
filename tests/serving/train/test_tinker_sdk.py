"""The unmodified SDK of Tinker, in processes of its own, against servers on the bundled base."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from mlx_packs import LoRAConfig, Pack, TrainConfig, train_pack
from mlx_packs.training.step import BatchStep
from tests.helpers.bases import first_blocks
from tests.helpers.documents import ROOT
from tests.helpers.rows import CHATS, write_rows
from tests.helpers.serving import SECONDS, until

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("default")]
CLIENT = Path(__file__).with_name("sdk_client.py")
ADAM = {"learning_rate": 1e-3}


def run_client(scenario: str, url: str, **given: object) -> dict:
    command = [sys.executable, str(CLIENT), scenario, url, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=5 * SECONDS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def rows(tokens):
    cut = [tokens, tokens[: len(tokens) // 2]]
    return [
        {"tokens": row[:-1], "target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)}
        for row in cut
    ]


def trained_batches(monkeypatch, **options: object) -> tuple[list[list[dict]], list[float]]:
    """Run `packs train`; return its batches as rows whose weights are shares of the mean, and its losses."""
    batches, losses = [], []
    start = BatchStep.start

    def recorded(step: BatchStep, batch, last: bool, alone: bool):
        batches.append(_rows_of(batch))
        started = start(step, batch, last, alone)
        losses.append(started.read()[0])
        return started

    monkeypatch.setattr(BatchStep, "start", recorded)
    train_pack(**options)
    return batches, losses


def _rows_of(batch) -> list[dict]:
    tokens, owners = batch.inputs["tokens"], batch.inputs["owners"]
    width = tokens.shape[1]
    targets, weights = np.zeros(tokens.size, int), np.zeros(tokens.size)
    real = owners >= 0
    places = batch.inputs["positions"][real]
    targets[places] = batch.inputs["targets"][real]
    weights[places] = 1 / batch.denominator
    return [
        {
            "tokens": row.tolist(),
            "target_tokens": targets[i * width :][:width].tolist(),
            "weights": weights[i * width :][:width].tolist(),
        }
        for i, row in enumerate(tokens)
    ]


def test_cross_entropy_is_that_of_packs_train(server, tmp_path, monkeypatch):
    data = write_rows(tmp_path / "data", train=CHATS * 2)
    settings = {"batch_size": 3, "iters": 8, "max_seq_length": 64, "matmul_path": "quantized"}
    settings |= {"lr_schedule": "constant", "warmup_steps": 0, "share_prefix": "off"}
    run = {"data": data, "out": tmp_path / "run", "base": first_blocks(2)}
    run["train"] = TrainConfig(seed=7, learning_rate=1e-3, **settings)
    run["lora"] = LoRAConfig(rank=4, alpha=32.0)
    batches, losses = trained_batches(monkeypatch, **run)
    adam = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    adam |= {"weight_decay": 0.01, "grad_clip_norm": 1.0}
    lora = {"rank": 4, "seed": 7, "train_unembed": False}
    answer = run_client("supervised", server.url, batches=batches, adam=adam, lora=lora)
    assert answer["rank"] == 4 and len(losses) == 8
    np.testing.assert_allclose(answer["losses"], losses, rtol=1e-5)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo"])
def test_rewards_rise(server, loss):
    limit = server.worker.base.vocab_size // 8
    given = {"steps": 8, "samples": 8, "limit": limit, "rate": 1e-2, "loss": loss}
    rewards = run_client("reinforce", server.url, **given)["rewards"]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.2, rewards


def test_the_rest_of_the_sdk(server, rows):
    answer = run_client("everything", server.url, rows=rows)
    assert answer["scores"][0] is None and all(score < 0 for score in answer["scores"][1:])
    assert answer["tokens"][0] == answer["tokens"][1] and len(answer["tokens"][0]) == 4
    assert answer["ids"] == 2
    assert answer["saved"].endswith("/sampler_weights/final")
    assert "'dro' is not supported here" in answer["errors"]["loss"]
    assert "loss_fn_config: is not supported here" in answer["errors"]["settings"]
    assert "topk_sample_logprobs: must be 0" in answer["errors"]["top"]
    assert "no gradient" in answer["errors"]["update"]
    assert answer["errors"]["saved"].startswith("NotFoundError")
    assert not list(server.folder.glob("*/*/final"))


def test_the_page(server):
    """The blocks of docs/tinker.md run as they are, one after the other."""
    text = (ROOT / "docs" / "tinker.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2 and len(blocks[0].splitlines()) <= 16
    code = "\n".join(blocks).replace("http://127.0.0.1:8080", server.url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    *losses, path = done.stdout.split("\n")[:21]
    assert float(losses[-1].split()[1]) < 0.5 * float(losses[0].split()[1])
    assert path.startswith("tinker://") and path.endswith("/weights/tuples")


class ServerProcess:
    """`packs serve --train` in a process, which is killed on leaving."""

    def __init__(self, folder: Path, port: int | None = None) -> None:
        self._port = port or free_port()
        command = [sys.executable, "-m", "mlx_packs", "serve", "--model", "tiny", "--grace", "0.5"]
        command += ["--no-key", "--port", str(self._port), "--train", str(folder)]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        self.url = f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> "ServerProcess":
        until(self._answers, SECONDS)
        return self

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0

    def computes(self) -> bool:
        """Whether a sample or a forward pass is computed, or waits to be."""
        with urllib.request.urlopen(f"{self.url}/health") as answer:
            health = json.load(answer)
        return health["running"] > 0 or health["training"]["waiting"] > 0

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(SECONDS)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("number", "samples"),
    [(signal.SIGTERM, False), (signal.SIGTERM, True), (signal.SIGINT, False)],
)
def test_waiting_clients_end_with_the_server(tmp_path, tokens, number, samples):
    row = {"tokens": tokens[:-1] * 20, "target_tokens": tokens[1:] * 20}
    given = json.dumps({"rows": [row] * 8, "samples": samples})

    with ServerProcess(tmp_path / "states") as server:
        command = [sys.executable, str(CLIENT), "waiting", server.url, given]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, text=True, **pipes) as client:
            assert client.stdout.readline() == "waiting\n"
            until(server.computes, SECONDS)
            server.process.send_signal(number)
            try:
                out, err = client.communicate(timeout=SECONDS)
            finally:
                client.kill()
        assert server.process.wait(SECONDS) == 128 + number

    assert (client.returncode, out) == (1, ""), err
    last = err.strip().splitlines()[-1]
    assert "The server is shutting down. Continue from a saved state" in last, err


@pytest.mark.nightly
def test_a_killed_server_loses_nothing_that_was_saved(tmp_path, rows):
    port = free_port()
    with ServerProcess(tmp_path / "states", port) as server:
        first = run_client("saved", server.url, rows=rows, adam=ADAM)
    (folder,) = (tmp_path / "states").glob("*/weights/three")
    Pack.open(folder).verify()

    time.sleep(0.1)
    with ServerProcess(tmp_path / "states", port) as server:
        again = run_client("saved", server.url, rows=rows, adam=ADAM, path=first["path"])
    assert first["before"][0] > first["after"][0]
    np.testing.assert_allclose(again["after"], first["after"], rtol=1e-6)
