"""The held-out examples that a run is evaluated on unless ``--test-batches`` says how many."""

import numpy as np

SHARE = 0.05  # of the tokens that are trained on: two evaluations then cost about as much of a run
LEAST_EXAMPLES = 32  # also of a short run; or as many as have `LEAST_TOKENS`, if these are fewer
LEAST_TOKENS = 4096
MOST_EXAMPLES = 400  # which give two digits: a share of right answers to 2.5 points


def sample(lengths: np.ndarray, trained_tokens: float) -> np.ndarray:
    """Return the indices of a random sample, given the tokens of each example and of all batches.

    The order only depends on the number of examples: a longer run, a resumed one and one with
    another seed are evaluated on the same examples, or on more after the same ones.
    """
    order = np.random.RandomState(0).permutation(len(lengths))
    totals = np.cumsum(np.asarray(lengths)[order])

    affordable = np.searchsorted(totals, SHARE * trained_tokens, side="right")
    least = min(LEAST_EXAMPLES, np.searchsorted(totals, LEAST_TOKENS, side="right"))
    count = min(MOST_EXAMPLES, max(2, affordable, least))
    return order[:count]
