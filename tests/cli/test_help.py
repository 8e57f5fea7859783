"""Help by topic with its examples, what shells complete, and the manual pages."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import click
import pytest
from click.shell_completion import get_completion_class
from click.testing import CliRunner

from mlx_packs.cli.examples import EXAMPLES
from mlx_packs.cli.main import COMMANDS, OTHER_COMMANDS, packs
from mlx_packs.cli.options import SETTINGS
from mlx_packs.cli.train import COMMON
from mlx_packs.config.choices import TASKS
from mlx_packs.config.fields import flags_of
from mlx_packs.config.tasks import tasks_of
from tests.helpers.documents import ROOT

# Options of `packs plan` with a meaning of their own there, or that name what is planned.
_SHARED = {"--config", "--model", "--data", "--verbose", "--json", "--help"}
PAGES = ROOT / "docs" / "man"
MACROS = {".TH", ".SH", ".SS", ".TP", ".PP", ".B", ".RS", ".RE", ".nf", ".fi", ".nh", ".ad"}


def shown(*arguments: str) -> str:
    result = CliRunner().invoke(packs, list(arguments), terminal_width=100)
    assert result.exit_code == 0, result.output
    return result.stdout


def flags_in(text: str) -> set[str]:
    """The first flag of every option that a help describes."""
    return set(re.findall(r"^  (?:-\w, )?(--[a-z0-9-]+)", text, re.M))


def test_help_and_version_are_commands_too():
    assert shown("help") == shown("--help")
    assert shown("help", "merge") == shown("merge", "--help")
    assert shown("version") == shown("--version")
    result = CliRunner().invoke(packs, ["init"])  # like no other
    assert result.exit_code == 2 and "Did you mean" not in result.output


def test_short_help_has_the_common_options_in_sections():
    text = shown("train", "-h")
    flags = flags_in(text)
    assert 22 <= len(flags) <= 30
    assert {"--model", "--data", "--out", "--rank", "--iters", "--learning-rate", "--task"} <= flags
    assert not {"--simpo-gamma", "--ce-last-k", "--fim-rate", "--train"} & flags
    assert "Model and data:" in text and "Optimization:" in text and "Preferences:" not in text
    assert len(text.splitlines()) < 80
    assert all(line in text for _, line in EXAMPLES["train"])
    assert "more options: packs train -h --all." in text


def test_short_help_of_plan_leaves_the_settings_of_a_run_to_train():
    flags = flags_in(shown("plan", "-h"))
    assert flags == {"--memory", "--budget", "--device", "--machines", *_SHARED}
    assert flags & flags_in(shown("train", "-h")) == _SHARED


@pytest.mark.parametrize("command", ["train", "plan"])
def test_full_help_has_every_option(command):
    text = shown(command, "-h", "--all")
    assert text == shown(command, "--all", "--help", "--task", "dpo")
    context = packs.make_context("packs", [command], resilient_parsing=True)
    described = {param.opts[-1] for param in packs.get_command(context, command).params}
    every = {
        flag
        for line in re.findall(r"^  (-.*?)(?:  |$)", text, re.M)
        for flag in re.findall(r"--?[a-z0-9-]+", line)
    }
    assert described <= every
    assert flags_in(shown(command, "-h")) < flags_in(text)
    if command == "train":
        assert {flags_of(field)[0] for field in SETTINGS.values()} <= every


@pytest.mark.parametrize("task", TASKS)
def test_help_of_a_task_has_its_options_and_no_others(task):
    flags = flags_in(shown("train", "-h", "--task", task))
    for field in SETTINGS.values():
        tasks, flag = tasks_of(field.name), flags_of(field)[0]
        if tasks:
            assert (flag in flags) == (task in tasks), flag
        elif field.name in COMMON:
            assert flag in flags


def test_the_last_task_of_a_command_line_is_the_topic_and_no_other_flag():
    of_task = shown("train", "-h", "--task", "dpo")
    assert of_task == shown("train", "--task=dpo", "-h")
    assert of_task == shown("train", "-h", "--task=lm", "--task", "dpo")
    assert shown("train", "-h", "--data", "x") == shown("train", "-h")


def test_commands_of_other_tools_lead_to_commands():
    names = {name for section in COMMANDS.values() for name in section}
    assert set(EXAMPLES) == names
    assert set(OTHER_COMMANDS.values()) <= names
    assert set(OTHER_COMMANDS) & names == {"merge"}  # as an option


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_commands(name):
    root = packs.make_context("packs", ["-h", name], resilient_parsing=True)
    command = packs.get_command(root, name)
    page, same = shown(name, "-h"), shown(name, "--help")
    assert page == same
    for sentence, line in EXAMPLES[name]:
        assert sentence.endswith(":") and sentence[0].isupper() and line in page
        words = shlex.split(re.split(" >> | < ", line)[0])
        words = words[words.index("packs") + 1 :]
        assert words[0] == name
        with command.make_context(name, words[1:], root) as context:
            assert context.params is not None


def test_help_does_not_depend_on_how_a_command_was_called_before():
    root = packs.make_context("packs", ["-h", "train"], resilient_parsing=True)
    command = packs.get_command(root, "train")
    command.make_context("train", [], resilient_parsing=True)  # alone, where -h is no option
    assert shown("train", "-h")


def answers(*words: str) -> set[tuple[str, str]]:
    """Return the type and the text of each completion of the last word."""
    *before, incomplete = words
    completer = get_completion_class("bash")(packs, {}, "packs", "_PACKS_COMPLETE")
    return {(item.type, item.value) for item in completer.get_completions(before, incomplete)}


def test_a_shell_gets_its_script(run):
    for shell in ("bash", "zsh", "fish"):
        code, out, err = run("completion", shell)
        assert (code, err) == (0, "") and f"_PACKS_COMPLETE={shell}_complete" in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("tra",), {("plain", "train")}),
        (("train", "--matmul-path", "d"), {("plain", "dense")}),
        (("train", "--out", "no"), {("dir", "no")}),
        (("train", "--rank", ""), set()),
        (("export", "packs/notes", "--to", "o"), {("plain", "ollama")}),
        (("inspect", "x"), {("file", "x")}),
    ],
)
def test_commands_options_choices_and_paths_are_completed(words, expected):
    assert answers(*words) == expected


def test_bash_completes_with_the_script(tmp_path):
    program = tmp_path / "packs"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mlx_packs "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    shell = (
        'eval "$(packs completion bash)"; COMP_WORDS=(packs train --matm); '
        'COMP_CWORD=2; _packs_completion packs; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", shell], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "--matmul-path\n"


def test_manual_pages_are_those_of_their_script(tmp_path):
    shutil.copy(PAGES / "pages.py", tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, tmp_path / "pages.py"], check=True, env=environment)
    written = {file.name: file.read_text("utf-8") for file in (tmp_path / "man1").iterdir()}
    assert written == {file.name: file.read_text("utf-8") for file in (PAGES / "man1").iterdir()}, (
        "run python docs/man/pages.py"
    )
    names = packs.list_commands(click.Context(packs))
    assert set(written) == {"packs.1", *(f"packs-{name}.1" for name in names)}
    lines = [line for page in written.values() for line in page.splitlines()]
    assert {line.split()[0] for line in lines if line.startswith((".", "'"))} <= MACROS
