"""SIGINT, SIGTERM and SIGHUP end a run saved, from the base's loading to the pack's writing."""

import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_packs import train_pack
from mlx_packs.errors import Interrupted, RunStopped
from mlx_packs.packs.pack import Pack
from mlx_packs.reading import sha256
from mlx_packs.training import run as run_module
from mlx_packs.training.fit import Fit
from mlx_packs.training.run_folder import latest_checkpoint
from tests.helpers.observers import observe
from tests.helpers.rows import CHATS, write_rows
from tests.helpers.runs import LORA, TRAIN
from tests.layers.test_trainer import batch, settings, three, trainer_of

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SLOW = pytest.mark.slow
ONE_SIGNAL = [pytest.param(n, marks=SLOW) if n != signal.SIGTERM else n for n in SIGNALS]
SETTINGS = replace(TRAIN, iters=4, save_every=100)
SMALL = ("--matmul-path", "dense", "--batch-size", "2")


def arrive(number: int, at: int = 2):
    """A signal at a batch."""

    def on_step(line):
        if line["batch"] == at:
            os.kill(os.getpid(), number)

    return on_step


@pytest.fixture
def rows(tmp_path) -> Path:
    return write_rows(tmp_path / "rows", train=CHATS, valid=CHATS[:1])


def tensors_of(pack: Path) -> str:
    return sha256(next(pack.glob("*.safetensors")))


@pytest.mark.parametrize("number", ONE_SIGNAL)
@pytest.mark.parametrize("at", [2, pytest.param(4, marks=SLOW)])
def test_a_signal_ends_a_run_saved(dense_tiny, rows, tmp_path, monkeypatch, number, at):
    handlers = [signal.getsignal(n) for n in SIGNALS]
    out = tmp_path / "p"
    with monkeypatch.context() as patch:
        observe(patch, on_step=arrive(number, at))
        with pytest.raises(RunStopped) as stopped:
            train_pack(dense_tiny, rows, LORA, SETTINGS, out)
    assert handlers == [signal.getsignal(n) for n in SIGNALS]
    error = stopped.value
    assert (error.exit_code, error.code) == (128 + number, "interrupted")
    assert error.checkpoint == latest_checkpoint(tmp_path / "p-run")
    assert error.checkpoint.name == f"step-00000{at}"
    assert f"out={str(out)!r}, resume=True" in str(error)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"rows", "p-run"}
    train_pack(dense_tiny, rows, LORA, SETTINGS, out, resume=True)
    train_pack(dense_tiny, rows, LORA, SETTINGS, tmp_path / "whole")
    assert tensors_of(out) == tensors_of(tmp_path / "whole")


def kill_in(monkeypatch, place, name: str, number: int) -> None:
    """A signal arrives before a function does its work."""
    function = getattr(place, name)

    def killed(*args, **kwargs):
        os.kill(os.getpid(), number)
        return function(*args, **kwargs)

    monkeypatch.setattr(place, name, killed)


@pytest.mark.parametrize("number", ONE_SIGNAL)
@pytest.mark.parametrize(
    ("place", "name"),
    [
        (run_module, "load_base"),
        pytest.param(run_module, "make_tasks", marks=SLOW),
        pytest.param(run_module, "attach_method", marks=SLOW),
        pytest.param(run_module, "make_observers", marks=SLOW),
    ],
)
def test_before_the_loop_nothing_is_left(run, rows, here, monkeypatch, place, name, number):
    kill_in(monkeypatch, place, name, number)
    code, out, err = run("train", "-q", "--data", rows, "--out", "o/p", "--iters", 2)
    assert (code, out) == (128 + number, "")
    assert err.startswith("packs: interrupted") and err.count("\n") == 1
    assert not (here / "o").exists()


@pytest.mark.parametrize("number", ONE_SIGNAL)
@pytest.mark.parametrize(
    ("place", "name"), [pytest.param(Fit, "score", marks=SLOW), (Pack, "save")]
)
def test_after_the_loop_the_run_is_saved(run, rows, here, monkeypatch, place, name, number):
    args = ["train", "-q", "--data", rows, "--out", "p", "--iters", 2, *SMALL]
    with monkeypatch.context() as patch:
        kill_in(patch, place, name, number)
        code, _, err = run(*args)
    assert code == 128 + number and "step-000002" in err and err.count("\n") == 1
    assert sorted(p.name for p in here.iterdir() if p != rows) == ["p-run"]
    code, _, _ = run(*args, "--resume")
    assert code == 0 and (here / "p" / "pack.json").is_file()


