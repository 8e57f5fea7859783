"""Losses and gradients that are not finite (``--on-nan``): stop, skip the update, or back off.

Each is recorded in ``not_finite.jsonl`` of the run folder, with the rows of its batches. What a
resumed run needs is there too: the updates that were skipped in a row, and the learning rate's
factor.

In float16 an overflow is the business of the loss's scale (update.py): its skipped updates are
not counted here, and a loss that overflows leads to bfloat16. There these policies apply.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ..data.dataset import Batch
from ..errors import BackOff, PackError
from ..files import atomic_write
from ..reading import parse_json, read_text
from .observer import Observer
from .run_folder import NOT_FINITE
from .settings import Run

MOST_SKIPPED = 10  # updates in a row
MOST_BACK_OFFS = 3  # of a run
_SHOWN = 4  # rows in a message


class OnNan:
    """The policy of a run, whose observers are notified of skipped updates."""

    def __init__(self, run: Run, observers: Sequence[Observer]) -> None:
        self._run = run
        self._observers = observers
        self._file = run.folder / NOT_FINITE
        self._records: list[dict] = []
        self._skipped = 0  # updates in a row

    @property
    def policy(self) -> str:
        """``stop``, ``skip`` or ``back-off``."""
        return self._run.train.on_nan

    @property
    def factor(self) -> float:
        """Factor of the learning rate."""
        return 0.5 ** self._count("back-off")

    def facts(self) -> dict[str, int]:
        """Return how many updates were skipped, and how often the run backed off, if it did."""
        counts = {"skipped": self._count("skip"), "back_offs": self._count("back-off")}
        return {name: count for name, count in counts.items() if count}

    def _count(self, action: str) -> int:
        return sum(record["action"] == action for record in self._records)

    def resume(self, batches: int) -> None:
        """Read the records of a run that continues from a batch; later updates are taken again."""
        self._records = [
            record
            for record in read_records(self._run.folder)
            if record["action"] != "skip" or record["batch"] <= batches
        ]
        self._skipped = 0
        skipped = [record for record in self._records if record["action"] == "skip"]
        if skipped and skipped[-1]["batch"] == batches:
            self._skipped = skipped[-1]["in_a_row"]

    def updated(self) -> None:
        """Note an applied update."""
        self._skipped = 0

    def handle(self, number: int, fault: str, batches: Sequence[Batch]) -> None:
        """Record that an update is not finite; skip it, or `end`.

        ``batches`` are those whose loss is not finite; all of the update if only the gradient is.
        """
        if self.policy == "skip" and self._skipped < MOST_SKIPPED:
            self._skipped += 1
            rows = self._rows_of(batches)
            self._record(number, fault, rows, action="skip", in_a_row=self._skipped)
            self._tell(number, f"{fault}, its update is skipped", rows)
            return
        self.end(number, fault, batches)

    def end(self, number: int, fault: str, batches: Sequence[Batch]) -> NoReturn:
        """Raise BackOff, or a PackError that names the rows.

        A model that is not finite leaves no other choice.
        """
        rows = self._rows_of(batches)
        checkpoint = self._run.files.latest_checkpoint()
        if self.policy == "back-off" and checkpoint and self._count("back-off") < MOST_BACK_OFFS:
            self._record(number, fault, rows, action="back-off", to=checkpoint.name)
            text = f"{fault}, back to {checkpoint.name} with {self.factor:g} of the learning rate"
            self._tell(number, text, rows)
            raise BackOff

        self._record(number, fault, rows, action="stop")
        limit = {
            "skip": f" {MOST_SKIPPED} updates in a row were skipped.",
            "back-off": f" The run backed off {self._count('back-off')} times.",
        }

        last = "No checkpoint was due."
        if checkpoint:
            last = f"The last good checkpoint is {checkpoint}."

        others = " or ".join(name for name in ("skip", "back-off") if name != self.policy)
        norm = self._run.train.max_grad_norm or 0
        clipped = "" if 0 < norm <= 1 else ", or --max-grad-norm 1"

        raise PackError(
            f"step {number}: {fault}. Training stopped.{limit.get(self.policy, '')}"
            f"{self._shown(rows)} {last} Try --on-nan {others}, or a lower --learning-rate than "
            f"{self._run.train.learning_rate:g}{clipped}.",
            "diverged",
        )

    def _rows_of(self, batches: Sequence[Batch]) -> list[str]:
        return list(dict.fromkeys(row for batch in batches for row in batch.rows))

    def _shown(self, rows: list[str]) -> str:
        if not rows:
            return ""

        text = f" Its rows: {', '.join(rows[:_SHOWN])}"
        if len(rows) > _SHOWN:
            text += f" and {len(rows) - _SHOWN} more, all in {self._file}"
        return f"{text}."

    def _tell(self, number: int, text: str, rows: list[str]) -> None:
        self._run.display.line("nan", f"batch {number}: {text}.{self._shown(rows)}")
        for observer in self._observers:
            observer.on_event(dict(self._records[-1]))

    def _record(self, number: int, fault: str, rows: list[str], **facts: object) -> None:
        self._records.append({"batch": number, "fault": fault, **facts, "rows": rows})
        text = "".join(json.dumps(record) + "\n" for record in self._records)
        atomic_write(self._file, text)


def read_records(run: Path) -> list[dict]:
    """Return the records of a run folder; damaged lines are left out."""
    try:
        lines = read_text(run / NOT_FINITE).splitlines()
    except (PackError, OSError):
        return []

    records = []
    for line in lines:
        try:
            record = parse_json(line)
            if type(record["batch"]) is int and type(record.get("in_a_row", 0)) is int:
                records.append({"action": str(record["action"]), **record})
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return records
