"""`packs learn`: train a candidate on rated answers, compare it, and serve it if it wins."""

import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..bases.files import resolve_checkpoint
from ..bases.fingerprint import fingerprint
from ..display import QUIET, Display
from ..errors import PackError
from ..evaluation.rows import columns_of, evaluation_rows
from ..files import atomic_write, exclusive_writer, to_json
from ..packs.base import load_base_for
from ..reading import read_json
from ..training.run_folder import run_folder
from .candidate import DATA, START, Job, begin_job, train_candidate, unfinished_job
from .comparison import WINS_BY, Comparison, compare, compare_on
from .folder import FIGURES, PACK, LearningFolder
from .rows import FILES, LEAST_HELD_OUT, read_rows

AUTO = "auto"


@dataclass(frozen=True)
class Learned:
    """The result of `learn`."""

    figures: Mapping[str, Any]  # of the candidate: its rows, its gain and whether it won
    version: int  # that is served now
    pack: Path  # the folder of the candidate

    @property
    def is_swapped(self) -> bool:
        return self.figures["won"]

    def to_json(self) -> dict[str, Any]:
        return {**self.figures, "version": self.version, "pack": str(self.pack)}

    def lines(self) -> list[str]:
        if self.is_swapped:
            return [f"swapped   version {self.version} is served from now on: {self.pack}"]
        reason = f"not better by more than {WINS_BY:g} standard errors"
        if self.figures.get("worse_on_data"):
            reason = f"worse on --data, or it has fewer than {LEAST_HELD_OUT} rows"
        return [f"not swapped: the candidate is {reason}. Version {self.version} is still served."]


@contextmanager
def versions_locked(folder: LearningFolder) -> Iterator[None]:
    """Let one process at a time change the versions of a folder."""
    busy = (
        f"{folder.path}: another `packs learn` is at work there. Wait for it, or end it; the same "
        "command continues it."
    )
    with exclusive_writer(folder.versions_folder, busy):
        yield


def learn(
    folder: LearningFolder,
    task: str,
    settings: Mapping[str, Any],
    model: str | None = None,
    display: Display | None = None,
    data: str | None = None,
) -> Learned:
    """Train a candidate on the rated answers of a folder, and serve it if it is better.

    An interrupted training with the same settings is continued, on its rows. ``task`` is of `FILES`
    or `AUTO`, that with the most rows of those with enough; ``model`` None is the base that the
    answers are of. On ``data``, which no rater wrote, a candidate must not be worse.
    """
    display = display or Display(QUIET)
    model = model or folder.model
    specified = {"task": task, **settings}

    with versions_locked(folder):
        _check_base(folder, model)
        if data is not None:
            evaluation_rows(columns_of(folder.pack_of(folder.current), data), "valid")
        if _has_won(folder):
            folder.add_version()  # of an earlier call that was interrupted here
        if folder.unserved is not None:
            return _serve(folder, folder.unserved)

        job = unfinished_job(folder, specified)
        if job is None:
            job = _new_job(folder, task, specified)

        display.line(
            "learn",
            f"{job.task}: {job.train} rows to train on, {job.held_out} held out · continues "
            f"version {job.start}",
        )
        pack = train_candidate(folder, job, model, display)
        base = load_base_for(pack, model, "trust_remote_code" in settings)

        served = folder.pack_of(job.start)
        comparison = compare(base, served, pack, job.task, folder.candidate / DATA)
        display.line("gain", comparison.text)

        others = None
        if data is not None:
            others = compare_on(base, served, pack, data)
            display.line("data", others.text)
        _write_figures(folder, job, comparison, others)

        if _figures(folder)["won"]:
            return _serve(folder, folder.add_version())
        return Learned(_figures(folder), folder.current, folder.candidate / PACK)


def _check_base(folder: LearningFolder, model: str) -> None:
    if fingerprint(resolve_checkpoint(model)) != folder.fingerprint:
        raise PackError(
            f"--model {model}: is not the base model of {folder.path}, which is {folder.model}.",
            "mismatch",
            "model",
        )


def _new_job(folder: LearningFolder, task: str, settings: Mapping[str, Any]) -> Job:
    tasks = [task] if task != AUTO else list(FILES)

    splits = {name: read_rows(folder.path, name) for name in tasks}
    most = max(splits, key=lambda name: (not splits[name].fault, splits[name].count))
    return begin_job(folder, most, splits[most], settings)


def _write_figures(
    folder: LearningFolder, job: Job, comparison: Comparison, others: Comparison | None
) -> None:
    """Write what came of a candidate, and remove its copies of the rows."""
    is_worse = others is not None and others.is_lost
    figures = {
        "task": job.task,
        "continues": job.start,
        "rows": job.train,
        **comparison.to_json(),
        "won": comparison.is_won and not is_worse,
        "worse_on_data": is_worse,
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }
    atomic_write(folder.candidate / FIGURES, to_json(figures))

    for part in (folder.candidate / DATA, run_folder(folder.candidate / PACK)):
        shutil.rmtree(part, ignore_errors=True)
    (folder.candidate / START).unlink(missing_ok=True)


def _figures(folder: LearningFolder) -> dict[str, Any]:
    return read_json(folder.candidate / FIGURES)


def _has_won(folder: LearningFolder) -> bool:
    """Whether there is a candidate that is better than the version that is served now."""
    if not (folder.candidate / FIGURES).is_file():
        return False

    figures = _figures(folder)
    return figures["won"] and figures["continues"] == folder.current


def _serve(folder: LearningFolder, number: int) -> Learned:
    folder.serve(number)
    version = folder.version_folder(number)
    return Learned(read_json(version / FIGURES), number, version / PACK)


def serve_version(folder: LearningFolder, number: int) -> None:
    """Serve a version that there is; a PackError if there is none, or a candidate is trained."""
    with versions_locked(folder):
        folder.serve(number)
