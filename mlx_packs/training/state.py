"""How far a training run is: what it counts, and the score of its weights.

A checkpoint has it as ``state.json``, with the hashes of its other files, and one of itself.
"""

import math
import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import PackError, older_version
from ..files import to_json
from ..kinds import check_keys
from ..objectives.score import REWARD, Score, StoredScore
from ..reading import check_files, check_seal, file_facts, read_json, sealed, without_seal

if TYPE_CHECKING:
    from ..data.dataset import Batch

METRICS = "metrics.jsonl"  # in the run folder, its lines by batch
ADAPTERS = "adapters.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
_FILES = "files"  # in the state: size and hash of each of these
_STORED = (ADAPTERS, OPTIMIZER)
_FACTS = {"": "a mapping", ".*": "a mapping", ".*.bytes": "an integer", ".*.sha256": "text"}
STEP_PREFIX = "step-"
STEP = re.compile(STEP_PREFIX + r"\d{6,}")  # the folder of a checkpoint

COMPUTED_PER_S = "computed_tokens_per_s"  # in log lines: all tokens, those without a loss too


@dataclass
class Window:
    """Sums over the batches since the last report."""

    batches: int = 0
    targets: int = 0
    terms: int = 0  # of the losses
    loss_sum: float = 0.0
    seconds: float = 0.0
    inputs: int = 0  # all real tokens

    def add(self, loss: float, batch: "Batch", seconds: float) -> None:
        """Count a batch with this mean loss."""
        self.batches += 1
        self.targets += batch.targets
        self.terms += batch.denominator
        self.loss_sum += loss * batch.denominator
        self.seconds += seconds
        self.inputs += batch.computed

    @property
    def loss(self) -> float:
        return self.loss_sum / self.terms

    @property
    def targets_per_s(self) -> float:
        """Throughput in the objective's unit."""
        return self.targets / self.seconds

    @property
    def computed_per_s(self) -> dict[str, float]:
        """Throughput in all tokens, as an entry of a line; empty if they are not counted."""
        if not self.inputs:
            return {}
        return {COMPUTED_PER_S: self.inputs / self.seconds}

    @property
    def batches_per_s(self) -> float:
        return self.batches / self.seconds


@dataclass
class TrainingState:
    """Progress of a run, without its tensors: a checkpoint stores it as ``state.json``."""

    batches: int = 0  # taken
    updates: int = 0
    trained_tokens: int = 0  # targets in those batches; pairs with ``--task embedding``
    train_s: float = 0.0  # spent in steps
    peak_gb: float = 0.0  # of MLX's memory, over the processes that the run was resumed in
    grad_norm: float = 0.0  # of the last update
    window: Window = field(default_factory=Window)  # for the next report
    # of exactly these weights; None if it was not measured
    valid_loss: float | None = None
    valid_reward: float | None = None
    valid_best: float | None = None  # what --best names
    computed_tokens: int = 0  # all real tokens of those batches

    def count(
        self, loss: float, batch: "Batch", norm: float | None, seconds: float, peak_bytes: int
    ) -> None:
        """Count a batch; ``norm`` is the gradient norm of its update, None without an update."""
        self.batches += 1
        if norm is not None:
            self.updates += 1
            self.grad_norm = norm
            self.valid_loss = self.valid_reward = self.valid_best = None

        self.trained_tokens += batch.targets
        self.computed_tokens += batch.computed
        self.train_s += seconds
        self.peak_gb = max(self.peak_gb, peak_bytes / 1e9)
        self.window.add(loss, batch, seconds)

    def score(self, best_by: str | None = None) -> StoredScore | None:
        """Return the score of exactly these weights; None if it was not measured."""
        if best_by is None:
            return StoredScore.of(asdict(self))
        return StoredScore.of({best_by: self.valid_best}, best_by)

    def keep_score(self, score: Score, best_by: str | None = None) -> None:
        """Keep the score of these weights, as far as it is finite."""
        value = _finite(score.value)
        self.valid_loss = self.valid_reward = self.valid_best = None
        if score.measure == REWARD:
            self.valid_reward = value
        else:
            self.valid_loss = value
        if best_by is not None:
            self.valid_best = _finite(score.by(best_by).value)

    def skip(self, seconds: float) -> None:
        """Count a batch that is no part of an update."""
        self.batches += 1
        self.train_s += seconds
        self.window.batches += 1
        self.window.seconds += seconds


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


_KINDS = {
    int: "an integer of 0 or more",
    float: "a number",
    float | None: "a number?",
    Window: "a mapping",
}


def batches_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(STEP_PREFIX))


def write_state(folder: Path, state: TrainingState) -> None:
    """Write the state into the folder of a checkpoint, whose other files are there."""
    content = {**asdict(state), _FILES: file_facts(folder, _STORED)}
    (folder / STATE).write_text(to_json(sealed(content)), encoding="utf-8")


def check_checkpoint(folder: Path) -> None:
    """Raise a PackError if a file of a checkpoint is damaged."""
    _, facts = _read_state(folder)
    try:
        check_files(folder, facts)
    except (OSError, ValueError) as error:
        raise damaged(folder, error) from None


def read_training_state(folder: Path) -> TrainingState:
    return _read_state(folder)[0]


def _read_state(folder: Path) -> tuple[TrainingState, dict]:
    """Return the progress, and size and hash of the other files."""
    try:
        content = read_json(folder / STATE)
        check_seal(content)
        content = without_seal(content)
        check_keys(content, {f"{_FILES}{key}": kind for key, kind in _FACTS.items()})
        facts = content.pop(_FILES)
        if set(facts) != set(_STORED):
            raise ValueError(f"{_FILES} must name {' and '.join(_STORED)}")
        if not {field.name for field in fields(TrainingState)} <= set(content):
            raise older_version(folder / STATE)

        check_keys(content, {field.name: _KINDS[field.type] for field in fields(TrainingState)})
        window = content.pop("window")
        check_keys(window, {field.name: _KINDS[field.type] for field in fields(Window)}, "window")

        state = TrainingState(**content, window=Window(**window))
        if state.batches and state.train_s <= 0:
            raise ValueError(f"train_s must be positive after {state.batches} batches")
        if state.batches != batches_of(folder):
            raise ValueError(f"it is of batch {state.batches}")
        return state, facts
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise damaged(folder / STATE, error) from None


def damaged(folder: Path, error: Exception) -> PackError:
    return PackError(f"{folder}: is not a complete checkpoint ({error}).", "unreadable")
