"""mlx-lm's trainer with its known defects patched: separates the gain of better kernels from the
gain of any patched trainer.

Its loop, layers, adapters and compiled step stay. Patched, one by one:

- `KEEP_CACHE`: it empties MLX's buffer cache after every step, and allocates all of it again.
- `loss`: it makes logits of every position, and the loss of all of them, where a target or none.
- `loss`: its mask takes in one pad after the end of every row (``steps <= length``).
- `batches`: a batch whose rows are all cut before their targets divides by zero.
- `RowsByLength`: it means to sort rows by length, but counts the keys of a row, so a batch holds
  rows of any length and much of it is padding.
"""

from collections.abc import Iterator

import mlx.nn as nn
import numpy as np
from mlx_lm.tuner.datasets import CacheDataset
from mlx_lm.tuner.trainer import default_loss, iterate_batches

from mlx_packs.runtime import mx

KEEP_CACHE = 1 << 62  # clear_cache_threshold, in bytes
_SLOTS = 64  # targets of a batch are padded to a multiple, for few compiled shapes

Batch = tuple[mx.array, mx.array, mx.array, mx.array]


def loss(model: nn.Module, tokens: mx.array, lengths: mx.array, *targets: mx.array):
    """mlx-lm's loss of its own batch; of one `with_targets`, the mean over its targets alone."""
    if not targets:
        return default_loss(model, tokens, lengths)
    positions, weights = targets
    states = model.model(tokens[:, :-1])
    states = states.reshape(-1, states.shape[-1])[positions]
    tied = model.args.tie_word_embeddings
    logits = model.model.embed_tokens.as_linear(states) if tied else model.lm_head(states)
    wanted = tokens[:, 1:].reshape(-1)[positions]
    count = weights.sum()
    return (nn.losses.cross_entropy(logits, wanted) * weights).sum() / count, count


def with_targets(tokens: mx.array, lengths: mx.array) -> Batch:
    """A batch of mlx-lm's, tokens [B, T + 1], with flat positions [M] that predict a target.

    weights: float32 [M], 0 where M is padded.
    """
    rows = []
    width = tokens.shape[1] - 1
    for row, (offset, length) in enumerate(np.array(lengths)):
        rows.append(row * width + np.arange(max(offset, 1), length) - 1)
    results = np.concatenate(rows).astype(np.int32)
    slots = -(-len(results) // _SLOTS) * _SLOTS
    positions, weights = np.zeros(slots, np.int32), np.zeros(slots, np.float32)
    positions[: len(results)], weights[: len(results)] = results, 1
    return tokens, lengths, mx.array(positions), mx.array(weights)


def batches(**arguments) -> Iterator[Batch]:
    """mlx-lm's `iterate_batches`, each batch `with_targets`; one that has none is left out."""
    for tokens, lengths in iterate_batches(**arguments):
        if (lengths[:, 0] < lengths[:, 1]).any():
            yield with_targets(tokens, lengths)


class RowsByLength(CacheDataset):
    """mlx-lm's data set whose length of a row is that of its tokens."""

    def itemlen(self, idx: int) -> int:
        return len(self[idx][0])
