"""`packs learn`: train a candidate on rated answers, compare it, and serve it if it wins.

A candidate is a pack that is trained from the version that is served.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..bases.files import resolve_checkpoint
from ..bases.fingerprint import fingerprint
from ..config.recipe import Recipe, resolve
from ..display import NORMAL, QUIET, Display
from ..errors import PackError
from ..evaluation.rows import columns_of, evaluation_rows
from ..files import atomic_folder, atomic_write, exclusive_writer, to_json
from ..packs.base import load_base_for
from ..packs.compatibility import check_checkpoint, quantize_for, quantize_options
from ..packs.manifest import MANIFEST, template_kwargs_of
from ..packs.pack import Pack
from ..reading import read_json
from ..training.attached import adapter_settings
from ..training.run import train_request
from ..training.run_folder import RunFolder, run_folder
from ..training.settings import Request
from .comparison import WINS_BY, Comparison, compare, compare_on
from .folder import FIGURES, PACK, LearningFolder
from .rows import FILES, LEAST_HELD_OUT, Split, read_rows

DATA = "data"
_JOB = "job.json"
_DEFAULTS = {"epochs": 3, "on_bad_row": "skip"}


@dataclass(frozen=True)
class Job:
    """What a candidate is trained on.

    Attributes:
        task: kto, dpo or lm.
        start: the version that it continues from.
        train: number of rows.
        held_out: number of rows.
        settings: of the run, as specified.
        rows: hash of the rows.
    """

    task: str
    start: int
    train: int
    held_out: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    rows: str = ""


def unfinished_job(folder: LearningFolder, settings: Mapping[str, Any]) -> Job | None:
    """Return the job of a candidate whose training was interrupted, if it had these settings.

    Without a checkpoint there is none, so that a run that failed at its start reads its rows anew.
    """
    file = folder.candidate / _JOB
    if not file.is_file() or (folder.candidate / FIGURES).is_file():
        return None

    pack = folder.candidate / PACK
    has_pack = (pack / MANIFEST).is_file()
    if not has_pack and RunFolder.of(pack).latest_checkpoint() is None:
        return None

    job = Job(**read_json(file))
    if job.start != folder.current or job.settings != settings:
        return None
    return job


def begin_job(folder: LearningFolder, task: str, split: Split, settings: Mapping[str, Any]) -> Job:
    """Write the rows of a candidate in place of the last one.

    Raises:
        PackError: a setting is wrong, or there are too few rows, or none that are new.
    """
    _check_settings(folder, task, settings)
    if split.fault:
        raise PackError(f"{folder.path}: --task {task} has {split.fault}", "data")

    rows = hashlib.sha256(to_json([split.train, split.held_out]).encode()).hexdigest()
    job = Job(task, folder.current, len(split.train), len(split.held_out), settings, rows)
    _check_new(folder, job)

    with atomic_folder(folder.candidate, replace=True) as partial:
        partial.chmod(0o700)
        data = partial / DATA
        data.mkdir()
        for name, rows in (("train", split.train), ("valid", split.held_out)):
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
            (data / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        (partial / _JOB).write_text(to_json(asdict(job)), encoding="utf-8")
    return job


def _check_new(folder: LearningFolder, job: Job) -> None:
    """Raise a PackError if a candidate of these rows and settings was compared before.

    Otherwise each night would continue on the rows of the last, or train again what was put back.
    """
    served = folder.version_folder(job.start)
    for earlier in (folder.candidate, *map(folder.version_folder, folder.versions())):
        if not ((earlier / FIGURES).is_file() and (earlier / _JOB).is_file()):
            continue

        trained = Job(**read_json(earlier / _JOB))
        if earlier == served:
            trained = replace(trained, start=job.start)

        if trained == job:
            raise PackError(
                f"{folder.path}: {earlier.relative_to(folder.path)} was trained on the same rows "
                "with the same settings. Rate more answers, change a setting, or choose a version "
                "with --use.",
                "data",
            )


def train_candidate(folder: LearningFolder, job: Job, model: str, display: Display) -> Pack:
    """Train the candidate of a job, from its last checkpoint if it has one, and return its pack."""
    out = folder.candidate / PACK
    if (out / MANIFEST).is_file():
        return Pack.open(out)

    checkpoint = RunFolder.of(out).latest_checkpoint()
    run: dict[str, Any] = {"model": model, "out": str(out)}
    start = folder.pack_of(job.start)

    if checkpoint is not None:
        run["resume"] = True
    else:
        run["overwrite"] = True
        if start is not None:
            run["resume_adapter_file"] = str(start.path)

    recipe = _recipe(folder, job, run)
    return train_request(Request(recipe, model, display=_Shown(display.level))).pack


class _Shown(Display):
    """The progress of a run without its page, which is removed with the run folder."""

    def line(self, label: str, text: str, level: int = NORMAL) -> None:
        if label != "page":
            super().line(label, text, level)


def _check_settings(folder: LearningFolder, task: str, settings: Mapping[str, Any]) -> None:
    """Raise a PackError for a setting that is wrong, or that the served version has already."""
    number = folder.current
    if "rank" in settings and folder.pack_of(number) is not None:
        raise PackError(
            f"--rank: the candidate continues version {number}, whose adapters keep their rank. "
            "Leave it out.",
            "conflict",
            "rank",
        )
    resolve({**settings, "task": task}, defaults=_DEFAULTS)


def _recipe(folder: LearningFolder, job: Job, run: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a candidate, with base and adapters of what it continues."""
    adapters: dict[str, Any] = {}
    start = folder.pack_of(job.start)
    if start is not None:
        adapters = {**adapter_settings(start), **_quantization(start, run["model"])}
        adapters["template_kwargs"] = template_kwargs_of(start.manifest)

    settings = {**job.settings, **adapters, **run, "task": job.task}
    settings["data"] = str(folder.candidate / DATA)
    return resolve(settings, defaults=_DEFAULTS)


