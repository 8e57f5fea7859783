"""A trial of a sweep: its folder, the run that trains it in a process of its own, its metrics."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, Signals
from typing import Any

from .. import signals
from ..config.choices import TASKS
from ..errors import Interrupted, PackError
from ..files import atomic_write, make_folder, to_json
from ..reading import read_json
from ..report.facts import number
from ..terminal import printable
from ..training.run_folder import RunFolder

RECIPE = "recipe.json"
LOG = "train.log"
_TAIL_BYTES = 300  # of a log, for the reason of its end
# `python -m`, but without the current folder on the path, whose files may be called as modules.
_PROGRAM = (
    "import sys; "
    f"sys.path = [*filter(None, sys.path), {str(Path(__file__).parents[2])!r}]; "
    "from mlx_packs.sweeps.process import main; main()"
)
_SIGNALLED = {code: n for n in signals.NUMBERS for code in (-n, 128 + n)}  # by exit code


@dataclass(frozen=True)
class Result:
    """What came of a trial at the end of a rung."""

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

    def result(self, rung: int) -> Result | None:
        """Return the result of a rung; None if it is not over. A damaged file is a PackError."""
        file = self.folder / f"result-{rung}.json"
        if not file.is_file():
            return None
        try:
            content = read_json(file)
            content.pop("packs", None)  # written while several trials could share a batch
            return Result(**content)
        except TypeError:
            raise PackError(f"{file}: is not a result. Remove it.", "unreadable") from None


def write_result(trial: Trial, rung: int, result: Result) -> Result:
    """Write the result of a rung atomically, and return it: from then on it is not repeated."""
    make_folder(trial.folder)
    atomic_write(trial.folder / f"result-{rung}.json", to_json(vars(result)))
    return result


def train(trial: Trial, recipe: dict[str, Any], rung: int, until: int | None) -> Result:
    """Train a trial to the end of a rung, in a process of its own, and return the result.

    A rung that is over is not repeated, and one that was interrupted continues from its checkpoint.
    It ends after ``until`` batches; None trains to the end. A trial that fails has a result with an
    ``error``.

    Raises:
        PackError: something ended it that would end every trial, as a full disk or a signal.
    """
    if (result := trial.result(rung)) is not None:
        return result

    make_folder(trial.folder)
    atomic_write(trial.folder / RECIPE, to_json(recipe))

    code = _run(trial, rung, until)
    if (result := trial.result(rung)) is not None:
        return result

    reason = _last_line(trial.folder / LOG).removeprefix("packs: ")
    if code in _SIGNALLED:
        raise Interrupted(f"interrupted in trial {trial.number}", _SIGNALLED[code])
    if code == 2:
        raise PackError(f"trial {trial.number}: {reason}", "unwritable")
    if code == -SIGKILL:
        reason = "was killed (SIGKILL), probably for want of memory"
    elif code < 0:
        reason = f"crashed ({Signals(-code).name})"
    return fail(trial, rung, reason or f"ended with exit code {code}")


def fail(trial: Trial, rung: int, reason: str) -> Result:
    """Write that a trial has no pack, and why; return this result."""
    return write_result(trial, rung, Result(error=reason))


def _run(trial: Trial, rung: int, until: int | None) -> int:
    """Run the process of a trial and return its exit code; it ends when this process does."""
    with (trial.folder / LOG).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(trial.folder), str(rung), str(until or 0)],
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
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
    for line in reversed(lines):
        if line.strip():
            return printable(line.strip())
    return ""


def metrics_of(task: str) -> tuple[str, ...]:
    """Return the metrics of a task; a plug-in has those of the task whose settings it has."""
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
