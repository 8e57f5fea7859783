"""``--share-prefix``: whether what examples begin with is computed once, and not in every row."""

import numpy as np

from ...config.lora import LoRAConfig
from ...config.schema import TrainConfig
from ...data.encoding import Examples
from ...data.trees import LEAST, WORTHWHILE, TreePlan
from ...display import Display
from ...errors import PackError
from ...objectives.causal_lm import split_head
from ...objectives.shared_prefix import why_not_shared
from ...packs.base import Base


def plan_trees(
    train: TrainConfig, lora: LoRAConfig, examples: Examples, chosen: np.ndarray, together: int = 0
) -> TreePlan | None:
    """Return how the batches of chosen examples are trees; None if they are rows.

    So many examples that follow each other are ``together`` in every batch.
    """
    least = 0.0
    if train.share_prefix == "off":
        return None
    if train.share_prefix == "auto":
        least = WORTHWHILE
        if not changes_only_time(train, lora):
            return None

    rows = train.batch_size * max(together, 1)
    trees = TreePlan.of(examples, chosen, rows, together, least)
    saved = trees.saved(examples)
    return trees if saved > 0 and saved >= least else None


def changes_only_time(train: TrainConfig, lora: LoRAConfig) -> bool:
    """Return whether trees change nothing but the time of a run, and go with its other settings."""
    draws = lora.dropout > 0 or train.neftune_noise_alpha > 0  # once for a prefix
    caches = train.cache_frozen == "on" or (train.cache_frozen == "auto" and lora.num_layers > 0)
    return not (draws or caches or train.packing or train.pipeline)


def checked_trees(trees: TreePlan | None, train: TrainConfig, base: Base, display: Display) -> bool:
    """Return whether the model computes trees exactly; say so where it does not.

    Raises:
        PackError: it does not, and trees are asked for.
    """
    if trees is None:
        if train.share_prefix == "on":
            display.line("prefix", f"fewer than {LEAST} tokens are common: none is shared")
        return False
    reason = why_not_shared(base.model, split_head(base.model), base.vocab_size)
    if reason is None:
        return True

    family = base.config.get("model_type", base.name)
    if train.share_prefix == "on":
        raise PackError(
            f"--share-prefix on: a {family} model does not compute a common prefix exactly "
            f"({reason}). Leave it out.",
            "unsupported",
            "share_prefix",
        )
    display.line("prefix", f"computed in every row of a {family} model: {reason}")
    return False


def show_trees(trees: TreePlan, examples: Examples, draws: bool, display: Display) -> None:
    """Show what rows have in common; ``draws`` is whether something is drawn for each of them."""
    facts = trees.to_json(examples)
    begin = "every example"
    if trees.common is not None:
        begin = f"every {trees.together} examples of a row, on average"
    display.line(
        "prefix",
        f"{facts['tokens']:,.0f} tokens begin {begin}: computed once, {facts['saved']:.0%} of all "
        "inputs saved",
    )
    if draws:
        display.line("prefix", "rows share what is drawn at random for these tokens")
