"""The command group: exit codes and lines of errors, as a program and inside other programs."""

import errno
import json
import os
import runpy
import shutil
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from mlx_packs.cli.main import packs
from mlx_packs.cli.output import print_report
from mlx_packs.distributed.link import Launched
from mlx_packs.errors import Interrupted, PackError
from tests.helpers.errors import check

ERRORS = {
    "PackError": (PackError("x: is wrong.", "data"), 2, "data"),
    "OSError": (OSError(errno.ENOSPC, "No space left on device", "o"), 2, "unwritable"),
    "FileNotFoundError": (FileNotFoundError(errno.ENOENT, "No such file", "o"), 2, "unreadable"),
    "MemoryError": (MemoryError(), 2, "memory"),
    "KeyboardInterrupt": (KeyboardInterrupt(), 130, "interrupted"),
    "Interrupted": (Interrupted("interrupted; kept x."), 130, "interrupted"),
}


@pytest.fixture(params=["group", "inside another group"])
def group(request) -> tuple[click.Group, list[str]]:
    """The group, or one that another program has put it into; and what comes before arguments."""
    if request.param == "group":
        return packs, []
    outer = click.Group("outer")
    outer.add_command(packs, "packs")
    return outer, ["packs"]


def failing(monkeypatch, error: BaseException) -> None:
    """Make `packs inspect` raise."""

    def inspect(**_):
        raise error

    command = packs.get_command(click.Context(packs), "inspect")
    monkeypatch.setattr(command, "callback", inspect)


def check_error(command, arguments: list[str], exit_code: int, code: str, flag=None) -> None:
    result = CliRunner().invoke(command, arguments)
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert result.stderr.startswith("packs: ") and result.stderr.count("\n") == 1
    check(CliRunner().invoke(command, arguments, standalone_mode=False).exception, code, flag)


@pytest.mark.parametrize("name", ERRORS)
def test_error_is_one_line_and_an_exit_code(monkeypatch, group, name):
    error, exit_code, code = ERRORS[name]
    failing(monkeypatch, error)
    command, before = group
    check_error(command, [*before, "inspect", "p"], exit_code, code)


@pytest.mark.parametrize("name", ERRORS)
def test_error_is_an_object_after_json(monkeypatch, group, name):
    error, exit_code, code = ERRORS[name]
    failing(monkeypatch, error)
    command, before = group
    result = CliRunner().invoke(command, [*before, "inspect", "p", "--json"])
    assert result.exit_code == exit_code
    assert result.stderr.startswith("packs: ") and result.stderr.count("\n") == 1
    if exit_code == 130:
        assert not result.stdout
    else:
        shown = json.loads(result.stdout)["error"]
        message = shown.pop("message")
        assert shown == {"code": code, "flag": None} and result.stderr == f"packs: {message}\n"


def test_another_rank_prints_nothing_after_json(monkeypatch):
    monkeypatch.setattr("mlx_packs.cli.main.launched", lambda: Launched(1, 2, "10.0.0.1", 1, 2))
    failing(monkeypatch, PackError("x: is wrong.", "data"))
    result = CliRunner().invoke(packs, ["inspect", "p", "--json"])
    assert (result.exit_code, result.output) == (2, "")


@pytest.mark.parametrize(
    ("arguments", "code", "flag"),
    [
        ("trian --json", "unknown", "command"),
        ("generate --prompt a --json --temp -1", "invalid", "temperature"),
        ("generate --temp -1 --prompt a --json", "invalid", "temperature"),
        ("generate --tmp 1 --json", "unknown", "tmp"),
        ("--bogus --json", "unknown", "bogus"),
    ],
)
def test_wrong_use_is_an_object_after_json(group, arguments, code, flag):
    command, before = group
    result = CliRunner().invoke(command, [*before, *arguments.split()])
    shown = json.loads(result.stdout)["error"]
    assert (result.exit_code, shown["code"], shown["flag"]) == (2, code, flag)
    text = arguments.replace("--json", "")
    assert CliRunner().invoke(command, [*before, *text.split()]).stdout == ""


def test_wrong_use_is_one_line_and_2(group):
    command, before = group
    check_error(command, [*before, "trian"], 2, "unknown", "command")
    arguments = [*before, "generate", "--prompt", "a", "--temp", "-1"]
    check_error(command, arguments, 2, "invalid", "temperature")


@pytest.mark.parametrize(
    "text",
    [
        "[metal::malloc] Attempting to allocate 9 bytes which is too much.",
        "[METAL] Command buffer failed: Insufficient Memory (00000008)\nkIOGPU",
        "[metal::malloc] Resource limit (499000) exceeded.",
    ],
)
def test_out_of_memory_names_the_settings_that_need_less(monkeypatch, run, text):
    failing(monkeypatch, RuntimeError(text))
    code, _, err = run("inspect", "p")
    assert code == 2 and len(err) < 300
    names = ("--batch-size", "--max-seq-length", "--grad-checkpoint", text.splitlines()[0][:40])
    check(run.error, "memory", None, *names)


@pytest.mark.parametrize("error", [RuntimeError("[matmul] shapes"), RecursionError("too deep")])
def test_other_errors_keep_their_traceback_and_exit_with_70(monkeypatch, run, error):
    failing(monkeypatch, error)
    code, out, err = run("inspect", "p")
    assert (code, out) == (70, "") and err.startswith("Traceback") and str(error) in err


@pytest.mark.parametrize("program", ["mlx_packs train", "mlx_packs.train"])
def test_modules_are_the_command(program, here, monkeypatch, capsys):
    module, *before = program.split()
    monkeypatch.delitem(sys.modules, "mlx_packs.train", raising=False)  # runpy would warn
    monkeypatch.setattr(sys, "argv", [module, *before, "--model", "tiny", "--data", "nope", "-q"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__")
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.startswith("packs: --data nope: ") and err.count("\n") == 1


def test_a_closed_pipe_ends_the_program_without_a_word():
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run(
        [sys.executable, "-m", "mlx_packs", "train", "--help"],
        stdout=write,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(write)
    assert (result.returncode, result.stderr) == (1, b"")


@pytest.mark.parametrize(("on_path", "shown"), [(None, "v/bin/packs"), ("/bin/packs", "packs")])
def test_a_suggested_command_runs_as_printed(monkeypatch, capsys, on_path, shown):
    monkeypatch.setattr(sys, "argv", ["v/bin/packs", "train"])
    monkeypatch.setattr(shutil, "which", lambda name: on_path)
    with click.Context(packs):
        print_report({}, ["pack    p    try: packs chat", "echo 1 | packs chat", "note    packs"])
    expected = f"pack    p    try: {shown} chat\necho 1 | {shown} chat\nnote    packs\n"
    assert capsys.readouterr().out == expected


def test_help_does_not_wait_for_mlx():
    code = (
        "import sys\nfrom mlx_packs.cli.main import main\n"
        "try: main(['train', '-h'])\nexcept SystemExit: pass\n"
        "sys.exit(bool({'mlx', 'mlx_lm', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
