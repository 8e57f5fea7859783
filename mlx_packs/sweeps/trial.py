"""A trial of a sweep: its folder, the run that trains it in a process of its own, its metrics."""

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import signals, terminal
from ..config.choices import TASKS
from ..config.fields import read_settings
from ..config.recipe import resolve
from ..display import Display
from ..errors import CRASHED, Interrupted, PackError, RunStopped
from ..files import atomic_write, make_folder, to_json
from ..reading import read_json
from ..report.facts import number
from ..training.run_folder import RunFolder

RECIPE = "recipe.json"
LOG = "train.log"
_RESULT = "result-0.json"
# `python -m`, but without the current folder on the path, whose files may be called as modules.
_PROGRAM = (
    "import sys; "
    f"sys.path = [*filter(None, sys.path), {str(Path(__file__).parents[2])!r}]; "
    "from mlx_packs.sweeps.trial import main; main()"
)
_SIGNALLED = {code: n for n in signals.NUMBERS for code in (-n, 128 + n)}  # by exit code
# How long the process of an earlier sweep that was killed may take to save its checkpoint.
_WAIT_S = 120.0
# Faults of the machine, not of a trial: they end the sweep, which goes on later.
_OF_ALL = ("unwritable", "busy", "interrupted")


@dataclass(frozen=True)
class Result:
    """What came of a trial."""

    batches: int = 0  # that it was trained on
    metrics: Mapping[str, float] | None = None  # held-out metrics by name; only finite ones
    gates: Mapping[str, dict] | None = None  # each limit, its value, and whether it passed
    pack_mb: float | None = None
    train_s: float | None = None  # without evaluations
    peak_gb: float | None = None  # of MLX's memory, in 10^9 bytes
    error: str = ""  # why there is no pack; empty if there is one

    @property
    def passed(self) -> bool:
        """Whether there is a pack, and it passes the gates."""
        return not self.error and all(gate["passed"] for gate in (self.gates or {}).values())


@dataclass(frozen=True)
class Trial:
    """One recipe of a sweep: its number, from 1, its values by key of the recipe, its folder."""

    number: int
    values: Mapping[str, Any]
    folder: Path

    @property
    def pack(self) -> Path:
        return self.folder / "pack"

    @property
    def is_begun(self) -> bool:
        """Whether there is a checkpoint to continue from."""
        return bool(RunFolder.of(self.pack).checkpoints())

    @property
    def result(self) -> Result | None:
        """The result; None if the trial is not over. A damaged file is a PackError."""
        file = self.folder / _RESULT
        if not file.is_file():
            return None
        try:
            return Result(**read_json(file))
        except TypeError:
            raise PackError(f"{file}: is not a result. Remove it.", "unreadable") from None


def write_result(trial: Trial, result: Result) -> Result:
    """Write the result of a trial atomically, and return it: from then on it is not repeated."""
    make_folder(trial.folder)
    atomic_write(trial.folder / _RESULT, to_json(vars(result)))
    return result


def train(trial: Trial, recipe: dict[str, Any]) -> Result:
    """Train a trial in a process of its own, and return the result.

    A trial that was interrupted continues from its checkpoint. One that fails has a result with an
    ``error``.

    Raises:
        PackError: something ended it that would end every trial, as a full disk or a signal.
    """
    make_folder(trial.folder)
    atomic_write(trial.folder / RECIPE, to_json(recipe))

    code = _run(trial)
    if (result := trial.result) is not None:
        return result

    reason = _last_line(trial.folder / LOG).removeprefix("packs: ")
    if code in _SIGNALLED:
        raise Interrupted(f"interrupted in trial {trial.number}", _SIGNALLED[code])
    if code == 2:
        raise PackError(f"trial {trial.number}: {reason}", "unwritable")
    if code == -signal.SIGKILL:
        reason = "was killed (SIGKILL), probably for want of memory"
    elif code < 0:
        reason = f"crashed ({signal.Signals(-code).name})"
    return write_result(trial, Result(error=reason or f"ended with exit code {code}"))


def _run(trial: Trial) -> int:
    """Run the process of a trial and return its exit code; it ends when this process does."""
    with (trial.folder / LOG).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(trial.folder)],
            stdin=subprocess.PIPE,  # closed by the system when this process ends, however it does
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process alone
        )

        with process:
            try:
                return process.wait()
            except BaseException:
                process.terminate()  # it saves a checkpoint
                process.wait()
                raise


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    return terminal.printable(last.strip())


def metrics_of(task: str) -> tuple[str, ...]:
    """Return the metrics of a task; a plug-in shares them with the task whose settings it has."""
    facts = TASKS[task]
    if facts.metrics or facts.settings_of is None:
        return facts.metrics
    return TASKS[facts.settings_of].metrics


def measured(report: Mapping, task: str) -> dict[str, float]:
    """Return the finite metrics after training in the report of a run that ends with a task.

    ``answers`` is the share of right answers (``--metric``).
    """
    answers = report.get("answers") or {}
    names = [name for each in (*TASKS, task) for name in metrics_of(each)]
    values = {name: report.get(f"{name}_after") for name in dict.fromkeys(names)}
    values["answers"] = (answers.get("after") or {}).get("share")
    return {name: value for name, v in values.items() if (value := number(v)) is not None}


def train_trial(trial: Trial) -> Result:
    """Train a trial, or continue from its checkpoint, in this process, and return the result."""
    from ..training.run import train_request
    from ..training.settings import Request

    recipe = resolve(read_settings(trial.folder / RECIPE))
    run: dict[str, Any] = {**recipe.run, "out": str(trial.pack)}
    run["resume"] = trial.is_begun
    run["overwrite"] = not trial.is_begun
    if trial.is_begun:
        run.pop("resume_adapter_file", None)

    recipe = replace(recipe, run=run, names_data=True)
    report = train_request(Request(recipe, recipe.model, Display())).report
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


def _when_free(trial: Trial) -> Result:
    """Train a trial as soon as no process of an earlier sweep writes its run any more."""
    end = time.monotonic() + _WAIT_S
    while True:
        try:
            return train_trial(trial)
        except PackError as error:
            if error.code != "busy" or time.monotonic() > end:
                raise
        time.sleep(0.5)


def _end_with_parent() -> None:
    """End this process as by SIGTERM, which saves a checkpoint, once its parent is gone."""
    os.read(0, 1)  # it writes nothing
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Train the trial whose folder is the argument of this process, and write the result."""
    terminal.guard()
    trial = Trial(0, {}, Path(sys.argv[1]))
    threading.Thread(target=_end_with_parent, daemon=True).start()

    try:
        with signals.handled():
            result = _when_free(trial)
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

    write_result(trial, result)
