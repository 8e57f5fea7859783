"""A new task costs two files, and an entry in two others: CONTRIBUTING.md's way, as a user has it.

The files of `tests/helpers/new_task`, and the entries below, are put into a copy of the package.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.imports import PACKAGE
from tests.helpers.rows import CHATS, write_rows

pytestmark = pytest.mark.slow  # 20 s: each command is a process of its own

NEW = Path(__file__).parents[1] / "helpers" / "new_task"
FACTS = """\
        "focal": TaskFacts(
            "mlx_packs.tasks.focal:FocalTask",
            "decoder",
            described="next-token prediction, mostly of hard tokens",
            masks=True,
            metrics=("ppl", "accuracy", "answers"),
        ),
"""
SETTINGS = """\
    focal_gamma: float = _optimization(
        2.0,
        "How much less tokens count that are predicted well (focal); 0 is the cross-entropy.",
        metavar="GAMMA",
        at_least=0,
        tasks=("focal",),
    )
"""
# By file: what is inserted, and the line that it stands before.
ENTRIES = {
    "config/choices.py": (FACTS, '        "distill": TaskFacts(\n'),
    "config/tasks.py": (SETTINGS, "    teacher_cache: str | None = _teacher(\n"),
}
SHORT = "--iters 1 --batch-size 2 --max-seq-length 64 --val-batches 0 --test-batches 1".split()
SHORT += "--matmul-path dense --metric none".split()


def contents(package: Path) -> dict[str, bytes]:
    """The files of a package, without compiled ones."""
    return {
        file.relative_to(package).as_posix(): file.read_bytes()
        for file in package.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """A copy of the package that has the task."""
    copy = tmp_path_factory.mktemp("site") / PACKAGE.name
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, copy, ignore=ignored)
    shutil.copytree(NEW, copy, ignore=ignored, dirs_exist_ok=True)

    for name, (entry, before) in ENTRIES.items():
        text = (copy / name).read_text(encoding="utf-8")
        assert text.count(before) == 1, f"{name} has no longer one place for entries:\n{before}"
        (copy / name).write_text(text.replace(before, entry + before), encoding="utf-8")
    return copy


@pytest.fixture(scope="module")
def packs(package, tmp_path_factory):
    """Run ``packs ARGS`` of the copy in a folder with rows ``d``; its standard output."""
    folder = tmp_path_factory.mktemp("here")
    write_rows(folder / "d", train=CHATS, valid=CHATS[:2])

    def go(*arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "mlx_packs", *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(package.parent)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr * (code > 0)

    return go


@pytest.fixture(scope="module")
def train(packs):
    """Train a pack on the rows; its report."""

    def go(out: str, *arguments: str) -> dict:
        return json.loads(
            packs(
                "train",
                "--model",
                "tiny",
                "--data",
                "d",
                "--out",
                out,
                "--json",
                *SHORT,
                *arguments,
            )
        )

    return go


@pytest.fixture(scope="module")
def focal(train) -> dict:
    return train("focal", "--task", "focal")


def test_two_files_change_and_two_are_new(package):
    before, after = contents(PACKAGE), contents(package)
    assert not before.keys() - after.keys()
    changed = {name for name in before if before[name] != after[name]}
    new = after.keys() - before.keys()
    assert changed == set(ENTRIES) and len(changed) <= 2
    assert new == contents(NEW).keys() and len(new) <= 2


def test_help_names_the_task_and_its_setting(packs):
    every = packs("train", "--help", "--all")
    own, other = (packs("train", "--help", "--task", task) for task in ("focal", "dpo"))
    assert ",focal," in every and "mostly of hard tokens" in " ".join(every.split())
    assert "--focal-gamma GAMMA" in every and "--focal-gamma GAMMA" in own
    assert "--focal-gamma GAMMA" not in other


def test_a_pack_is_trained_inspected_and_evaluated(packs, focal):
    manifest = json.loads(packs("inspect", "focal", "--json"))
    objective = manifest["objective"]
    assert objective["task"] == "focal" and objective["focal_gamma"] == 2

    measured = json.loads(packs("eval", "focal", "--data", "d", "--json"))
    assert measured["pack"]["ppl"] == pytest.approx(focal["ppl_after"], rel=1e-4)


def test_its_setting_changes_the_loss(focal, train):
    """Without it the loss is the cross-entropy of ``--task lm``; the score stays that of ``lm``."""
    none, lm = train("none", "--task", "focal", "--focal-gamma", "0"), train("lm")
    assert none["last_loss"] == pytest.approx(lm["last_loss"], rel=1e-3)
    assert focal["last_loss"] < 0.99 * none["last_loss"]
    assert none["ppl_before"] == focal["ppl_before"]
