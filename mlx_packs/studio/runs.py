"""What the screens Runs and Run show: read from the run folders for each request, and never kept.

A folder may be somebody else's, damaged, or as large as its disk: reading is bounded, and what
cannot be read is one line in place of the rest.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from ..errors import PackError, as_pack_error, file_errors, flag_of
from ..gates import MEANING
from ..packs.facts import all_changes
from ..reading import json_objects, tail
from ..report.facts import MOST_TEXT, Page, curve_of, extremes, recipe_sections, setting_text, text
from ..report.page import render, table_of
from ..serving.http import public_message
from ..training.run_folder import CONFIG, LOG, RunFolder, name_of_run, run_folder
from ..training.run_page import facts_of_run, read_report, run_facts, with_answers
from ..training.state import METRICS, batches_of
from ..training.status import PHASES, RunStatus, read_status
from .access import RUNS, folder_of_run
from .jobs import SETTINGS, command_line, waiting_arguments

_MOST_ROWS = 200
_MOST_POINTS = 2000  # of a series in an answer
_LOG_BYTES = 256 << 10
_LOG_LINES = 200
_UNITS = ((86400, "day"), (3600, "hour"), (60, "minute"), (1, "second"))


@dataclass(frozen=True)
class RunView:
    """What both screens show of a run; of one that cannot be read, only its name and why."""

    name: str
    fault: str = ""
    age: str = ""
    status: RunStatus | None = None
    recipe: Mapping = field(default_factory=dict)
    report: Mapping | None = None
    last_line: str = ""  # of its log

    @property
    def state(self) -> str:
        return self.status.state if self.status else ""

    @property
    def progress(self) -> str:
        return progress_of(self.status) if self.status else ""

    @property
    def error(self) -> str:
        """Why it ended; of a run that could not begin, the last line that it printed."""
        unknown = "It recorded no reason. Its process may have been killed."
        return self.status.error or (not self.recipe and self.last_line) or unknown

    @property
    def names(self) -> tuple[str, ...]:
        """The model and the data."""
        data = "hf_dataset" if self.recipe.get("hf_dataset") else "data"
        return tuple(setting_text(key, self.recipe.get(key)) or "–" for key in ("model", data))

    @property
    def change(self) -> str:
        """The first held-out number before and after."""
        changes = all_changes(self.report or {})
        return f"{changes[0].title} {' → '.join(changes[0].texts)}" if changes else "–"


def runs_of(home: Path) -> tuple[list[RunView], int]:
    """Return the newest runs of a home, and how many older ones there are."""
    folder = home / RUNS
    if not folder.is_dir():
        return [], 0

    changed = []
    with file_errors(f"{RUNS}/"), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith("-run") and (entry.is_symlink() or entry.is_dir()):
                time_changed = entry.stat(follow_symlinks=False).st_mtime
                changed.append((time_changed, name_of_run(Path(entry))))

    runs = []
    for time_changed, name in sorted(changed, reverse=True)[:_MOST_ROWS]:
        try:
            run = _opened(home, name)
        except (PackError, OSError) as error:
            run = RunView(text(name), text(public_message(as_pack_error(error)), 400))
        runs.append(replace(run, age=f"{duration(time.time() - time_changed)} ago"))
    return runs, len(changed[_MOST_ROWS:])


def _opened(home: Path, name: str) -> RunView:
    folder = folder_of_run(home, name)
    status = read_status(folder)
    is_new = status.state == "training" or RunFolder(folder).is_run()
    recipe = {}
    if (folder / CONFIG).exists() or not is_new:
        recipe = RunFolder(folder).read_identity()["recipe"]
    log = "" if recipe else "".join(_log(folder)[-1:])
    return RunView(name, "", "", status, recipe, read_report(folder), log)


def _log(folder: Path) -> list[str]:
    """Return the last lines that a run of the studio printed."""
    lines = tail(folder / LOG, most=_LOG_BYTES).lines[-_LOG_LINES:]
    return [text(line.decode("utf-8", "replace"), MOST_TEXT) for line in lines]


def progress_of(status: RunStatus) -> str:
    """Return in words how far a run is, and what is left."""
    if status.state == "training" and status.phase != PHASES["train"]:
        return status.phase
    if status.batch is None:
        return ""

    batch = f"Batch {status.batch:,}"
    if status.batches:
        batch += f" of {status.batches:,}"
    if status.state != "training" or status.seconds_left is None or status.updated is None:
        return batch
    left = status.seconds_left - max(0.0, time.time() - status.updated)  # a clock may go back
    return f"{batch}, {duration(left)} left"


def duration(seconds: float) -> str:
    """Return a duration in the largest unit of which there are two: 90 minutes, 3 days."""
    seconds = max(seconds, 0)
    size, unit = next(each for each in _UNITS if seconds >= 2 * each[0] or each[0] == 1)
    count = round(seconds / size)
    return f"{count:,} {unit}{'s' if count != 1 else ''}"


def run_page(home: Path, name: str) -> dict[str, Any]:
    """Return what the template of the screen Run needs."""
    folder = folder_of_run(home, name)
    run = _opened(home, name)
    facts = facts_of_run(name, run.recipe, RunFolder(folder).metrics(), run.report, Page(title=""))
    checkpoints = RunFolder(folder).checkpoints()
    gates = (run.report or {}).get("gates")

    return {
        "run": run,
        "flag": flag_of(run.status.flag) if run.status.flag else "",
        "facts": with_answers(facts, folder),
        "checkpoint": batches_of(checkpoints[-1]) if checkpoints else None,
        "gates": [
            (text(MEANING.get(key, key), 40), isinstance(gate, dict) and gate.get("passed") is True)
            for key, gate in (gates if isinstance(gates, dict) else {}).items()
        ],
        "points": table_of(facts.curve),
        "log": _log(folder),
        "again": _form_of(run.recipe),
        "command": _command(home, run, bool(checkpoints)),
    }


def _form_of(recipe: Mapping) -> str:
    """Return the address of the form of a new run that has the settings of a run."""
    rows = [row for _, rows in recipe_sections(recipe) for row in rows]
    changed = {f"--{flag}": value for flag, value, is_changed in rows if is_changed}
    values = {name: changed.get(flag_of(name)) for name in SETTINGS}
    values |= {name: recipe.get(name) for name in ("model", "data")}
    return f"/new?{urlencode({name: value for name, value in values.items() if value})}"


def _command(home: Path, run: RunView, has_checkpoint: bool) -> str:
    """Return what continues, starts or reports a run, for a terminal."""
    folder = run_folder(home / RUNS / run.name)
    arguments = ["report", str(folder)]
    if run.state == "waiting":
        arguments = waiting_arguments(home, folder)
    elif has_checkpoint and run.state in ("stopped", "failed"):
        arguments = ["train", f"--out={RUNS}/{run.name}", "--resume"]
    return command_line(home, arguments)


def live(home: Path, name: str, file: str, start: int) -> dict[str, Any]:
    """Return what is new in a run since the bytes of its metrics that a page has."""
    folder = folder_of_run(home, name)
    status = read_status(folder)
    new = tail(folder / METRICS, file, start)
    series = {}
    for key, points in curve_of(json_objects(new.lines)).items():
        batches, values = zip(*extremes(points, _MOST_POINTS), strict=True)
        series[key] = [[int(batch) for batch in batches], [float(f"{v:.5g}") for v in values]]

    answers = with_answers(Page(title=""), folder)
    return {
        "file": new.file,
        "next": new.end,
        "whole": new.is_whole,
        "series": series,
        "state": status.state,
        "progress": progress_of(status),
        "batch": status.batch or 0,
        "batches": status.batches,
        "answers": [answer.after for answer in answers.samples],
        "answered": answers.answered,
    }


def report_page(home: Path, name: str) -> str:
    """Return the page of `packs report`, made anew: one in the folder could have any content."""
    return render(run_facts(folder_of_run(home, name)))
