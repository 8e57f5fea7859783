"""Small models that packed examples are trained on."""

import numpy as np

from mlx_packs import LoRAConfig
from mlx_packs.adapters.lora import Attached, attach
from mlx_packs.data.batches import Batch, make_packed_batch
from mlx_packs.data.encoding import Example
from mlx_packs.data.sampler import first_fit
from mlx_packs.objectives.causal_lm import Head, split_head
from mlx_packs.objectives.sequence_packing import prepare_packing
from tests.helpers.models import SMALL_FAMILIES, base_of
from tests.helpers.steps import examples_of, fill_b

LIMIT = 47  # inputs of a packed sequence
ROWS = examples_of((9, 17, 5, 30, 2, 21, 12))


def packed_batch(rows: list[Example] = ROWS, batch_size: int = 3) -> Batch:
    """All rows in one batch."""
    inputs = np.array([len(e.tokens) - 1 for e in rows])
    return make_packed_batch(
        rows, first_fit(inputs, np.arange(len(rows)), LIMIT), batch_size, LIMIT
    )


def attached_model(
    family: str, recompute: bool = False, max_seq_length: int = LIMIT + 1
) -> tuple[Attached, Head | None]:
    """A small model with adapters that are not zero, in training mode, and its head."""
    base = base_of(family, **SMALL_FAMILIES[family])
    attached = attach(base, LoRAConfig(rank=2))
    fill_b(attached)
    if recompute:
        attached.recompute("block")
    head = split_head(base.model)
    prepare_packing(attached, head, max_seq_length, 128)
    base.model.train()
    return attached, head
