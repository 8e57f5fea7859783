"""`packs train --supervise`: when a run is started again, how, and when no more."""

import json
import plistlib
import shlex
import shutil
import signal
import struct
import sys
from pathlib import Path

import pytest

from mlx_packs import macos
from mlx_packs.cli import supervise
from mlx_packs.cli.main import CRASHED, main
from mlx_packs.display import QUIET, Display
from mlx_packs.errors import RunStopped
from mlx_packs.memory.pressure import CRITICAL, NONE, Pressure
from mlx_packs.reading import sha256
from mlx_packs.training import run_folder, unattended
from mlx_packs.training.unattended import SUPERVISED
from tests.helpers.errors import check
from tests.helpers.rows import CHATS, write_rows

TESTS = Path(__file__).parent
TIMEOUT = (
    "libc++abi: terminating due to uncaught exception of type std::runtime_error: [METAL] Command "
    "buffer execution failed: Caused GPU Timeout Error (00000002:"
    "kIOGPUCommandBufferCallbackErrorTimeout)"
)
NO_GPU_MEMORY = (
    "[METAL] Command buffer execution failed: Insufficient Memory (00000008:"
    "kIOGPUCommandBufferCallbackErrorOutOfMemory)"
)
KILL, ABORT = {"signal": signal.SIGKILL}, {"signal": signal.SIGABRT}
DONE = {"result": "done\n"}


@pytest.fixture
def starts(here, run, monkeypatch):
    """Supervise substitutes with given behaviour; return the exit code and the arguments of each start."""
    monkeypatch.setattr(
        supervise, "PROGRAM", (sys.executable, "-I", "-S", str(TESTS / "stand_in_run.py"), "train")
    )
    monkeypatch.setattr(supervise, "_TICK_S", 0.02)

    def go(acts: list[dict], *args) -> tuple[int, list[str]]:
        (here / "acts.json").write_text(json.dumps(acts))
        (here / "starts.jsonl").unlink(missing_ok=True)
        flags = args if "--launch-agent" in args else ("--supervise", *args)
        code, go.out, go.err = run("train", *flags)
        go.error = run.error
        assert json.loads((here / "acts.json").read_text()) == []
        lines = (here / "starts.jsonl").read_text().splitlines()
        return code, [shlex.join(json.loads(line)) for line in lines]

    return go


def restarts(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("restart")]


def test_a_killed_run_goes_on_from_its_checkpoint_and_prints_one_result(starts):
    acts = [{"checkpoints": [10], "result": "lost\n", **KILL}, {"checkpoints": [20], **ABORT}, DONE]
    code, lines = starts(acts, "--out", "p", "--iters", 30)
    assert (code, starts.out) == (0, "done\n")
    first = "--supervise --out p --iters 30"
    assert lines == [first, f"{first} --resume", f"{first} --resume"]
    messages = restarts(starts.err)
    assert "SIGKILL" in messages[0] and "step-000010" in messages[0]
    assert "SIGABRT" in messages[1] and "step-000020" in messages[1] and len(messages) == 2


def test_a_run_without_a_checkpoint_starts_again_and_its_pack_keeps_its_name(starts):
    code, lines = starts([KILL, DONE], "--data", "some/rows")
    assert code == 0 and lines == ["--supervise --data some/rows --out packs/rows"] * 2


def test_checkpoints_of_a_run_that_is_replaced_are_not_its_own(starts, here):
    (here / "p-run" / "step-000050").mkdir(parents=True)
    acts = [KILL, {"clears": True, "checkpoints": [10], **KILL}, DONE]
    _, lines = starts(acts, "--out", "p", "--overwrite")
    first = "--supervise --out p --overwrite"
    assert lines == [first, first, "--supervise --out p --resume"]


