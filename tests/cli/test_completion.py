"""`packs completion`: the script of each shell, and what it is answered."""

import os
import subprocess
import sys

import pytest
from click.shell_completion import get_completion_class

from mlx_packs.cli.main import packs
from tests.helpers.errors import check


def answers(*words: str) -> set[tuple[str, str]]:
    """Return the type and the text of each completion of the last word."""
    *before, incomplete = words
    completer = get_completion_class("bash")(packs, {}, "packs", "_PACKS_COMPLETE")
    return {(item.type, item.value) for item in completer.get_completions(before, incomplete)}


def test_a_shell_gets_its_script_and_another_one_is_rejected(run):
    for shell in ("bash", "zsh", "fish"):
        code, out, err = run("completion", shell)
        assert (code, err) == (0, "") and f"_PACKS_COMPLETE={shell}_complete" in out
    assert run("completion", "csh")[0] == 2
    check(run.error, "invalid", None, "csh", "zsh")


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
