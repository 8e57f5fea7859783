"""Small models that packed examples are trained on."""

import numpy as np

from mlx_packs.adapters.lora import Attached
from mlx_packs.data.batches import TokenCollate
from mlx_packs.data.dataset import Batch
from mlx_packs.data.encoding import Example
from mlx_packs.data.sampler import Packed, aligned_batches, first_fit
from mlx_packs.objectives.causal_lm import Head
from tests.helpers.models import SMALL_FAMILIES, base_of
from tests.helpers.steps import adapted, examples_of

LIMIT = 47  # inputs of a packed sequence
ROWS = examples_of((9, 17, 5, 30, 2, 21, 12))


def packed_batch(rows: list[Example] = ROWS, batch_size: int = 3) -> Batch:
    """All rows in one batch."""
    inputs = np.array([len(e.tokens) - 1 for e in rows])
    packed = Packed(first_fit(inputs, np.arange(len(rows)), LIMIT))
    return TokenCollate(batch_size, LIMIT)(rows, packed)


def aligned_batch(rows: list[Example] = ROWS) -> Batch:
    """All rows in one batch whose attention is computed segment by segment."""
    inputs = np.array([len(e.tokens) - 1 for e in rows])
    (packed,) = aligned_batches(inputs, len(rows), LIMIT, np.random.default_rng(0))
    return TokenCollate(len(rows), LIMIT)(rows, packed)


def attached_model(
    family: str, recompute: bool = False, max_seq_length: int = LIMIT + 1
) -> tuple[Attached, Head | None]:
    """A small model with adapters that are not zero, in training mode, and its head."""
    base = base_of(family, **SMALL_FAMILIES[family])
    policy = "block" if recompute else "none"
    return adapted(base, recompute=policy, packed_length=max_seq_length)
