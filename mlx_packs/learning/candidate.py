"""A candidate: a pack that is trained on rated answers, from the version that is served."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..config.recipe import Recipe, resolve
from ..display import NORMAL, Display
from ..errors import PackError
from ..files import atomic_folder, to_json
from ..packs.compatibility import check_checkpoint, quantize_for, quantize_options
from ..packs.manifest import MANIFEST, chat_template_of, template_kwargs_of
from ..packs.pack import Pack
from ..packs.records import note_of_start
from ..reading import read_json
from ..tensors import save_tensors
from ..training.initial_adapters import adapter_settings
from ..training.run import train_request
from ..training.run_folder import RunFolder
from ..training.settings import Request
from .folder import FIGURES, PACK, LearningFolder
from .rows import Split

DATA = "data"
_JOB = "job.json"
START = "start.safetensors"
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
    """Write rows and first adapters of a candidate in place of the last one.

    Raises:
        PackError: a setting is wrong, or there are too few rows, or none that are new.
    """
    _check_settings(folder, task, settings)
    if split.fault:
        raise PackError(f"{folder.path}: --task {task} has {split.fault}", "data")

    rows = hashlib.sha256(to_json([split.train, split.held_out]).encode()).hexdigest()
    job = Job(task, folder.current, len(split.train), len(split.held_out), settings, rows)
    _check_new(folder, job)

    start = folder.pack_of(job.start)

    with atomic_folder(folder.candidate, replace=True) as partial:
        partial.chmod(0o700)
        data = partial / DATA
        data.mkdir()
        for name, rows in (("train", split.train), ("valid", split.held_out)):
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
            (data / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")

        if start is not None:
            save_tensors(partial / START, dict(start.load_tensors()))
        (partial / _JOB).write_text(to_json(asdict(job)), encoding="utf-8")
    return job


def _check_new(folder: LearningFolder, job: Job) -> None:
    """Raise a PackError if a candidate of these rows and settings was compared before.

    Otherwise each night would continue on the rows of the last, or train again what was put back.
    """
    served = folder.version_folder(job.start)
    numbers = [version.number for version in folder.versions()]

    for earlier in (folder.candidate, *map(folder.version_folder, numbers)):
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
    start = folder.candidate / START

    if checkpoint is not None:
        run["resume"] = True
    else:
        run["overwrite"] = True
        if start.is_file():
            run["resume_adapter_file"] = str(start)

    recipe = _recipe(folder, job, run)
    pack = train_request(Request(recipe, model, display=_Shown(display.level))).pack
    served = folder.pack_of(job.start)
    if served is not None and (note := note_of_start(served.manifest, pack.manifest)):
        display.line("note", note)
    return pack


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
    """Return the recipe of a candidate, with base, adapters and template of what it continues."""
    adapters: dict[str, Any] = {}
    start = folder.pack_of(job.start)
    if start is not None:
        adapters = {**adapter_settings(start), **_quantization(start, run["model"])}
        adapters["template_kwargs"] = template_kwargs_of(start.manifest)
        adapters["chat_template"] = chat_template_of(start.manifest)

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