def test_the_checkpoints_of_a_resumed_run_are_its_own(starts, here, monkeypatch):
    monkeypatch.setattr(run_folder, "check_resumable", lambda folder: {"recipe": {}})
    (here / "p-run" / "step-000050").mkdir(parents=True)
    code, lines = starts([{"checkpoints": [60], **KILL}, DONE], "--out", "p", "--resume")
    assert code == 0 and lines[1] == "--supervise --out p --resume"


@pytest.mark.parametrize("code", [0, 2, 143])
def test_a_run_that_is_over_is_not_started_again(starts, code):
    assert starts([{"code": code, "messages": "packs: why"}], "--out", "p")[0] == code
    assert "packs: why" in starts.err and starts.error is None


@pytest.mark.parametrize("end", [ABORT, {"code": CRASHED}])
def test_what_the_gpu_watchdog_ends_goes_on_with_half_the_micro_batch(starts, end):
    act = {"messages": TIMEOUT, **end}
    code, lines = starts([act] * 3 + [DONE], "--out", "p", "--batch-size", 4)
    first = "--supervise --out p --batch-size 4"
    assert code == 0
    assert [line.removeprefix(first).strip() for line in lines] == [
        "",
        "--micro-batches 2",
        "--micro-batches 4",  # of one example each: then nothing is smaller
        "--micro-batches 4",
    ]


@pytest.mark.parametrize(
    "act",
    [
        {"messages": NO_GPU_MEMORY, **ABORT},
        {"messages": "packs: memory is exhausted ([malloc] no). Pass a smaller …", "code": 2},
        {"messages": "packs: memory is short: macOS reports …", "code": 2},
    ],
)
def test_what_runs_out_of_memory_goes_on_with_half_the_micro_batch(starts, act):
    code, lines = starts([{"checkpoints": [10], **act}, DONE], "--out", "p")
    assert code == 0 and lines[1] == "--supervise --out p --resume --micro-batches 2"


@pytest.mark.parametrize(
    ("oom_kills", "level", "halved"),
    [
        ((3, 4), NONE, True),  # as Linux counts them
        ((3, 3), CRITICAL, False),
        ((None, None), CRITICAL, True),  # elsewhere the pressure before the kill tells
        ((None, None), NONE, False),
    ],
)
def test_a_kill_for_want_of_memory_halves_too(starts, monkeypatch, oom_kills, level, halved):
    answers = iter([*oom_kills, oom_kills[1]])
    monkeypatch.setattr(supervise, "oom_kills", lambda: next(answers))
    monkeypatch.setattr(supervise, "memory_pressure", lambda: Pressure(level))
    code, lines = starts([{"checkpoints": [10], "seconds": 0.1, **KILL}, DONE], "--out", "p")
    assert code == 0 and ("--micro-batches 2" in lines[1]) == halved


def test_the_limit_ends_it_with_the_exit_code_and_the_command_that_resumes(starts):
    acts = [{"checkpoints": [n], **KILL} for n in (10, 20, 30)]
    code, lines = starts(acts, "--out", "p", "--max-restarts", 2)
    assert code == 128 + signal.SIGKILL and len(lines) == 3 and starts.out == ""
    check(starts.error, "interrupted", None, "--max-restarts", "step-000030")
    assert isinstance(starts.error, RunStopped)
    assert starts.error.command == "packs train --supervise --out p --max-restarts 2 --resume"


def test_two_attempts_without_a_new_checkpoint_are_the_last(starts):
    acts = [{"checkpoints": [10], **KILL}, {"code": CRASHED}, {"code": CRASHED}]
    code, lines = starts(acts, "--out", "p")
    assert code == CRASHED and len(lines) == 3
    check(starts.error, "interrupted", None, "step-000010", "--resume")
    code, _ = starts([KILL, KILL], "--out", "q", "--overwrite")
    check(starts.error, "interrupted", None, "`packs train --supervise --out q --overwrite`")
    assert not isinstance(starts.error, RunStopped)


