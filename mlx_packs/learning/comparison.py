"""A candidate compared with the served version on the same held-out rows, with paired errors."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..data.batches import evaluation_batches
from ..data.encoding import EncodingOptions, encode
from ..data.formats import COMPLETION
from ..data.preferences import both_completions
from ..evaluation.perplexity import Difference, ExampleScores, Scorer
from ..evaluation.preferences import standard_error
from ..evaluation.rows import columns_of, evaluation_rows
from ..memory.matmul_path import choose_matmul_path
from ..objectives.causal_lm import split_head
from ..packs.base import Base, activated
from ..packs.pack import Pack

WINS_BY = 2.0  # standard errors


@dataclass(frozen=True)
class Comparison:
    """How much better a candidate is than the served version on held-out rows."""

    measure: str  # what ``gain`` is
    gain: float  # the mean over rows; more is better
    error: float | None  # standard error of the gain, paired by row; None for a single row
    held_out: int  # number of rows

    @property
    def is_won(self) -> bool:
        """Whether the candidate is better by more than `WINS_BY` standard errors."""
        return self.error is not None and self.gain > WINS_BY * self.error

    @property
    def text(self) -> str:
        error = "unknown"
        if self.error is not None:
            error = f"{self.error:.4f}"
        gain = f"{self.measure} {self.gain:+.4f} ± {error}"
        return f"{gain}, paired, on {self.held_out} held-out rows"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare(base: Base, served: Pack | None, candidate: Pack, task: str, data: Path) -> Comparison:
    """Compare a candidate with the served version, or the base, on the rows ``valid`` of a folder.

    No pack may be active on the base; ``task`` is of `GAINS`.
    """
    columns = columns_of(candidate, str(data), on_bad_row="skip")
    rows = evaluation_rows(columns, "valid")
    labels = np.array([row.value.get("label", True) for row in rows])

    completions = rows
    if task == "dpo":
        completions = both_completions(rows, columns)

    recipe = candidate._part("recipe")
    length = recipe["max_seq_length"]
    options = EncodingOptions("completion", length, base.vocab_size)
    examples = encode(completions, base.tokenizer, columns, options, COMPLETION)
    batches = evaluation_batches(examples, recipe["batch_size"], length)

    tokens = batches[-1].inputs["tokens"].size
    path = choose_matmul_path(base.model, tokens, steps=2 * len(batches)).matmul_path

    scores = []
    for pack in (served, candidate):
        with activated(base, pack, path):
            scores.append(Scorer(base.model, split_head(base.model)).examples(batches))

    owners = examples.items.parts["rows"]
    before, after = (_of_rows(each, owners, len(completions)) for each in scores)
    return GAINS[task](before, after, labels)


def _of_rows(scores: ExampleScores, owners: np.ndarray, count: int) -> ExampleScores:
    """Return the scores of completions, each the sum of its pieces; without targets it has none."""
    sums = (
        np.bincount(owners, weights, count) for weights in (scores.nll, scores.targets, scores.hits)
    )
    return ExampleScores(*sums)


def _completions(served: ExampleScores, better: ExampleScores, _: np.ndarray) -> Comparison:
    """Gain in log-likelihood of what should have been answered."""
    has_targets = served.targets > 0
    served, better = (
        ExampleScores(each.nll[has_targets], each.targets[has_targets], each.hits[has_targets])
        for each in (served, better)
    )
    difference = Difference.between(served, better)
    rows = int(has_targets.sum())
    return Comparison("nats per token", -difference.nll, difference.nll_se, rows)


def _preferences(served: ExampleScores, better: ExampleScores, _: np.ndarray) -> Comparison:
    """Gain in the margin between the log-likelihoods of a correction and of what it corrects."""
    both = (served.targets.reshape(-1, 2) > 0).all(axis=1)
    gains = (served.nll - better.nll).reshape(-1, 2)[both]
    margins = gains[:, 0] - gains[:, 1]
    error = standard_error(margins)
    return Comparison("nats of margin", float(margins.mean()), error, len(margins))


def _ratings(served: ExampleScores, better: ExampleScores, labels: np.ndarray) -> Comparison:
    """Gain in the margin between good and bad answers; each kind counts as much as the other."""
    has_targets = served.targets > 0
    gains = served.nll - better.nll
    kinds = [gains[has_targets & labels], -gains[has_targets & ~labels]]
    kinds = [kind for kind in kinds if len(kind)]

    errors = [standard_error(kind) for kind in kinds]
    known = [each for each in errors if each is not None]
    error = None
    if len(known) == len(kinds):
        error = math.hypot(*known)
    gain = float(sum(kind.mean() for kind in kinds))
    return Comparison("nats of margin", gain, error, int(has_targets.sum()))


GAINS: dict[str, Callable[[ExampleScores, ExampleScores, np.ndarray], Comparison]] = {
    "kto": _ratings,
    "dpo": _preferences,
    "lm": _completions,
}
