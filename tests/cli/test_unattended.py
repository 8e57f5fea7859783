"""The two lines of shell in docs/runs.md that continue a killed run, and when they end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_packs.reading import sha256
from tests.helpers import documents
from tests.helpers.rows import CHATS, write_rows

TESTS = Path(__file__).parent
MODEL = "mlx-community/Qwen3-4B-Instruct-2507-4bit"
LINES = next(text for _, text in documents.read("docs/runs.md").blocks("sh") if "while" in text)
SETTINGS = (
    "--matmul-path dense --rank 2 --num-layers 1 --batch-size 2 --max-seq-length 64 --iters 10 "
    "--save-every 2 --steps-per-report 1 --val-batches 1 --test-batches 1 --dropout 0.1"
)


@pytest.fixture
def shell(here):
    """Run the lines with a script in place of `packs`, and without a pause."""

    def go(packs: str) -> int:
        for name, script in (("packs", packs), ("sleep", "exit 0")):
            file = here / "bin" / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(f"#!/bin/sh\n{script}\n")
            file.chmod(0o755)
        path = f"{here / 'bin'}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(["sh", "-c", LINES], env={**os.environ, "PATH": path}, check=False)
        return done.returncode

    return go


@pytest.mark.parametrize("code", [0, 2, 75, 130])
def test_the_shell_lines_end_with_a_run_that_is_over(shell, here, code):
    assert shell(f'echo "$*" >> calls; exit {code}') == 0
    assert (
        here / "calls"
    ).read_text() == f"train --model {MODEL} --data data --out packs/tickets\n"


def test_the_shell_lines_continue_a_run_until_it_is_over(shell, here):
    shell('echo "$*" >> calls; [ $(wc -l < calls) -eq 3 ] || kill -9 $$; exit 2')
    again = ["train --out packs/tickets --resume"] * 2
    assert (here / "calls").read_text().splitlines()[1:] == again


@pytest.mark.slow
def test_the_shell_lines_continue_a_killed_run_to_the_same_bytes(shell, run, here):
    write_rows(here / "data", train=CHATS, valid=CHATS[:2])
    whole = ("train", "--data", "data", *SETTINGS.split(), "--out", "whole/tickets", "-q")
    assert run(*whole)[0] == 0
    (here / "kills.json").write_text("[3, 8]")
    shell(
        f'case "$*" in *--resume*) ;; *) set -- "$@" --model tiny {SETTINGS} ;; esac\n'
        f'exec {sys.executable} {TESTS / "dying_run.py"} "$@"'
    )
    assert (here / "kills.json").read_text() == "[]"

    packs = [here / folder / "tickets" for folder in ("whole", "packs")]
    assert len({sha256(pack / "adapters.safetensors") for pack in packs}) == 1
    manifests = [json.loads((pack / "pack.json").read_text()) for pack in packs]
    for manifest in manifests:
        del manifest["measured"], manifest["sha256"]
    assert manifests[0] == manifests[1]
