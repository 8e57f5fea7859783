"""``--share-prefix``: whether what examples begin with is computed once, and not in every row."""

import mlx.nn as nn

from ..adapters.attach import attach
from ..adapters.trainable import Trainable
from ..config.choices import POLICIES
from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from ..data.encoding import Examples
from ..data.groups import GroupPlan
from ..data.shapes import sequence_inputs
from ..data.trees import LEAST, TreePlan
from ..display import Display
from ..errors import PackError
from ..evaluation.perplexity import why_in_rows
from ..memory.plan import recompute_policies
from ..nn.blocks import takes_one_pass
from ..objectives.causal_lm import Head, split_head
from ..objectives.shared_prefix import why_not_shared
from ..packs.base import Base


def passes_of(
    model: nn.Module, trees: TreePlan | GroupPlan | None, examples: Examples, inputs: int
) -> tuple[int, ...]:
    """Return the inputs of each pass over the blocks, of a batch with ``inputs`` in its rows.

    A tree takes one, or two: over its prefixes and over what follows; and one over its root before.
    """
    if trees is None:
        return (inputs,)

    computed = int(inputs * (1 - trees.saved(examples)))
    if takes_one_pass(model, computed):
        return (computed,)

    of_all = trees
    groups = 1
    if isinstance(trees, GroupPlan):
        of_all = trees.of_all
    if trees.together:
        groups = of_all.batch_size // trees.together

    of_prefixes = int(groups * (trees.to_json(examples)["tokens"] - trees.root))
    following = max(computed - of_prefixes - trees.root, 1)
    if trees.root:
        return trees.root, of_prefixes, following
    return of_prefixes, following


def computes_trees(train: TrainConfig, base: Base, display: Display) -> bool:
    """Return whether the model computes trees exactly; say so if it does not.

    Raises:
        PackError: it does not, and trees are asked for.
    """
    reason = why_in_rows(base, sequence_inputs(train.max_seq_length), train.share_prefix)
    if reason is None and train.share_prefix == "auto":
        reason = _why_not_recomputed(train, base)
    if reason is None:
        return True

    family = base.config.get("model_type", base.name)
    display.line("prefix", f"computed in every row of a {family} model: {reason}")
    return False


def _why_not_recomputed(train: TrainConfig, base: Base) -> str | None:
    """Return why trees differ where blocks may be computed again, in a line; None if they do not.

    It is asked of models whose blocks read keys of others, which have fewer caches than blocks.
    """
    from mlx_lm.models.cache import make_prompt_cache

    model = base.model
    has_a_cache_each = len(model.layers) == len(make_prompt_cache(model))
    if has_a_cache_each or not any(POLICIES[name].blocks for name in recompute_policies(train)):
        return None

    attached = attach(base, LoRAConfig(rank=1), fp16_fallback=train.train_fp16_fallback)
    attached.recompute("block")
    try:
        reason = why_not_shared(model, split_head(model), base.vocab_size)
    finally:
        attached.detach()
    if reason is None:
        return None
    return f"with --recompute block {reason}"


def check_trees(trainable: Trainable, head: Head | None) -> None:
    """Check that trees have the gradients of rows, with what is trained and recomputed.

    Raises:
        PackError: they have others.
    """
    base = trainable.base
    reason = why_not_shared(trainable.model, head, base.vocab_size)
    if reason:
        family = base.config.get("model_type", base.name)
        raise PackError(
            f"--share-prefix: a {family} model as it is trained here does not compute a common "
            f"prefix exactly ({reason}). Pass --share-prefix off, or another --recompute.",
            "unsupported",
            "share_prefix",
        )


def say_nothing_shared(train: TrainConfig, display: Display) -> None:
    """Say that nothing is shared, if that was asked for."""
    if train.share_prefix == "on":
        display.line("prefix", f"fewer than {LEAST} tokens are common: none is shared")


def show_trees(
    trees: TreePlan | GroupPlan, examples: Examples, draws: bool, display: Display
) -> None:
    """Show what rows have in common; ``draws`` is whether something is drawn for each of them."""
    facts = trees.to_json(examples)
    tokens = f"{facts['tokens']:,.0f} tokens begin every example"
    if isinstance(trees, GroupPlan):
        tokens = (
            f"{facts['tokens']:,.0f} tokens, on average, begin the examples of each of "
            f"{facts['groups']:,} groups, which are put together"
        )
    elif trees.common is not None:
        tokens = f"{facts['tokens']:,.0f} tokens, on average, begin both examples of a row"
    if trees.root:
        tokens += f", {trees.root:,} of them every example"

    display.line("prefix", f"{tokens}: computed once, {facts['saved']:.0%} of all inputs saved")
    if draws:
        display.line("prefix", "rows share what is drawn at random for these tokens")


def show_shared_prompts(facts: dict, train: TrainConfig, display: Display) -> None:
    """Show that prompts are computed once for their completions, by the facts of a report."""
    if not facts["saved"]:
        say_nothing_shared(train, display)
        return

    display.line(
        "prefix",
        f"{facts['tokens']:,.0f} tokens, on average, begin the {train.num_generations} completions "
        f"of a prompt: computed once, {facts['saved']:.0%} of all inputs saved where completions "
        f"have {train.max_completion_length:,} tokens",
    )
