"""The process of a trial, or of several in one batch: `main` trains to the end of a rung.

It writes the results.
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import signals, terminal
from ..config.fields import read_settings
from ..config.recipe import resolve
from ..display import QUIET, Display
from ..errors import PackError, RunStopped
from ..report.facts import number
from ..training.observer import Observer
from ..training.result import TrainRun
from ..training.run import train_request
from ..training.settings import Request
from ..training.together import train_each
from ..training.unattended import CRASHED
from .trial import RECIPE, TOO_LARGE, Result, Trial, measured, write_result

# How long the process of an earlier sweep that was killed may take to save its checkpoint.
_WAIT_S = 120.0
# Faults of the machine, not of a trial: they end the sweep, which goes on later.
_OF_ALL = ("unwritable", "busy", "interrupted")


class StopAt(Observer):
    """Ends a run after some batches; the learning rate is that of the whole run."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_phase_start(self, batches: int, done: int) -> None:
        """End a run at once that was interrupted after the last batch."""
        self._check(done)

    def on_step(self, line: dict) -> None:
        self._check(line["batch"])

    def _check(self, done: int) -> None:
        if done >= self.batches:
            self.stop_reason = f"{self.batches} batches (sweep)"


def train_trials(trials: Sequence[Trial], until: int | None) -> list[Result | None]:
    """Train trials, or continue from their checkpoints, and return the results.

    Several are trained in one batch. One that fails there has no result, unless its numbers are not
    finite; the parent trains it alone.
    """
    display = Display()
    requests = [_request(trial, until, display) for trial in trials]
    if len(requests) == 1:
        return [_result(train_request(requests[0]))]

    quiet = [replace(request, display=Display(QUIET)) for request in requests[1:]]
    ends = train_each([requests[0], *quiet])
    for end in ends:
        if isinstance(end, PackError) and end.code in _OF_ALL:
            raise end

    results: list[Result | None] = []
    for trial, end in zip(trials, ends, strict=True):
        if isinstance(end, TrainRun):
            results.append(replace(_result(end), packs=len(trials)))
            continue
        display.line("trial", f"{trial.folder.name}: {end.message}")
        diverged = Result(error=end.message, packs=len(trials))
        results.append(diverged if end.code == "diverged" else None)
    return results


def _request(trial: Trial, until: int | None, display: Display) -> Request:
    recipe = resolve(read_settings(trial.folder / RECIPE))
    run: dict[str, Any] = {**recipe.run, "out": str(trial.pack)}
    run["resume"] = trial.is_begun
    run["overwrite"] = not trial.is_begun
    if trial.is_begun:
        run.pop("resume_adapter_file", None)

    callbacks = ()
    if until is not None:
        callbacks = (StopAt(until),)
    recipe = replace(recipe, run=run, names_data=True)
    return Request(recipe, recipe.model, display, callbacks=callbacks)


def _result(trained: TrainRun) -> Result:
    report = trained.report
    return Result(
        batches=report["batches"],
        metrics=measured(report, report["task"]),
        gates={
            name: {**gate, "value": number(gate["value"])} for name, gate in report["gates"].items()
        },
        pack_mb=report["pack_mb"],
        train_s=report["train_s"],
        peak_gb=report["peak_gb"],
    )


def _when_free(trials: Sequence[Trial], until: int | None) -> list[Result | None]:
    """Train trials as soon as no process of an earlier sweep writes their runs any more."""
    end = time.monotonic() + _WAIT_S
    while True:
        try:
            return train_trials(trials, until)
        except PackError as error:
            if error.code != "busy" or time.monotonic() > end:
                raise
        time.sleep(0.5)


def _end_with_parent() -> None:
    """End this process as by SIGTERM, which saves a checkpoint, once its parent is gone."""
    os.read(0, 1)  # it writes nothing
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Train the trials in some folders: ``FOLDER... RUNG BATCHES``; 0 batches train to the end."""
    terminal.guard()
    *folders, rung, batches = sys.argv[1:]
    trials = [Trial(0, {}, Path(folder)) for folder in folders]
    threading.Thread(target=_end_with_parent, daemon=True).start()

    try:
        with signals.handled():
            results = _when_free(trials, int(batches) or None)
    except KeyboardInterrupt as error:  # before the first checkpoint
        sys.exit(128 + signals.number_of(error))
    except PackError as error:
        error.show()
        if error.code in _OF_ALL:
            sys.exit(error.exit_code)
        if len(trials) > 1:
            sys.exit(TOO_LARGE if error.code == "memory" else CRASHED)
        reason = error.message
        if isinstance(error, RunStopped):
            reason = error.reason
        results = [Result(error=reason)]
    except Exception:
        traceback.print_exc()
        sys.exit(CRASHED)

    for trial, result in zip(trials, results, strict=True):
        if result is not None:
            write_result(trial, int(rung), result)