def _quantization(pack: Pack, model: str) -> dict[str, Any]:
    """Return settings that quantize a base model on loading as the base of a pack was."""
    _, config = check_checkpoint(pack, model)
    quantize = quantize_for(pack, config)
    if quantize == "none":
        return {}

    settings = {"quantize": quantize, **quantize_options(pack)}
    if quantize != "nf4":  # others have none
        del settings["double_quant"]
    return settings


AUTO = "auto"


@dataclass(frozen=True)
class Learned:
    """The result of `learn`."""

    figures: Mapping[str, Any]  # of the candidate: its rows, its gain and whether it won
    version: int  # that is served now
    pack: Path  # the folder of the candidate

    def to_json(self) -> dict[str, Any]:
        return {**self.figures, "version": self.version, "pack": str(self.pack)}

    def lines(self) -> list[str]:
        if self.figures["won"]:
            return [f"swapped   version {self.version} is served from now on: {self.pack}"]
        reason = f"not better by more than {WINS_BY:g} standard errors"
        if self.figures.get("worse_on_data"):
            reason = f"worse on --data, or it has fewer than {LEAST_HELD_OUT} rows"
        return [f"not swapped: the candidate is {reason}. Version {self.version} is still served."]


def versions_locked(folder: LearningFolder) -> AbstractContextManager[None]:
    """Let one process at a time change the versions of a folder."""
    busy = (
        f"{folder.path}: another `packs learn` is at work there. Wait for it, or end it; the same "
        "command continues it."
    )
    return exclusive_writer(folder.versions_folder, busy)


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
        if _has_won(folder):  # in an earlier call that was interrupted here
            return _serve_candidate(folder)

        job = unfinished_job(folder, specified)
        if job is None:
            job = _new_job(folder, task, specified)

        display.line(
            "learn",
            f"{job.task}: {job.train} rows to train on, {job.held_out} held out · continues "
            f"version {job.start}",
        )
        pack = train_candidate(folder, job, model, display)
        offload_base = settings.get("offload_base", "auto")
        base = load_base_for(pack, model, "trust_remote_code" in settings, offload_base)

        served = folder.pack_of(job.start)
        comparison = compare(base, served, pack, job.task, folder.candidate / DATA)
        display.line("gain", comparison.text)

        others = None
        if data is not None:
            others = compare_on(base, served, pack, data)
            display.line("data", others.text)
        _write_figures(folder, job, comparison, others)

        if _figures(folder)["won"]:
            return _serve_candidate(folder)
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
    is_worse = others is not None and not others.is_above(-WINS_BY)
    figures = {
        "task": job.task,
        "continues": job.start,
        "rows": job.train,
        **asdict(comparison),
        "won": comparison.is_above(WINS_BY) and not is_worse,
        "worse_on_data": is_worse,
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }
    atomic_write(folder.candidate / FIGURES, to_json(figures))

    for part in (folder.candidate / DATA, run_folder(folder.candidate / PACK)):
        shutil.rmtree(part, ignore_errors=True)


def _figures(folder: LearningFolder) -> dict[str, Any]:
    return read_json(folder.candidate / FIGURES)


def _has_won(folder: LearningFolder) -> bool:
    """Whether there is a candidate that is better than the version that is served now."""
    if not (folder.candidate / FIGURES).is_file():
        return False

    figures = _figures(folder)
    return figures["won"] and figures["continues"] == folder.current


def _serve_candidate(folder: LearningFolder) -> Learned:
    """Make the candidate a version, and serve it."""
    number = folder.add_version()
    folder.serve(number)
    version = folder.version_folder(number)
    return Learned(read_json(version / FIGURES), number, version / PACK)


def serve_version(folder: LearningFolder, number: int) -> None:
    """Serve a version that there is; a PackError if there is none, or a candidate is trained."""
    with versions_locked(folder):
        folder.serve(number)
