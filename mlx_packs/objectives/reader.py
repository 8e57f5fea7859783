"""Numbers that are read at single tokens of texts: by a head of their own, or by the LM head."""

from collections.abc import Callable, Sequence

import mlx.nn as nn
import numpy as np

from ..bases.tokenizer import in_batches
from ..data.dataset import Batch, Layout
from ..errors import PackError
from ..runtime import mx
from .causal_lm import forward, prefixes_in, segments_of, split_head
from .objective import Inputs, arrays_of

States = Callable[..., mx.array]  # tokens [B, T] to final hidden states [B, T, D]


class Reader:
    """Numbers of texts by a decoder.

    ``states`` maps tokens [B, T] to what is read of each, [B, T, D], and ``of_last`` what is read
    at M tokens, [M, D], to their numbers, float32 [M] or [M, K].
    """

    def __init__(
        self, model: nn.Module, states: States, of_last: Callable[[mx.array], mx.array]
    ) -> None:
        self.model = model
        self.states = states
        self.of_last = of_last

    def __call__(self, inputs: Inputs, layout: Layout = ()) -> mx.array:
        """Return the numbers at each target of a batch of tokens, [M] or [M, K]."""
        segments = segments_of(inputs, layout)
        prefixes = prefixes_in(inputs)
        hidden = forward(self.model, self.states, inputs["tokens"], segments, prefixes=prefixes)
        return self.of_last(hidden.reshape(-1, hidden.shape[-1])[inputs["positions"]])

    def last(self, tokens: mx.array, lengths: mx.array) -> mx.array:
        """Return what is read of texts [R, T], of which ``lengths`` [R] are no padding, [R, D]."""
        states = forward(self.model, self.states, tokens)
        return mx.take_along_axis(states, (lengths - 1)[:, None, None], axis=1)[:, 0]

    def of_rows(self, rows: Sequence[np.ndarray], batch_size: int) -> np.ndarray:
        """Return the numbers of texts by their tokens, float32 [N] or [N, K]; N is 1 or more."""

        def numbers(tokens: np.ndarray, lengths: np.ndarray) -> mx.array:
            arrays = arrays_of(Batch({"tokens": tokens, "lengths": lengths}, len(tokens), 1))
            return self.of_last(self.last(arrays["tokens"], arrays["lengths"]))

        return in_batches(numbers, rows, batch_size)


def head_reader(
    model: nn.Module,
    head: nn.Module,
    name: str,
    task: str,
    of_head: Callable[[mx.array], mx.array] = lambda numbers: numbers,
) -> Reader:
    """Return what reads the states of a model by a head, as ``of_head`` converts its outputs."""
    states = hidden_states(model, name, task)
    return Reader(model, states, lambda last: of_head(head(last).astype(mx.float32)))


def hidden_states(model: nn.Module, name: str, task: str) -> States:
    """Return the part of a model that computes the states that a head reads.

    Raises a PackError if the model changes its logits after the head: this part is not certain.
    """
    head = split_head(model)
    if head is None:
        raise PackError(
            f"--task {task}: {name} scales or caps its logits, or names its parts in its own way, "
            "so what a head would read is not known. Train another base.",
            "unsupported",
            "task",
        )
    return head.hidden
