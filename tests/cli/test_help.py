"""Help by topic, the sections of `packs --help`, and hints for names of other tools."""

import re

import pytest
from click.testing import CliRunner

from mlx_packs.cli.examples import EXAMPLES
from mlx_packs.cli.main import COMMANDS, OTHER_COMMANDS, packs
from mlx_packs.cli.options import SETTINGS
from mlx_packs.cli.train import COMMON
from mlx_packs.config.choices import TASKS
from mlx_packs.config.fields import flags_of
from mlx_packs.config.tasks import tasks_of
from tests.helpers.errors import check

# Options of `packs plan` with a meaning of their own there, or that name what is planned.
_SHARED = {"--config", "--model", "--data", "--json", "--help"}


def shown(*arguments: str) -> str:
    result = CliRunner().invoke(packs, list(arguments), terminal_width=100)
    assert result.exit_code == 0, result.output
    return result.stdout


def flags_in(text: str) -> set[str]:
    """The first flag of every option that a help describes."""
    return set(re.findall(r"^  (?:-\w, )?(--[a-z0-9-]+)", text, re.M))


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


@pytest.mark.parametrize(
    ("words", "code", "flag", "names"),
    [
        ("-h --task dop", "unknown", "task", ["dop", "'dpo'"]),
        ("--all", "conflict", None, ["--all", "-h --all"]),
    ],
)
def test_no_topic_of_help_is_one_line(rejected, words, code, flag, names):
    check(rejected("train", *words.split()), code, flag, *names)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("finetune",), "Use packs train."),
        (("dpo",), "Use packs train --task dpo."),
        (("train", "--wandb"), "Use --report-to wandb."),
        (("train", "--lora-alpha=8"), "Use --alpha."),
        (("train", "--push-to-hub"), "Use packs push."),
        (("merge", "--adapter-path", "x"), "Pass it without a flag."),
        (
            ("plan", "--wandb"),
            "packs train takes --report-to; packs plan reads it only from a file of --config.",
        ),
        (("train", "--deepspeed"), "Use --hosts for several machines; one Mac has one memory."),
        (("train", "--zero-init"), "--zero-init: no such option."),
    ],
    ids=" ".join,
)
def test_names_of_other_tools_are_answered_with_ours(arguments, hint):
    result = CliRunner().invoke(packs, arguments)
    assert result.exit_code == 2
    assert result.output.rstrip().endswith(hint)


def test_commands_of_other_tools_lead_to_commands():
    names = {name for section in COMMANDS.values() for name in section}
    assert set(OTHER_COMMANDS.values()) <= names
    assert set(OTHER_COMMANDS) & names == {"merge"}  # as an option
