"""``--share-prefix``: whether what all examples begin with is computed once for each batch."""

import numpy as np

from ...adapters.trainable import Trainable
from ...config.lora import LoRAConfig
from ...config.schema import TrainConfig
from ...data.dataset import Batch, Dataset
from ...data.encoding import Examples
from ...data.trees import LEAST, WORTHWHILE, TreeCollate, TreePlan, common_prefix, felled
from ...display import Display
from ...errors import PackError
from ...objectives.causal_lm import Head, Preparation
from ...objectives.shared_prefix import why_not_shared


def plan_trees(
    train: TrainConfig, lora: LoRAConfig, examples: Examples, chosen: np.ndarray
) -> TreePlan | None:
    """Return how the batches of chosen examples are trees; None if they are rows."""
    is_auto = train.share_prefix == "auto"
    if train.share_prefix == "off" or (is_auto and not is_exact(train, lora)):
        return None
    if not (prefix := common_prefix(examples[i] for i in chosen)):
        return None

    trees = TreePlan(prefix, train.batch_size, WORTHWHILE if is_auto else 0.0)
    if trees.saved(examples) < trees.least:
        return None
    return trees


def show_trees(
    trees: TreePlan | None,
    train: TrainConfig,
    lora: LoRAConfig,
    examples: Examples,
    display: Display,
) -> None:
    """Show what batches have in common, and what that saves."""
    if trees is None:
        if train.share_prefix == "on":
            display.line("prefix", f"fewer than {LEAST} tokens begin every example: none is shared")
        return

    saved = trees.saved(examples)
    display.line(
        "prefix",
        f"{trees.prefix} tokens begin every example: computed once for each batch, {saved:.0%} of "
        "all inputs saved",
    )
    if lora.dropout or train.neftune_noise_alpha:
        display.line("prefix", "the rows of a batch share what is drawn at random for it")


def is_exact(train: TrainConfig, lora: LoRAConfig) -> bool:
    """Return whether trees change nothing but the time of a run, and go with its other settings."""
    draws = lora.dropout > 0 or train.neftune_noise_alpha > 0  # once for a prefix
    caches = train.cache_frozen == "on" or (train.cache_frozen == "auto" and lora.num_layers > 0)
    return not (draws or caches or train.packing or train.pipeline)


def inputs_of_batch(data: Dataset, rows: int, inputs: int) -> int:
    """Return the inputs of a batch of rows of so many inputs; those of a prefix count once."""
    if not isinstance(data.collate, TreeCollate):
        return rows * inputs
    return rows * inputs - (rows - 1) * data.collate.tokens.prefix


def checked_trees(
    trainable: Trainable, head: Head | None, share_prefix: str, display: Display
) -> Preparation:
    """Return what prepares trees: nothing, where the model computes them exactly, else their rows.

    Raises:
        PackError: it does not, and trees are asked for.
    """
    reason = why_not_shared(trainable.model, head, trainable.base.vocab_size)
    if reason is None:
        return Preparation()
    family = trainable.base.config.get("model_type", trainable.base.name)
    if share_prefix == "on":
        raise PackError(
            f"--share-prefix on: a {family} model does not compute a common prefix exactly "
            f"({reason}). Leave it out.",
            "unsupported",
            "share_prefix",
        )
    display.line("prefix", f"computed in every row of a {family} model: {reason}")
    return Felled()


class Felled(Preparation):
    """Rows in the place of trees, for a model that does not compute trees exactly."""

    def ahead(self, batch: Batch) -> Batch:
        """Return the batch of the rows of a tree."""
        return felled(batch) if "prefix" in batch.inputs else batch

    def prepare(self, batch: Batch) -> Batch:
        """Return the same, where `ahead` was not asked."""
        return self.ahead(batch)
