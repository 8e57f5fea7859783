"""Examples sorted by their tokens, so that those that begin alike follow each other."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .token_store import Example

# Tokens of each example that are compared at a time.
_NARROWEST = 16
_WIDEST = 32
_ENDED = -1  # in place of tokens after the last one


class TokenOrder(NamedTuple):
    """Examples sorted by their tokens; an example that begins others comes before them."""

    indices: np.ndarray  # int64 [N]
    common: np.ndarray  # int64 [N], tokens that each begins with as the one before it does


def token_order(examples: Sequence[Example], chosen: np.ndarray) -> TokenOrder:
    """Equal examples stay in their order."""
    indices = np.array(chosen, dtype=np.int64)
    common = np.zeros(len(indices), dtype=np.int64)
    pending = [(0, len(indices), 0)] if len(indices) else []

    while pending:  # examples from start to stop are alike up to a token, and go on
        start, stop, at = pending.pop()
        width = min(max(at, _NARROWEST), _WIDEST)
        block = _columns(examples, indices[start:stop], at, width)
        if (block != block[0]).any():
            order = np.lexsort(block.T[::-1])
            indices[start:stop] = indices[start:stop][order]
            block = block[order]

        differing = block[1:] != block[:-1]
        is_new = differing.any(axis=1)
        alike = np.where(is_new, differing.argmax(axis=1), (block[1:] != _ENDED).sum(axis=1))
        common[start + 1 : stop] = at + alike

        edges = np.concatenate([[0], np.flatnonzero(is_new) + 1, [stop - start]])
        for first, end in zip(edges, edges[1:], strict=False):
            if end - first > 1 and block[first, -1] != _ENDED:
                pending.append((start + int(first), start + int(end), at + width))

    return TokenOrder(indices, common)


def _columns(examples: Sequence[Example], indices: np.ndarray, at: int, width: int) -> np.ndarray:
    """Return the tokens of examples from ``at``, [n, width]."""
    block = np.full((len(indices), width), _ENDED, dtype=np.int32)
    for row, i in zip(block, indices.tolist(), strict=True):
        part = examples[i].tokens[at : at + width]
        row[: len(part)] = part
    return block
