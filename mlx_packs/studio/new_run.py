"""The screen New run: model, examples, plan and start, as one form whose values are in the address.

The page is sent while the commands behind it work: bad rows appear as they are found.
"""

import dataclasses
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.requests import Request

from ..config.data import COLUMN_SETTINGS
from ..config.fields import facts_of
from ..config.lora import LoRAConfig
from ..config.schema import DataConfig, TrainConfig
from ..config.tasks import tasks_of
from ..display import size
from ..errors import PackError, flag_of
from ..files import make_folder, write_errors
from ..filesystem import temporary
from . import jobs
from .access import DATA, check_data
from .commands import reports_of
from .runs import duration

MOST_BYTES = 2 * 10**9  # of an upload
_SPARE_BYTES = 10**9  # that an upload leaves free
_SHOWN = 5  # examples
_LINES = 60  # that are searched for them: a cell of a table may have many
_KNOWN = 32  # checks that are remembered
_ENDINGS = (".jsonl", ".json", ".csv", ".parquet")
_FILE = re.compile(r"\w[\w .()-]{0,120}")
_PRESETS = {
    "Quick look": {"iters": "60", "rank": "8", "sample_every": "20"},
    "Normal": {"iters": "200", "rank": "16", "sample_every": "50"},
    "Thorough": {"iters": "600", "patience": "3", "rank": "16", "sample_every": "100"},
}
_NOTED = {"iters": "batches", "sample_every": "answers every"}
# The models of docs/choose.md.
_MODELS = """
Qwen3-0.6B Qwen3-1.7B Qwen3-4B Meta-Llama-3-8B-Instruct Qwen3-8B Qwen3-14B Qwen3-32B
Meta-Llama-3-70B-Instruct
""".split()
_READING = ("model", "task", "max_seq_length", *COLUMN_SETTINGS)  # what examples are read with
_VALUES = (*jobs.SETTINGS, "name", "preset", "row")
_FIELDS = {
    field.name: facts_of(field)
    for config in (DataConfig, LoRAConfig, TrainConfig)
    for field in dataclasses.fields(config)
    if field.name not in ("data", "on_bad_row")
}
_FACTS = {name: _FIELDS[name] for name in jobs.SETTINGS if name in _FIELDS}  # of the inputs
_PLANNED = {"model", "data", "on_bad_row"}  # and more settings, by which `packs plan` estimates
_PLANNED |= {k for k, f in _FACTS.items() if f.memory or f.disk or f.time or f.column}
_checks: dict[tuple, list[dict]] = {}


def values_of(form: Mapping[str, str]) -> dict[str, str]:
    """Return the values of a form that are not empty, with the change of the button pressed."""
    changes = (change.partition("=")[::2] for change in form.get("change", "").split())
    values = {**form, **dict(changes)}
    values["model"] = form.get("other") or values.get("model", "")
    return {name: values[name] for name in _VALUES if values.get(name)}


