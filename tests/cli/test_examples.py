"""The examples in the help of every command are commands that it takes."""

import re
import shlex

import pytest
from click.testing import CliRunner

from mlx_packs.cli.examples import EXAMPLES
from mlx_packs.cli.main import COMMANDS, packs

NAMES = [name for section in COMMANDS.values() for name in section]


def test_every_command_has_examples():
    assert set(EXAMPLES) == set(NAMES)
    for name, examples in EXAMPLES.items():
        for sentence, line in examples:
            assert sentence.endswith(":") and sentence[0].isupper()
            assert f"packs {name}" in line


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_understood(name):
    root = packs.make_context("packs", ["-h", name], resilient_parsing=True)
    command = packs.get_command(root, name)
    for _, line in EXAMPLES[name]:
        words = shlex.split(re.split(" >> | < ", line)[0])
        words = words[words.index("packs") + 2 :]
        with command.make_context(name, words, root) as context:
            assert context.params is not None
    page, same = (
        CliRunner().invoke(packs, [name, flag], terminal_width=200).stdout
        for flag in ("-h", "--help")
    )
    assert page == same
    assert all(line in page for _, line in EXAMPLES[name])


def test_help_does_not_depend_on_how_a_command_was_called_before():
    root = packs.make_context("packs", ["-h", "train"], resilient_parsing=True)
    command = packs.get_command(root, "train")
    command.make_context("train", [], resilient_parsing=True)  # alone, where -h is no option
    assert CliRunner().invoke(packs, ["train", "-h"]).exit_code == 0