def test_the_time_of_a_run_is_that_of_all_its_attempts(monkeypatch):
    now = 50.0
    monkeypatch.setattr(supervise.time, "monotonic", lambda: now)
    supervised = supervise.Supervised((), (), (), Path("p"), seconds=7200)
    supervisor = supervise.Supervisor(supervised, Display(QUIET))
    now += 600
    assert supervisor._next() == ["--time", "6600s"]
    now += 7200
    assert supervisor._next() == ["--time", "1s"]  # a run that is over still writes its pack


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_run_once_and_ends_both(starts, number):
    act = {"checkpoints": [10], "asks_parent": number, "code": 128 + number}
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    code, lines = starts([act], "--out", "p")
    assert code == 128 + number and len(lines) == 1
    assert f"asked [{int(number)}]" in starts.err
    assert handlers == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]


def test_a_run_that_a_signal_killed_on_request_stays_ended(starts):
    act = {"asks_parent": signal.SIGTERM, **KILL}
    assert starts([act], "--out", "p")[0] == 128 + signal.SIGKILL and not restarts(starts.err)


def test_the_messages_of_a_run_see_a_terminal_where_there_is_one(starts, monkeypatch):
    monkeypatch.setattr(supervise, "has_terminal", lambda: True)
    monkeypatch.setattr(supervise, "terminal_size", lambda: struct.pack("HHHH", 30, 87, 0, 0))
    starts([{"terminal": True, "checkpoints": [10], "messages": "bar", **KILL}, DONE], "--out", "p")
    assert "terminal 87" in starts.err
    assert "\x1b[?25h" in starts.err  # a bar hides the cursor
    monkeypatch.setattr(supervise, "has_terminal", lambda: False)
    starts([{"terminal": True}], "--out", "q")
    assert "terminal 0" in starts.err and "\x1b" not in starts.err


def test_max_restarts_needs_a_supervisor(rejected):
    check(rejected("train", "--max-restarts", 3), "conflict", "max_restarts")
    error = rejected("train", "--supervise", "--max-restarts", -1)
    check(error, "invalid", "max_restarts", "-1")


def test_a_defect_has_an_exit_code_of_its_own_in_a_supervised_run(monkeypatch, capsys):
    def fail(*_, **__):
        raise RuntimeError(TIMEOUT)

    monkeypatch.setattr("mlx_packs.cli.main.packs", fail)
    with pytest.raises(RuntimeError):
        main(["train"])
    monkeypatch.setenv(SUPERVISED, "1")
    with pytest.raises(SystemExit) as ended:
        main(["train"])
    assert ended.value.code == CRASHED
    assert supervise._WATCHDOG.search(capsys.readouterr().err)


def agent_of(here: Path) -> macos.LaunchAgent:
    return macos.LaunchAgent.of(here / "p")


def test_a_launch_agent_is_for_macs(rejected, here, monkeypatch):
    monkeypatch.setattr(macos, "is_macos", lambda: False)
    check(rejected("train", "--launch-agent", "--out", "p"), "unsupported", "launch_agent")
    assert not list(here.iterdir())