def settings_of(values: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a run: what the form specifies, over its preset."""
    settings = {name: values[name] for name in jobs.SETTINGS if values.get(name)}
    preset = _PRESETS.get(values.get("preset", ""), _PRESETS["Normal"])
    task = settings.get("task", TrainConfig.task)
    chosen = {name: preset[name] for name in preset if task in (tasks_of(name) or [task])}
    if "epochs" in settings:
        del chosen["iters"]
    return chosen | settings


class NewRun:
    """What the template shows, in its order; commands run when their results are asked for."""

    facts = _FACTS
    most_bytes = MOST_BYTES

    def __init__(
        self, home: Path, values: Mapping[str, str], fault: PackError | None = None
    ) -> None:
        self._home = home
        self.values = dict.fromkeys(_VALUES, "") | dict(values)
        self.fault = fault
        self.blocked = ""  # why the run cannot start
        self.report: Mapping[str, Any] = {}  # of `packs data`
        self.columns: list[str] = []  # of the file, if none is called as expected
        self.bad = 0
        self.training = jobs.training(home)

        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(values.get("data", "")).stem).strip("-._")
        self.name = values.get("name") or jobs.free_name(home, stem[:40] or "run")

    def models(self) -> Mapping[str, str]:
        """Return a note on each model by its name, those on this disk first."""
        notes = {"tiny": "bundled: to try what training is like"}
        with suppress(PackError):
            (report,) = self._checked(time.time() // 60, "list", "--bases")
            for base in report["bases"]:
                on_disk = base["why"] or f"on this disk, {size(1e9 * base['gb'])}"
                notes.setdefault(base["name"], on_disk)
        for model in _MODELS:
            notes.setdefault(f"mlx-community/{model}-4bit", "downloaded at the start")
        return notes

    def sources(self) -> list[str]:
        """Return the files and folders of data/ that may be examples."""
        entries = (self._home / DATA).glob("*")
        named = [e for e in entries if _FILE.fullmatch(e.name) and not e.is_symlink()]
        usable = [e.name for e in named if e.is_dir() or e.suffix in _ENDINGS]
        return sorted(f"{DATA}/{name}" for name in usable)

    def bad_rows(self) -> Iterator[dict]:
        """Yield the rows that cannot be used; then ``report`` is there, or the run is blocked."""
        data = self.values["data"]
        first = None
        try:
            check_data(self._home, data)
            options = ("--every-row", "--bad-rows", f"--samples={_SHOWN}", data)
            for report in self._checked(self._stamp(), "data", *self._flags(*_READING), *options):
                if "splits" in report:
                    self.report = report
                elif "where" in report:
                    first = first or report
                    yield report
                else:
                    self.columns = report.get("error", {}).get("columns", [])
        except PackError as error:
            self._block(error)
            if self.columns and error.flag is None:
                self.blocked = "Which column is asked, and which is learned? Choose them."
            elif first and error.code == "data":  # no row of a split is left
                where = self.place(first["where"])
                self.blocked = f"{data}: too few rows can be used. {where}: {first['message']}"

        splits = self.report.get("splits", {}).values()
        self.bad = sum(sum(split["bad_rows"].values()) for split in splits)
        if self.bad and not self.values["on_bad_row"]:
            self.blocked = f"{self.bad:,} rows cannot be used. Leave them out, or correct the file."

    def examples(self) -> list[dict]:
        """Return some examples with the texts that are trained on, the first or from a line."""
        line = self.values["row"]
        if not line.isdecimal():
            return self.report["samples"]
        rows = ",".join(str(int(line) + n) for n in range(_LINES))
        flags = self._flags("data", *_READING)
        try:
            (report,) = self._checked(
                self._stamp(), "train", *flags, "--show-mask", f"--rows={rows}"
            )
        except PackError as error:
            return [{"where": line, "message": self.text_of(error), "text": ""}]
        return report["examples"][:_SHOWN]

    def plan(self) -> Mapping[str, Any]:
        """Return the report of `packs plan`, and its ``best`` option with the ``changes``."""
        if self.blocked:
            return {}
        settings = settings_of(self.values)
        flags = [f"{flag_of(name)}={settings[name]}" for name in settings if name in _PLANNED]
        try:
            jobs.check_settings(settings)
            *_, report = reports_of(self._home, "plan", *flags)
        except PackError as error:
            self._block(error)
            return {}

        best = report["smallest_change"]
        changes = " ".join(f"{name}={value}" for name, value in best["changes"].items())
        if best["code"]:
            self.blocked = "The model needs Python code of its own, which the studio never runs."
        elif best["fit"] == "no":
            self.blocked = f"No run of this model fits into the memory ({best['why']})."
        elif changes:
            self.blocked = "The run does not fit into the memory with these settings."
        return {**report, "best": best, "changes": changes}

    def presets(self, plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield each preset with what it means by a plan, and its numbers."""
        chosen = settings_of(self.values).get("iters")
        for name, settings in _PRESETS.items():
            note = ", ".join(f"{_NOTED.get(key, key)} {value}" for key, value in settings.items())
            if plan and not plan["changes"]:
                best, batches = plan["best"], int(settings["iters"])
                reads = batches * best["batch_size"] / self.report["splits"]["train"]["rows"]
                often = f"each example about {reads:,.0f} times"
                if reads < 1.5:
                    often = f"about {100 * min(reads, 1):.0f} % of the examples"
                if best["seconds"]["high"] is not None and chosen:
                    seconds = best["seconds"]["high"] * batches / int(chosen)
                    often += f", in at most {duration(seconds)}"
                note = f"reads {often}; {note}"
            yield name, note

    @property
    def command(self) -> str:
        """The command of the run, for a terminal."""
        try:
            arguments = jobs.arguments_of(self._home, self.name, settings_of(self.values))
        except PackError as error:
            return f"# {error.message}"
        return jobs.command_line(self._home, arguments)

    def _block(self, error: PackError) -> None:
        self.fault = self.fault or error
        self.blocked = self.text_of(error)

    @staticmethod
    def place(where: str) -> str:
        """Return the place of a row in words."""
        return where.replace(":", ", line ")

    @staticmethod
    def text_of(error: PackError) -> str:
        """Return the message, without the name of a setting that is no field of the form."""
        return str(error) if error.flag in _FACTS else str(error).removeprefix(f"{error.flag}: ")

    def _flags(self, *names: str) -> list[str]:
        return [f"{flag_of(name)}={self.values[name]}" for name in names if self.values[name]]

    def _stamp(self) -> tuple:
        """Return what changes with the files of the examples."""
        path = self._home / self.values["data"]
        files = [path, *path.glob("*")]
        with suppress(OSError):
            return tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in files)
        return ()

    def _checked(self, stamp: object, *arguments: str) -> Iterator[dict]:
        """Yield the reports of a command, from memory if the stamp is as it was then."""
        key = (self._home, stamp, arguments)
        reports = _checks.get(key, [])
        yield from reports
        if not reports:
            for report in reports_of(self._home, *arguments):
                reports.append(report)
                yield report
            _checks[key] = reports
        for old in list(_checks)[:-_KNOWN]:
            _checks.pop(old, None)