@pytest.mark.parametrize(
    ("given", "continues"),
    [
        pytest.param(["--out", "a b", "--overwrite"], ["--out", "a b"], marks=SLOW),
        (["--adapter-path=p", "--resume-adapter-file", "start.safetensors"], ["--adapter-path=p"]),
        pytest.param(
            ["--resume-adapter-file=start.safetensors", "-q"],
            ["-q", "--out", "packs/rows"],
            marks=SLOW,
        ),
        pytest.param(["-c", "run.yaml"], ["-c", "run.yaml"], marks=SLOW),
    ],
)
def test_the_message_has_the_command_that_continues(run, rows, here, monkeypatch, given, continues):
    (here / "run.yaml").write_text("out: p\noverwrite: true\n")
    train_pack("tiny", rows, LORA, TRAIN, "first")
    (here / "start.safetensors").symlink_to(
        here / "first-run" / "step-000002" / "adapters.safetensors"
    )
    base = ["--data", str(rows), "--iters", "4", "--rank", "2", "--num-layers", "1", *SMALL]
    with monkeypatch.context() as patch:
        observe(patch, on_step=arrive(signal.SIGTERM))
        code, _, err = run("train", *base, *given)
    assert code == 143, err
    words = shlex.split(run.error.command)
    assert words == ["packs", "train", *base, *continues, "--resume"]
    assert f"`{run.error.command}`" in run.error.message
    assert run(*words[1:])[0] == 0


@pytest.mark.slow
def test_nohup_and_a_closed_terminal(rows, tmp_path):
    """A run that ignores SIGHUP goes on; another one is saved although nobody reads its messages."""
    code = f"""
import os, signal, sys
from mlx_packs.cli.main import main
from mlx_packs.training.observer import Observer
from mlx_packs.training.observers.registry import OBSERVERS
class Hangup(Observer):
    def on_step(self, line):
        if line["batch"] == 2:
            os.kill(os.getpid(), signal.SIGHUP)
OBSERVERS["test"] = lambda run: Hangup()
main(["train", "--data", {str(rows)!r}, "--iters", "3", "--out", sys.argv[1]])
"""
    for ignored, name, codes in ((True, "kept", 0), (False, "saved", 129)):
        leader, terminal = os.openpty()
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / name)],
            stdin=terminal,
            stdout=subprocess.DEVNULL,
            stderr=terminal,
            preexec_fn=(lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) if ignored else None,
        )
        os.close(terminal)
        os.close(leader)  # what is written to the terminal fails from now on
        assert process.wait() == codes
        last = latest_checkpoint(tmp_path / f"{name}-run").name
        assert last == ("step-000003" if ignored else "step-000002")
        assert (tmp_path / name).is_dir() == ignored


@pytest.mark.parametrize("number", SIGNALS)
def test_a_layer_trainer_saves_after_the_update(tmp_path, number):
    x, y = batch()
    accumulated = settings(grad_accumulation_steps=2)
    linears = three()
    trainer = trainer_of(linears, train=accumulated)

    def steps(trainer, count):
        for _ in range(count):
            trainer.step_lm(list(linears), x, y)

    with pytest.raises(Interrupted) as stopped, trainer.saving_on_signals(tmp_path / "t"):
        steps(trainer, 1)
        os.kill(os.getpid(), number)
        steps(trainer, 9)
    assert stopped.value.exit_code == 128 + number and "step-000002" in stopped.value.message
    again = trainer_of(linears, train=accumulated)
    again.resume(tmp_path / "t")
    steps(again, 2)
    steps(whole := trainer_of(linears, train=accumulated), 4)
    for name, tensor in whole.tensors().items():
        assert (tensor == again.tensors()[name]).all(), name


def test_layers_are_saved_when_the_signal_follows_the_last_step(tmp_path):
    linears = three()
    trainer = trainer_of(linears)
    x, y = batch()
    with pytest.raises(Interrupted), trainer.saving_on_signals(tmp_path / "t"):
        trainer.step_lm(list(linears), x, y)
        os.kill(os.getpid(), signal.SIGTERM)
    assert latest_checkpoint(tmp_path / "t")
