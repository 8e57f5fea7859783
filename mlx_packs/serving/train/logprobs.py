"""Log-probabilities of targets from the states that a head reads; a token may have several.

The head computes the logsumexp of each token once, with the logit of its first target. Logits of
further targets are gathered, so that the cost of the head does not grow with their number.
"""

from collections.abc import Callable, Sequence
from itertools import groupby

import mlx.core as mx
import numpy as np

from ...objectives.causal_lm import Head
from ...ops.linear_cross_entropy import cross_entropy, linear_cross_entropy, linear_logits

Logits = Callable[[slice, mx.array], mx.array]  # some tokens, their targets [T, K] to [T, K]


def target_logprobs(
    head: Head | None, states: mx.array, targets: Sequence[np.ndarray], backward: bool
) -> mx.array:
    """Return log p [M] float32 of all targets, row by row.

    Semantics: log p[n, k] = logits[n, targets[n, k]] - logsumexp(logits[n])

    Args:
        head: reads the states; None if they are logits.
        states: [N, D] of the tokens of all rows; without a head [N, V].
        targets: of each row, [T] or [T, K]; the T of all rows add up to N.
        backward: whether the gradient of ``states`` will be asked for.
    """
    of_rows = [array.reshape(len(array), -1) for array in targets]
    first = mx.array(np.concatenate([array[:, 0] for array in of_rows]))
    nll, logits_of = _first_targets(head, states, first, backward)

    logprobs = []
    start = 0
    for count, rows in groupby(of_rows, key=lambda array: array.shape[1]):
        tokens = np.concatenate(list(rows))
        place = slice(start, start + len(tokens))
        start = place.stop

        if count == 1:
            logprobs.append(-nll[place])
        else:
            wanted = mx.array(tokens)
            if logprobs:  # one after the other, so that only one gathers rows of the head
                wanted = mx.depends(wanted, [mx.stop_gradient(logprobs[-1])])
            logits = logits_of(place, wanted)
            logprobs.append((logits - logits[:, :1] - nll[place, None]).reshape(-1))
    return mx.concatenate(logprobs)


def _first_targets(
    head: Head | None, states: mx.array, first: mx.array, backward: bool
) -> tuple[mx.array, Logits]:
    """Return -log p [N] of the first target of each token, and what computes logits of others."""
    if head is not None and head.frozen is not None:
        frozen = head.frozen
        nll, _ = linear_cross_entropy(states, first, frozen, gradient=backward)
        return nll, lambda place, tokens: linear_logits(states[place], tokens, frozen)

    logits = states if head is None else head.logits(states)

    def picked(place: slice, tokens: mx.array) -> mx.array:
        return mx.take_along_axis(logits[place], tokens, axis=-1).astype(mx.float32)

    return cross_entropy(logits, first), picked
