"""A candidate compared with the served version on the same held-out rows, with paired errors."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..data.batches import evaluation_batches
from ..data.dataset import Batch
from ..data.encoding import EncodingOptions, encode
from ..data.formats import COMPLETION
from ..data.preferences import both_completions
from ..display import QUIET, Display
from ..evaluation.images import encode_shown
from ..evaluation.perplexity import Difference, ExampleScores, Scorer, mean_and_error
from ..evaluation.rows import columns_of, evaluation_rows
from ..evaluation.scores import standard_error
from ..memory.matmul_path import choose_matmul_path
from ..objectives.causal_lm import split_head
from ..packs.base import Base, activated
from ..packs.pack import Pack
from .rows import LEAST_HELD_OUT, key_of

WINS_BY = 2.0  # standard errors


@dataclass(frozen=True)
class Comparison:
    """How much better a candidate is than the served version on held-out prompts."""

    measure: str  # what ``gain`` is
    gain: float  # the mean over prompts; more is better
    error: float | None  # standard error of the gain, paired by prompt; None of too few prompts
    held_out: int  # number of prompts

    def is_above(self, errors: float) -> bool:
        """Whether the gain is more than some standard errors; never if there are too few rows."""
        if self.error is None or self.held_out < LEAST_HELD_OUT:
            return False
        return self.gain > errors * self.error

    @property
    def text(self) -> str:
        error = f"{self.error:.4f}" if self.error is not None else "unknown"
        gain = f"{self.measure} {self.gain:+.4f} ± {error}"
        return f"{gain}, paired, on {self.held_out} held-out prompts"


def compare(base: Base, served: Pack | None, candidate: Pack, task: str, data: Path) -> Comparison:
    """Compare a candidate with the served version, or the base, on the rows ``valid`` of a folder.

    No pack may be active on the base; ``task`` is of `GAINS`.
    """
    columns = columns_of(candidate, str(data), on_bad_row="skip")
    rows = evaluation_rows(columns, "valid")
    labels = np.array([row.value.get("label", True) for row in rows], bool)
    _, prompts = np.unique([key_of(row.value["prompt"]) for row in rows], return_inverse=True)

    completions = both_completions(rows, columns) if task == "dpo" else rows

    recipe = candidate._part("recipe")
    length = recipe["max_seq_length"]
    options = EncodingOptions("completion", length, base.vocab_size)
    examples = encode(completions, base.tokenizer, columns, options, COMPLETION)
    batches = evaluation_batches(examples, recipe["batch_size"], length)

    scores = _scores(base, served, candidate, batches)
    owners = examples.items.parts["rows"]
    before, after = (_of_rows(each, owners, len(completions)) for each in scores)
    return GAINS[task](before, after, labels, prompts)


def compare_on(base: Base, served: Pack | None, candidate: Pack, data: str) -> Comparison:
    """Compare as `compare` does, on the rows ``valid`` of a folder that no rater wrote."""
    columns = columns_of(served, data)
    length = candidate._part("recipe")["max_seq_length"]

    loss_on = served and served._part("objective").get("loss_on")
    options = EncodingOptions(loss_on, length, base.vocab_size)
    rows = evaluation_rows(columns, "valid")

    examples = encode_shown(rows, base, columns, options, Display(QUIET))
    batches = evaluation_batches(examples, candidate._part("recipe")["batch_size"], length)

    scores = _scores(base, served, candidate, batches)
    difference = Difference.between(*scores)

    return Comparison("nats per token", -difference.nll, difference.nll_se, scores[0].score.rows)


def _scores(
    base: Base, served: Pack | None, candidate: Pack, batches: list[Batch]
) -> list[ExampleScores]:
    tokens = batches[-1].inputs["tokens"].size
    path = choose_matmul_path(base.model, tokens, steps=2 * len(batches)).matmul_path

    scores = []
    for pack in (served, candidate):
        with activated(base, pack, path):
            scores.append(Scorer(base.model, split_head(base.model)).examples(batches))
    return scores


def _of_rows(scores: ExampleScores, owners: np.ndarray, count: int) -> ExampleScores:
    """Return the scores of completions, each the sum of its pieces; without targets it has none."""
    sums = (
        np.bincount(owners, weights, count) for weights in (scores.nll, scores.targets, scores.hits)
    )
    return ExampleScores(*sums)


def _completions(
    served: ExampleScores, better: ExampleScores, _: np.ndarray, prompts: np.ndarray
) -> Comparison:
    """Gain in log-likelihood of what should have been answered."""
    has_targets = served.targets > 0
    _, owners = np.unique(prompts[has_targets], return_inverse=True)

    targets = np.bincount(owners, served.targets[has_targets])
    gains = np.bincount(owners, (served.nll - better.nll)[has_targets])
    if not len(targets):
        return Comparison("nats per token", 0.0, None, 0)

    gain, error = mean_and_error(gains, targets)
    return Comparison("nats per token", gain, error, len(targets))


def _preferences(
    served: ExampleScores, better: ExampleScores, _: np.ndarray, prompts: np.ndarray
) -> Comparison:
    """Gain in the margin between the log-likelihoods of a correction and of what it corrects."""
    both = (served.targets.reshape(-1, 2) > 0).all(axis=1)
    gains = (served.nll - better.nll).reshape(-1, 2)[both]

    margins = _means(gains[:, 0] - gains[:, 1], prompts[both])
    return _margin([margins], len(margins))


def _ratings(
    served: ExampleScores, better: ExampleScores, labels: np.ndarray, prompts: np.ndarray
) -> Comparison:
    """Gain in the margin between good and bad answers; each kind counts as much as the other."""
    has_targets = served.targets > 0
    gains = served.nll - better.nll

    good = has_targets & labels
    bad = has_targets & ~labels
    kinds = [_means(gains[good], prompts[good]), _means(-gains[bad], prompts[bad])]
    return _margin(kinds, len(np.unique(prompts[has_targets])))


def _means(values: np.ndarray, prompts: np.ndarray) -> np.ndarray:
    """Return the mean of the values of each prompt: its rows are not independent."""
    _, owners = np.unique(prompts, return_inverse=True)
    return np.bincount(owners, values) / np.bincount(owners)


def _margin(kinds: Sequence[np.ndarray], prompts: int) -> Comparison:
    """Return the sum of the means of kinds of gains; without two of each kind it has no error."""
    gain = float(sum(kind.mean() for kind in kinds if len(kind)))

    errors = [standard_error(kind) for kind in kinds]
    error = math.hypot(*errors) if None not in errors else None
    return Comparison("nats of margin", gain, error, prompts)


GAINS: dict[str, Callable[[ExampleScores, ExampleScores, np.ndarray, np.ndarray], Comparison]] = {
    "kto": _ratings,
    "dpo": _preferences,
    "lm": _completions,
}
