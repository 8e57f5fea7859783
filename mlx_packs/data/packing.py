"""Packing of examples into sequences, and the position of each.

On a GPU attention is computed for one example after the other, and their places are a part of the
compiled step. So that few steps are compiled, batches share these places: examples of like length
form a *stack*, and each of some batches takes one example of every stack.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..ops.span_attention import Spans
from .shapes import COMPILATION_TOKENS, MOST_SHAPES

_SPAN_TOKENS = 10  # what a segment adds to a compilation, in tokens trained meanwhile
_LAYOUTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, MOST_SHAPES)


class Packed(NamedTuple):
    sequences: list[np.ndarray]  # indices of the examples of each
    spans: Spans | None = None  # None where each example has the room of its own inputs

    @property
    def examples(self) -> np.ndarray:
        return np.concatenate(self.sequences)


def first_fit(inputs: np.ndarray, indices: np.ndarray, limit: int) -> list[np.ndarray]:
    """Pack examples into sequences of ``limit`` inputs: longest first, each where it first fits.

    ``inputs`` has the length of every example, ``indices`` the examples to pack.
    """
    indices = indices[np.argsort(-inputs[indices], kind="stable")]
    free = np.full(len(indices), limit)
    sequences: list[list[int]] = []

    for i in indices:
        at = int(np.argmax(free[: len(sequences) + 1] >= inputs[i]))  # the last one is empty
        if at == len(sequences):
            sequences.append([])
        sequences[at].append(i)
        free[at] -= inputs[i]

    return [np.array(sequence) for sequence in sequences]


def aligned_batches(
    inputs: np.ndarray, batch_size: int, limit: int, random: np.random.Generator
) -> list[Packed]:
    """Pack examples into batches of sequences of ``limit`` inputs, many of which share spans.

    The spans only depend on the lengths ``inputs``; ``random`` decides which examples of a stack
    meet. A batch has at most ``batch_size`` sequences, each covered by its spans.
    """
    ranked = -np.sort(-inputs)
    most = -(-int(inputs.sum()) // (batch_size * limit))  # batches, if none had room left
    compilation = COMPILATION_TOKENS + _SPAN_TOKENS * len(inputs) / most

    def cost(height: int) -> float:
        """Return the cost of an epoch, in inputs."""
        rows = len(_rows(ranked, height, limit))
        return rows * height * limit + -(-rows // batch_size) * compilation

    height = min({-(-most // layouts) for layouts in _LAYOUTS}, key=cost)

    order = random.permutation(len(inputs))
    order = order[np.argsort(-inputs[order], kind="stable")]
    for first in range(0, len(order), height):
        random.shuffle(order[first : first + height])

    return [
        Packed([order[ranks[ranks < len(order)]] for ranks in sequences], spans)
        for sequences, spans in _ranked_batches(ranked, height, batch_size, limit)
    ]


def _rows(inputs: np.ndarray, height: int, limit: int) -> list[np.ndarray]:
    """Return the stacks of each row, as if each stack of ``height`` were its longest example.

    ``inputs`` has the lengths of all examples, the longest first.
    """
    widths = inputs[::height]
    rows = first_fit(widths, np.arange(len(widths)), limit)
    return [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]


def _ranked_batches(
    inputs: np.ndarray, height: int, batch_size: int, limit: int
) -> Iterator[tuple[list[np.ndarray], Spans]]:
    """Yield the sequences of each batch, as ranks of examples, and their spans.

    A sequence has one example of each stack of a row; the last stack may lack it.
    """
    rows = _rows(inputs, height, limit)
    full = len(rows) // batch_size * batch_size
    groups = [rows[first : first + batch_size] for first in range(0, full, batch_size)]
    batches = [[(row, n) for row in group] for group in groups for n in range(height)]

    # rows too few for a batch of their own: each as often as its stacks are high
    rest = [(row, n) for row in rows[full:] for n in range(height)]
    rest = [(row, n) for row, n in rest if row[0] * height + n < len(inputs)]
    batches += [rest[first : first + batch_size] for first in range(0, len(rest), batch_size)]

    for chosen in batches:
        spans = tuple(_spans(inputs[row * height], limit) for row, _ in chosen)
        yield [row * height + n for row, n in chosen], spans


def _spans(widths: np.ndarray, limit: int) -> tuple[int, ...]:
    """Return the segments of a sequence; segments after the last example are as long as it is."""
    spans = widths.tolist()
    more, left = divmod(limit - int(widths.sum()), spans[-1])
    spans += more * spans[-1:]
    spans[-1] += left
    return tuple(spans)