def test_a_launch_agent_goes_on_with_the_run_after_a_reboot(mac, starts, here, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("MLX_PACKS_BACKEND", "reference")
    file = agent_of(here).file
    args = ("--out", "p", "--launch-agent")

    act = {"checkpoints": [10], "asks_parent": signal.SIGTERM, "code": 143}
    assert starts([act], *args) == (143, ["--out p --launch-agent"])  # the Mac shuts down
    assert file.parent == Path.home() / "Library" / "LaunchAgents"

    settings = plistlib.loads(file.read_bytes())
    assert settings["ProgramArguments"] == [*supervise.PROGRAM, "--out", "p", "--launch-agent"]
    assert settings["WorkingDirectory"] == str(here) and settings["RunAtLoad"] is True
    assert Path(settings["StandardErrorPath"]).parent.is_dir()
    kept = settings["EnvironmentVariables"]
    assert kept["PATH"] and kept["MLX_PACKS_BACKEND"] == "reference" and "secret" not in str(kept)

    # at login it is started so, and ends
    code, lines = starts([DONE], *settings["ProgramArguments"][-3:])
    assert (code, lines) == (0, ["--out p --launch-agent --resume"])
    assert not file.exists() and not list(file.parent.iterdir())


@pytest.mark.parametrize(
    ("acts", "code"),
    [
        ([{"asks_parent": signal.SIGINT, "code": 130}], 130),  # the user ended it
        ([{"code": 2}], 2),
        ([KILL, KILL], 137),
    ],
)
def test_a_launch_agent_is_removed_with_its_run(mac, starts, here, acts, code):
    assert starts(acts, "--out", "p", "--launch-agent")[0] == code
    assert not list(agent_of(here).file.parent.iterdir())


def test_a_launch_agent_replaces_no_run_and_runs_once(mac, rejected, here):
    (here / "p-run" / "step-000050").mkdir(parents=True)
    error = rejected("train", "--out", "p", "--overwrite", "--launch-agent")
    check(error, "conflict", "overwrite")
    with agent_of(here).locked():
        check(rejected("train", "--out", "p", "--launch-agent"), "busy")
    shutil.rmtree(here / "p-run")
    (here / "p").mkdir()  # a pack, which a run at login could not replace
    error = rejected("train", "--out", "p", "--overwrite", "--launch-agent")
    check(error, "conflict", "overwrite")


def test_the_end_of_a_long_run_is_announced_once(mac, starts, monkeypatch):
    monkeypatch.setattr(unattended, "NOTIFIED_S", 0)
    starts([{"checkpoints": [10], **KILL}, DONE], "--out", "p")
    assert mac.asked("osascript")[-1] == "p is ready (0:00)"
    starts([KILL, KILL], "--out", "q")
    assert mac.asked("osascript")[-1].startswith("q ended early: the run was killed")
    assert mac.asked("osascript").count("mlx-packs") == 2


ARGS = (
    "--data d --matmul-path dense --rank 2 --num-layers 1 --batch-size 2 --max-seq-length 64 "
    "--steps-per-report 1 --val-batches 1 --test-batches 1 --dropout 0.1 --learning-rate 1e-3"
).split()


def check_same_pack(first: Path, second: Path) -> None:
    assert sha256(first / "adapters.safetensors") == sha256(second / "adapters.safetensors")
    manifests = [json.loads((pack / "pack.json").read_text()) for pack in (first, second)]
    for manifest in manifests:
        del manifest["measured"], manifest["sha256"]  # of all of the manifest
    assert manifests[0] == manifests[1]


@pytest.mark.slow
def test_a_run_that_is_killed_three_times_ends_with_the_same_bytes(run, here, monkeypatch):
    monkeypatch.setattr(
        supervise, "PROGRAM", (sys.executable, str(TESTS / "dying_run.py"), "train")
    )
    write_rows(here / "d", train=CHATS, valid=CHATS[:2])
    args = ("train", *ARGS, "--iters", 10, "--save-every", 2)
    assert run(*args, "--out", "whole/p", "-q")[0] == 0
    (here / "kills.json").write_text("[1, 4, 9]")
    code, out, err = run(*args, "--out", "p", "--supervise", "--json")
    assert code == 0, err
    assert json.loads(out)["batches"] == 10
    assert len(restarts(err)) == 3 and (here / "kills.json").read_text() == "[]"
    check_same_pack(here / "whole" / "p", here / "p")


@pytest.mark.slow
def test_the_program_of_a_supervised_run_ignores_the_files_where_it_runs(run, here):
    """A folder of data may have a file that is called as a module of Python."""
    for name in ("random", "yaml", "mlx_packs"):
        (here / f"{name}.py").write_text("raise SystemExit('a file of the user was imported')")
    write_rows(here / "d", train=CHATS, valid=CHATS[:2])
    code, _, err = run("train", *ARGS, "--iters", 1, "--out", "p", "--supervise", "-q")
    assert code == 0, err
