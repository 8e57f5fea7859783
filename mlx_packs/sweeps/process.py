"""The process of a trial: `main` trains it to the end of a rung, and writes the result."""

import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import signals, terminal
from ..config.fields import read_settings
from ..config.recipe import resolve
from ..display import Display
from ..errors import CRASHED, PackError, RunStopped
from ..report.facts import number
from ..training.observer import Observer
from ..training.run import train_request
from ..training.settings import Request
from .trial import RECIPE, Result, Trial, measured, write_result

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


def train_trial(trial: Trial, until: int | None) -> Result:
    """Train a trial, or continue from its checkpoint, and return the result."""
    recipe = resolve(read_settings(trial.folder / RECIPE))
    run: dict[str, Any] = {**recipe.run, "out": str(trial.pack)}
    run["resume"] = trial.is_begun
    run["overwrite"] = not trial.is_begun
    if trial.is_begun:
        run.pop("resume_adapter_file", None)

    callbacks = (StopAt(until),) if until is not None else ()

    recipe = replace(recipe, run=run, names_data=True)
    request = Request(recipe, recipe.model, Display(), callbacks=callbacks)
    report = train_request(request).report
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


def _when_free(trial: Trial, until: int | None) -> Result:
    """Train a trial as soon as no process of an earlier sweep writes its run any more."""
    end = time.monotonic() + _WAIT_S
    while True:
        try:
            return train_trial(trial, until)
        except PackError as error:
            if error.code != "busy" or time.monotonic() > end:
                raise
        time.sleep(0.5)


def _end_with_parent() -> None:
    """End this process as by SIGTERM, which saves a checkpoint, once its parent is gone."""
    os.read(0, 1)  # it writes nothing
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Train the trial in a folder: ``FOLDER RUNG BATCHES``; 0 batches train to the end."""
    terminal.guard()
    folder, rung, batches = sys.argv[1:]
    trial = Trial(0, {}, Path(folder))
    threading.Thread(target=_end_with_parent, daemon=True).start()

    try:
        with signals.handled():
            result = _when_free(trial, int(batches) or None)
    except KeyboardInterrupt as error:  # before the first checkpoint
        sys.exit(128 + signals.number_of(error))
    except PackError as error:
        error.show()
        if error.code in _OF_ALL:
            sys.exit(error.exit_code)
        reason = error.reason if isinstance(error, RunStopped) else error.message
        result = Result(error=reason)
    except Exception:
        traceback.print_exc()
        sys.exit(CRASHED)

    write_result(trial, int(rung), result)
