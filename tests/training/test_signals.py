"""SIGINT, SIGTERM and SIGHUP end a run saved, from the base's loading to the pack's writing."""

import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mlx_packs.errors import Interrupted, RunStopped
from mlx_packs.packs.pack import Pack
from mlx_packs.training import attached, fit, prepare
from mlx_packs.training.fit import Fit
from mlx_packs.training.run_folder import RunFolder
from tests.helpers.rows import CHATS, write_rows
from tests.helpers.runs import LORA
from tests.helpers.variants import slow_except
from tests.layers.test_trainer import batch, settings, three, trainer_of
from tests.training.conftest import interrupt_at, kill_in

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def rows(tmp_path) -> Path:
    return write_rows(tmp_path / "rows", train=CHATS, valid=CHATS[:1])


@pytest.fixture
def few(small_folder, rows) -> list[str]:
    """Flags of a run of two batches."""
    flags = "-q --iters 2 --matmul-path dense --batch-size 2 --data".split()
    return [*flags, str(rows), "--model", str(small_folder)]


@pytest.mark.parametrize(
    ("number", "at", "accumulate", "saved"),
    [
        (signal.SIGTERM, 2, 1, "step-000002"),
        (signal.SIGINT, 1, 2, "step-000002"),  # within an update, which is finished first
        (signal.SIGHUP, 4, 1, "step-000004"),
    ],
)
def test_a_signal_ends_a_run_saved(train, here, monkeypatch, number, at, accumulate, saved):
    handlers = [signal.getsignal(n) for n in SIGNALS]
    settings = {"iters": 4, "save_every": 100, "grad_accumulation_steps": accumulate}
    settings["lora"] = replace(LORA, dropout=0.2)

    with monkeypatch.context() as patch:
        interrupt_at(patch, at, number)
        with pytest.raises(RunStopped) as stopped:
            train(**settings)

    assert handlers == [signal.getsignal(n) for n in SIGNALS]
    error = stopped.value
    assert (error.exit_code, error.code) == (128 + number, "interrupted")
    assert error.checkpoint == RunFolder(Path("p-run")).latest_checkpoint()
    assert error.checkpoint.name == saved
    assert "out='p', resume=True" in str(error)
    assert {path.name for path in here.iterdir()} == {"d", "p-run"}

    files = [
        train(out, resume=resume, **settings).pack.path / "adapters.safetensors"
        for out, resume in (("p", True), ("whole", False))
    ]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    ("number", "place", "name"),
    [
        (signal.SIGTERM, prepare, "load_base"),
        (signal.SIGINT, prepare, "make_tasks"),
        (signal.SIGHUP, attached, "attach_method"),
        (signal.SIGTERM, fit, "make_observers"),
    ],
)
def test_before_the_loop_nothing_is_left(run, few, here, monkeypatch, number, place, name):
    kill_in(monkeypatch, place, name, number)
    code, out, err = run("train", *few, "--out", "o/p")
    assert (code, out) == (128 + number, "")
    assert err.startswith("packs: interrupted") and err.count("\n") == 1
    assert not (here / "o").exists()


@pytest.mark.parametrize(
    ("number", "place", "name"), [(signal.SIGTERM, Pack, "save"), (signal.SIGINT, Fit, "score")]
)
def test_after_the_loop_the_run_is_saved(run, rows, few, here, monkeypatch, number, place, name):
    with monkeypatch.context() as patch:
        kill_in(patch, place, name, number)
        code, _, err = run("train", *few, "--out", "p")
    assert code == 128 + number and "step-000002" in err and err.count("\n") == 1
    assert sorted(p.name for p in here.iterdir() if p != rows) == ["p-run"]
    assert run("train", *few, "--out", "p", "--resume")[0] == 0
    assert (here / "p" / "pack.json").is_file()


@pytest.mark.parametrize(
    ("given", "continues"),
    [
        (["--adapter-path=p", "--resume-adapter-file", "start.safetensors"], ["--adapter-path=p"]),
        *slow_except([(["-c", "run.yaml"], ["-c", "run.yaml"])]),
        (["--out", "a b", "--overwrite"], ["--out", "a b"]),
    ],
)
def test_the_message_has_the_command_that_continues(
    run, few, trained, here, monkeypatch, given, continues
):
    (here / "run.yaml").write_text("out: p\noverwrite: true\n")
    (here / "start.safetensors").symlink_to(trained / "o" / "adapters.safetensors")
    base = [*few, "--rank", "2", "--num-layers", "1"]
    with monkeypatch.context() as patch:
        interrupt_at(patch, 1)
        code, _, err = run("train", *base, *given)
    assert code == 143, err
    words = shlex.split(run.error.command)
    assert words == ["packs", "train", *base, *continues, "--resume"]
    assert f"`{run.error.command}`" in run.error.message
    assert run(*words[1:])[0] == 0


@pytest.mark.slow
def test_nohup_and_a_closed_terminal(few, tmp_path):
    """A run that ignores SIGHUP goes on; another one is saved although nobody reads its messages."""
    code = f"""
import os, signal, sys
from mlx_packs.cli.main import main
from mlx_packs.training.observer import Observer
from mlx_packs.training.observers import OBSERVERS
class Hangup(Observer):
    def on_step(self, line):
        if line["batch"] == 2:
            os.kill(os.getpid(), signal.SIGHUP)
OBSERVERS["test"] = lambda run: Hangup()
main(["train", *{few[1:]!r}, "--iters", "3", "--out", sys.argv[1]])
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
        last = RunFolder(tmp_path / f"{name}-run").latest_checkpoint().name
        assert last == ("step-000003" if ignored else "step-000002")
        assert (tmp_path / name).is_dir() == ignored


@pytest.mark.parametrize(("before", "after"), [(1, 9), (2, 0)])
def test_a_layer_trainer_saves_after_the_update(tmp_path, before, after):
    x, y = batch()
    accumulated = settings(grad_accumulation_steps=2)
    linears = three()
    trainer = trainer_of(linears, train=accumulated)

    def steps(trainer, count):
        for _ in range(count):
            trainer.step_lm(list(linears), x, y)

    with pytest.raises(Interrupted) as stopped, trainer.saving_on_signals(tmp_path / "t"):
        steps(trainer, before)
        os.kill(os.getpid(), signal.SIGTERM)
        steps(trainer, after)
    assert stopped.value.exit_code == 143 and "step-000002" in stopped.value.message
    again = trainer_of(linears, train=accumulated)
    again.resume(tmp_path / "t")
    steps(again, 2)
    steps(whole := trainer_of(linears, train=accumulated), 4)
    for name, tensor in whole.tensors().items():
        assert (tensor == again.tensors()[name]).all(), name
