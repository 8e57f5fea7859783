"""``status.json`` of a run folder: what a run is doing and how it ended, written and read.

`read_status` tells the state of a run by its folder alone, so that all who look at it agree.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_type_hints

from ..display import Display, Task
from ..errors import CRASHED, PackError, as_pack_error, reason_of
from ..files import lock_of
from ..filesystem import PARTIAL, hidden_name, is_locked
from ..gates import failures
from ..reading import read_json
from ..report.facts import number, text
from ..sandbox.process import start_of
from ..terminal import printable
from .observer import Observer
from .run_folder import REPORT, STATUS, WAITING, RunFolder

_EVERY_S = 1.0  # between two batches that are written
_BYTES = 64 << 10  # of a file that is read
_MOST_TEXT = 4000  # characters of an error
_FINISHED = "finished"
_STARTING = "Preparing the run"
_FINISHING = "Writing the result"
# In words, by the label under which the display shows the work.
PHASES = {
    "base": "Reading the model",
    "data": "Reading the examples",
    "teacher": "Computing the teacher's predictions",
    "path": "Measuring the fastest path",
    "samples": "Answering validation prompts",
    "train": "Training",
    "eval": "Evaluating the held-out examples",
    "gates": "Measuring the gates",
}

State = Literal["waiting", "training", "stopped", "finished", "failed"]


class Status(Observer):
    """Writes ``status.json`` when the phase of a run changes, and once a second while it trains.

    A file that cannot be written changes nothing for the run: a later call tries again. Of a run
    that ended, ``ended`` has the ``reason`` (``finished``, a code of `PackError`, or ``crashed``),
    the ``exit_code`` of the command, and the ``error`` with the ``flag`` of its setting.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / STATUS
        self._partial = hidden_name(self._file, PARTIAL)
        self._process = {"process": os.getpid(), "started": start_of(os.getpid())}
        self._phase = self._between = _STARTING
        self._line: Mapping[str, Any] = {"batch": 0}  # of the last batch
        self._batches: int | None = None  # of the run
        self._bar: Task | None = None  # of the training
        self._exit_code = 0
        self._ended: dict | None = None
        self._next = 0.0  # when a batch is written again

    @contextmanager
    def working(self, label: str, task: Task | None = None) -> Iterator[None]:
        """Name the work of a label as the phase meanwhile; as `Display.follower`."""
        if label == "train":
            self._bar = task
            self._between = _FINISHING
        self._enter(PHASES.get(label, self._phase))
        try:
            yield
        finally:
            self._enter(self._between)

    def _enter(self, phase: str) -> None:
        if phase != self._phase:
            self._phase = phase
            self.write()

    def begin(self, batch: int, batches: int) -> None:
        """Note the last batch of a checkpoint, if there is one, and how many the run has."""
        self._line = {"batch": batch}
        self._batches = batches

    def on_step(self, line: dict) -> None:
        self._line = line
        if time.monotonic() >= self._next:
            self.write()

    def on_end(self, report: dict) -> None:
        self._exit_code = int(bool(failures(report["gates"])))

    def end(self, error: BaseException | None = None) -> None:
        """Record how the run ended: with an error, or finished."""
        self._ended = {"reason": _FINISHED, "exit_code": self._exit_code}
        if error is not None:
            self._ended = _facts_of(error)
        self._phase = ""
        self.write()

    def write(self) -> None:
        """Replace the file, not durably: after a crash of the system a lock tells more."""
        self._next = time.monotonic() + _EVERY_S
        left = None  # of the training, its validations included
        if self._phase == PHASES["train"] and (pace := self._bar.pace()) is not None:
            left = pace * (self._batches - self._line["batch"])

        facts = {
            **self._process,
            "updated": time.time(),
            "phase": self._phase,
            "batch": self._line["batch"],
            "batches": self._batches,
            "seconds_left": left,
            "peak_gb": self._line.get("peak_gb"),
            "ended": self._ended,
        }

        try:
            self._partial.write_text(json.dumps(facts, indent=2) + "\n")
            os.replace(self._partial, self._file)
        except OSError:
            with suppress(OSError):
                self._partial.unlink()


def _facts_of(error: BaseException) -> dict[str, Any]:
    ours = as_pack_error(error)
    if ours is None:
        message = f"{type(error).__name__}: {reason_of(error)}"
        return {"reason": "crashed", "exit_code": CRASHED, "error": message}
    facts = {"reason": ours.code, "exit_code": ours.exit_code, "flag": ours.flag}
    return {**facts, "error": printable(ours.message)}


@contextmanager
def followed(display: Display, folder: Path, resume: bool) -> Iterator[Status]:
    """Keep the status of a run in its folder.

    A run that fails before it wrote anything else leaves no folder.
    """
    status = Status(folder)
    if not resume:
        with suppress(OSError):
            folder.mkdir(exist_ok=True)
    is_new = not any(name != STATUS for name in _names(folder))
    status.write()
    with suppress(OSError):
        (folder / WAITING).unlink(missing_ok=True)

    display.follower = status.working
    try:
        yield status
    except BaseException as error:
        status.end(error)
        if is_new and _names(folder) == [STATUS]:
            with suppress(OSError):
                (folder / STATUS).unlink()
                folder.rmdir()
        raise
    finally:
        display.follower = None
    status.end()


def _names(folder: Path) -> list[str]:
    with suppress(OSError):
        return os.listdir(folder)
    return []


@dataclass(frozen=True)
class RunStatus:
    """What the folder of a run says about it; what is missing or malformed is None or empty.

    Attributes:
        state: ``training`` while its process holds the lock of the folder, ``waiting`` if a queue
            is to start it, ``finished`` if it has a report, ``stopped`` if it was interrupted or
            killed and can be resumed, else ``failed``.
        updated: seconds since 1970, at which ``seconds_left`` were left of the training.
        reason: why it ended, as of `Status`; with the exit code of the command, the error, and the
            flag of a setting. Empty for a run that was killed.
    """

    state: State
    process: int | None
    started: str
    updated: float | None
    phase: str
    batch: int | None
    batches: int | None
    seconds_left: float | None
    peak_gb: float | None
    reason: str
    exit_code: int | None
    error: str
    flag: str

    @property
    def is_alive(self) -> bool:
        """Whether the process runs on this machine, and is no other of the same number."""
        return bool(self.process and self.started) and start_of(self.process) == self.started


def read_status(run: Path) -> RunStatus:
    """Return the state of a run and what ``status.json`` has; a damaged file has nothing."""
    facts: dict[str, Any] = {}
    with suppress(OSError, PackError):
        facts = read_json(run / STATUS, dict, _BYTES)
    if isinstance(facts.get("ended"), dict):
        facts |= facts["ended"]

    readers: dict[Any, Callable] = {
        str: partial(text, most=_MOST_TEXT),
        int | None: lambda value: value if type(value) is int else None,
        float | None: number,
    }
    kinds = get_type_hints(RunStatus)
    kinds.pop("state")
    values = {name: readers[kind](facts.get(name)) for name, kind in kinds.items()}
    return RunStatus(_state(run, values["reason"]), **values)


def _state(run: Path, reason: str) -> State:
    if is_locked(lock_of(run)):
        return "training"
    if (run / WAITING).is_file():
        return "waiting"
    if (run / REPORT).is_file() or reason == _FINISHED:
        return "finished"
    if reason in ("", "interrupted") and RunFolder(run).checkpoints():
        return "stopped"
    return "failed"
