"""Which batches of a run are trees, by `--share-prefix`."""

import numpy as np

from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from .batches import training_set
from .dataset import Dataset
from .encoding import Example, Examples
from .groups import GroupPlan
from .sampler import Sampler
from .trees import WORTHWHILE, TreePlan


def training_batches(
    trees: TreePlan | GroupPlan | None, examples: Examples, sampler: Sampler
) -> Dataset:
    if trees is None:
        return training_set(examples, sampler)
    return trees.dataset(examples, sampler)


def plan_trees(
    train: TrainConfig,
    lora: LoRAConfig,
    examples: Examples,
    chosen: np.ndarray,
    together: int = 0,
    groups: bool = True,
) -> TreePlan | GroupPlan | None:
    """Return how batches are trees; None if they are rows.

    ``together`` examples that follow each other are in one batch. ``groups`` change which examples
    meet in a batch, so that only ``on`` has them.
    """
    if not may_share(train, lora):
        return None

    rows = train.batch_size * max(together, 1)
    least = least_saved(train)
    trees = TreePlan.of(examples, chosen, rows, together, least)
    saved = trees.saved(examples)
    is_enough = saved > 0 and saved >= least

    if groups and not together and train.share_prefix == "on":
        of_all = trees if is_enough else TreePlan(train.batch_size, least=least)
        plan = GroupPlan.of(examples, chosen, of_all)
        most = (1 - WORTHWHILE) * (1 - of_all.saved(examples))
        if plan is not None and 1 - plan.saved(examples) <= most:
            return plan
    return trees if is_enough else None


def least_saved(train: TrainConfig) -> float:
    """Return the share of the inputs of a batch that a tree must save."""
    return WORTHWHILE if train.share_prefix == "auto" else 0.0


def may_share(train: TrainConfig, lora: LoRAConfig) -> bool:
    """Whether batches may be trees: unpacked; ``auto`` only accepts what just changes the time."""
    if train.packing:
        return False
    if train.share_prefix != "auto":
        return train.share_prefix == "on"

    draws = draws_at_random(train, lora)  # once for a prefix
    caches = train.cache_frozen == "on" or (train.cache_frozen == "auto" and lora.num_layers > 0)
    is_other = train.pipeline or train.objective != "transformer"
    return not (draws or caches or is_other)


def draws_at_random(train: TrainConfig, lora: LoRAConfig) -> bool:
    return lora.dropout > 0 or train.neftune_noise_alpha > 0


def cut_to(examples: Examples, limit: int) -> Examples:
    """Cut to ``limit`` tokens; examples that lose all targets by that are left out."""
    if examples.lengths.max() <= limit:
        return examples

    items = [Example(e.tokens[:limit], e.target[:limit], e.where) for e in examples.items]
    items = [e for e in items if e.target.any()]
    return Examples(items, examples.format, examples.loss_on)
