"""How far a training run is: what it counts, and the score of its weights."""

import math
from dataclasses import asdict, dataclass, field

from ..data.dataset import Batch
from ..objectives.score import REWARD, Score, StoredScore
from ..runtime import mx

METRICS = "metrics.jsonl"  # in the run folder, its lines by batch

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

    def add(self, loss: float, batch: Batch, seconds: float) -> None:
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

    def count(self, loss: float, batch: Batch, norm: float | None, seconds: float) -> None:
        """Count a batch; ``norm`` is the gradient norm of its update, None without an update."""
        self.batches += 1
        if norm is not None:
            self.updates += 1
            self.grad_norm = norm
            self.valid_loss = self.valid_reward = self.valid_best = None

        self.trained_tokens += batch.targets
        self.computed_tokens += batch.computed
        self.train_s += seconds
        self.peak_gb = max(self.peak_gb, mx.get_peak_memory() / 1e9)
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
