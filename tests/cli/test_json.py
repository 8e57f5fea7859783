"""--json prints one object to standard output and nothing else, whatever the command."""

import json

import click
import pytest

from mlx_packs.cli.main import COMMANDS, packs
from mlx_packs.cli.output import print_report
from tests.helpers.variants import slow_except

# On the pack `o`, which was trained on `d`.
CASES = {
    "train": ("--show-mask", "--data", "d"),
    "plan": ("--memory", "16"),
    "data": ("d",),
    "list": (".",),
    "inspect": ("o",),
    "diff": ("o", "o"),
    "report": ("o", "--out", "page.html"),
    "export": ("o", "--to", "mlx-lm", "--out", "x"),
    "eval": ("o", "--data", "d"),
    "eval-batch": ("o", "--data", "d", "--batch-size", "1", "--max-tokens", "2", "--rounds", "1"),
    "generate": ("--prompt", "Hi", "--max-tokens", "1"),
}
# Those that take longer, or need a network or other packages; `print_report` checks them too.
OTHERS = {
    *("bench", "combine", "doctor", "eval-tasks", "import", "learn"),
    *("merge", "pull", "push", "quantize", "sweep"),
}


def test_every_command_with_json_is_listed():
    root = click.Context(packs)
    with_json = {
        name
        for name in (name for section in COMMANDS.values() for name in section)
        if any("--json" in each.opts for each in packs.get_command(root, name).params)
    }
    assert with_json == CASES.keys() | OTHERS


@pytest.mark.parametrize("command", slow_except(CASES, *CASES.keys() - {"eval", "generate"}))
def test_json_is_one_object(command, trained_copy, run):
    code, out, err = run(command, *CASES[command], "--json")
    assert code == 0, err
    assert isinstance(json.loads(out), dict)


def test_a_report_that_is_no_object_is_a_defect(monkeypatch):
    monkeypatch.setattr("mlx_packs.cli.output.wants_json", lambda: True)
    with pytest.raises(AssertionError, match="one object"):
        print_report([{}], [])