async def save_upload(home: Path, request: Request) -> str:
    """Write a file of examples to data/; return its place. One that is cut short is removed.

    Raises:
        PackError: the file is of another kind, empty, too large, or incomplete.
    """
    name = request.query_params.get("name", "")
    count = int(request.headers.get("content-length") or 0)
    stem, ending = os.path.splitext(name)
    if ending.lower() not in _ENDINGS:
        raise PackError(f"{name:.80}: is none of {', '.join(_ENDINGS)}.", "unsupported", "data")
    if not 0 < count <= MOST_BYTES:
        text = f"has {count:,} bytes. A file has 1 to {MOST_BYTES:,} bytes."
        raise PackError(f"{name:.80}: {text}", flag="data")
    if shutil.disk_usage(home).free < count + _SPARE_BYTES:
        raise PackError(f"{name:.80}: the disk has too little space.", "unwritable", "data")

    make_folder(home / DATA)
    stem = re.sub(r"[^\w.-]+", "-", stem).strip("-.")[:60] or "examples"
    path = home / DATA / f"{stem}{ending.lower()}"
    with write_errors(path), temporary(path, Path.touch) as partial:
        with partial.open("wb") as file:
            async for part in request.stream():
                file.write(part)
        if partial.stat().st_size != count:
            raise PackError(f"{name:.80}: is incomplete. Upload it again.", flag="data")
        if path.exists():
            path = path.with_name(f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}{path.suffix}")
        os.rename(partial, path)
    return f"{DATA}/{path.name}"
