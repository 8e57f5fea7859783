"""Tasks whose examples are tokens: how these are encoded, and what rows share of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import mlx.nn as nn
import numpy as np

from ..adapters.attach import attach
from ..adapters.trainable import Trainable
from ..config.choices import POLICIES
from ..config.data import DataConfig
from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from ..data import rows as rows_of
from ..data.encoding import EncodingOptions, Examples
from ..data.fim import FillInTheMiddle
from ..data.formats import RowFormat, Text
from ..data.groups import GroupPlan
from ..data.sampler import Sampler, packing_fill
from ..data.shapes import padded_length, sequence_inputs
from ..data.sharing import draws_at_random, plan_trees
from ..data.token_cache import encode_cached, steps_of
from ..data.trees import LEAST, TreePlan
from ..display import VERBOSE, Display
from ..errors import PackError
from ..evaluation.perplexity import why_in_rows
from ..memory.plan import recompute_policies
from ..nn.blocks import attends_by_spans, takes_one_pass
from ..objectives.causal_lm import Head, split_head
from ..objectives.exactness import check_packing, why_not_shared
from ..packs.base import Base
from .phases import (
    PhaseData,
    RunPhase,
    counted,
    encode_each,
    sample,
    show_cut,
    show_notes,
    show_phase,
)
from .task import Task


class TokenTask(Task):
    """A task whose examples are tokens; a row of a batch has one example, or several."""

    trees: Mapping[str, TreePlan | GroupPlan] = {}  # by phase, what batches are that are no rows

    def sampled(self, data: PhaseData) -> np.ndarray:
        """Return held-out examples in proportion to the tokens that the phase trains on."""
        t = data.phase.train
        length = float(data.train.examples.lengths.mean()) if not t.packing else t.max_seq_length

        costs = self._costs(data.held_out_examples)
        return sample(costs, t.iters * t.sequences * length)

    def _costs(self, examples: Examples) -> np.ndarray:
        """Return the tokens that the evaluation of each example takes."""
        return examples.lengths

    def typical_rows(self, data: PhaseData) -> tuple[tuple[int, ...], int]:
        """Return the tokens of each pass of a typical batch, and those that reach the head."""
        t = data.phase.train
        examples = data.train.examples
        lengths = np.sort(examples.lengths)
        inputs = padded_length(int(lengths[len(lengths) // 2]), t.max_seq_length)
        if t.packing:
            inputs = sequence_inputs(t.max_seq_length)

        rows = t.sequences * inputs
        targets = max(1, rows * examples.targets // int(lengths.sum()))
        trees = self.trees.get(data.phase.name)
        return passes_of(self.base.model, trees, examples, rows), targets

    def _plan_trees(
        self, phase: RunPhase, examples: Examples, sampler: Sampler, together: int = 0
    ) -> TreePlan | GroupPlan | None:
        """Return how training batches are trees, and show it; None if they are rows."""
        train = phase.train
        draw = sampler.draw
        first = 0 if draw.replay else draw.first
        drawn = np.arange(len(examples))[first : draw.stop]
        trees = plan_trees(train, self.lora, examples, drawn, together, groups=not draw.replay)
        if trees is None:
            say_nothing_shared(train, self.display)
            return None
        if not computes_trees(train, self.base, self.display):
            return None

        facts = trees.to_json(examples)
        show_shared(facts, what_shares(trees, facts), self.display)
        if draws_at_random(train, self.lora):
            text = "rows share what is drawn at random for these tokens"
            self.display.line("prefix", text)
        self.trees = {**self.trees, phase.name: trees}
        return trees

    def shared_report(self, data: PhaseData) -> dict | None:
        """Return the part of a run's report on what is shared; None if nothing is."""
        trees = self.trees.get(data.phase.name)
        return trees and trees.to_json(data.train.examples)

    def prepare_rows(self, trainable: Trainable, head: Head | None) -> None:
        """Check that packed rows and trees are computed exactly, which may change how rows are."""
        train = self.train
        if train.packing:
            check_packing(trainable, head, train.max_seq_length, self.base.vocab_size)
        if self.trees:
            check_trees(trainable, head)


def encode_phases(
    phases: Sequence[RunPhase],
    splits: Sequence[rows_of.Splits],
    base: Base,
    train: TrainConfig,
    display: Display,
) -> list[dict[str, Examples]]:
    for_texts = {"--fim-rate": train.fim_rate, "--long-rows split": train.long_rows == "split"}
    formats = {read.format for read in splits}
    if not any(isinstance(row_format, Text) for row_format in formats):
        names = ", ".join(row_format.name for row_format in formats)
        for option, is_wanted in for_texts.items():
            if is_wanted:
                text = f"{option}: is for texts, but these examples are {names}."
                raise PackError(text, "conflict")

    encoded = []
    for phase, read in zip(phases, splits, strict=True):
        show_phase(phase, display)
        encoded.append(encode_splits(read, base, phase.columns, phase.train, display))

    return encoded


def encode_splits(
    splits: rows_of.Splits, base: Base, columns: DataConfig, train: TrainConfig, display: Display
) -> dict[str, Examples]:
    """Return the tokens of every split that has examples; show their number and what was cut."""
    tokenizer = base.tokenizer
    steps = {split: steps_of(splits.rows[split], tokenizer) for split in splits.present()}

    def encode(split: str, advance: Callable[[], None]) -> Examples:
        rows = splits.rows[split]
        options = encoding_options(train, split, splits.format, base.vocab_size)
        shared = {"row_format": splits.format, "num_proc": train.num_proc, "advance": advance}
        examples, file = encode_cached(rows, tokenizer, columns, options, **shared)
        if file is not None:
            display.line("data", f"tokens of {split} are in {file}", VERBOSE)
        return examples

    counts = {split: count for split, (count, _) in steps.items()}
    examples = encode_each(splits, encode, display, counts, steps["train"][1])
    first = examples["train"]
    counted = _counts(examples, train, base.model)
    display.line("data", f"{splits.source} · {counted} · loss on {first.loss_on}")
    display.line("", f"{first.format} · {first.targets:,} supervised tokens", VERBOSE)
    _show_cut(examples, train, display)
    show_notes(splits, columns, base.tokenizer, display)
    return examples


def _counts(examples: dict[str, Examples], train: TrainConfig, model: nn.Module) -> str:
    """How many examples each split has, and how many sequences they are packed into."""
    first = examples["train"]
    if not train.packing:
        return f"{counted(examples)} examples"

    inputs = sequence_inputs(train.max_seq_length)
    aligned = attends_by_spans(model)
    sampler = Sampler(
        first.lengths, train.batch_size, inputs, train.seed, packing=True, aligned=aligned
    )

    number, fill = packing_fill(sampler)
    packed = f"{number:,} sequences of {train.max_seq_length} ({100 * fill:.1f} % full)"
    held_out = "".join(f" / {len(e):,} {s}" for s, e in examples.items() if s != "train")
    return f"{len(first):,} examples packed into {packed}{held_out}"


def _show_cut(examples: dict[str, Examples], train: TrainConfig, display: Display) -> None:
    """Show how many examples are too long, and what became of them."""
    first = examples["train"]
    cut = examples
    if first.format == "text" and train.long_rows == "split":
        cut = {split: part for split, part in examples.items() if split != "train"}
        if first.cut:
            display.line("data", f"longer than {train.max_seq_length} tokens: {first.cut} split")

    show_cut(cut, train.max_seq_length, "examples", display)
    if first.format == "text" and first.cut and cut is examples:
        display.line("note", "--long-rows split keeps all parts of long texts")


def encoding_options(
    train: TrainConfig, split: str, row_format: RowFormat, vocab_size: int
) -> EncodingOptions:
    """Return how `encoding.encode` encodes the examples of a split.

    Held-out examples are evaluated as they are, so that their perplexity does not depend on how the
    training examples are laid out; what is for texts leaves examples of other formats alone.
    """
    options = EncodingOptions(train.loss_on, train.max_seq_length, vocab_size)
    if split != "train":
        return options

    options = replace(options, ce_last_k=train.ce_last_k)
    if not isinstance(row_format, Text):
        return options

    fim = None
    if train.fim_rate:
        fim = FillInTheMiddle(train.fim_rate, train.fim_spm_rate, train.seed, train.fim_tokens)
    return replace(options, long_rows=train.long_rows, fim=fim)


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
    """Return whether the model computes trees exactly; raise if not and they are asked for."""
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
    """Check that trees have the gradients of rows, with what is trained and recomputed."""
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


def what_shares(trees: TreePlan | GroupPlan, facts: Mapping) -> str:
    """Return what begins with the tokens of trees, by their ``facts``."""
    what = "every example"
    if isinstance(trees, GroupPlan):
        what = f"the examples of each of {facts['groups']:,} groups, which are put together"
    elif trees.common is not None:
        what = "both examples of a row"
    if trees.root:
        what += f", {trees.root:,} of them to every example"
    return what


def show_shared(facts: Mapping, what: str, display: Display) -> None:
    """Show the tokens that are common to ``what``, and the inputs saved, by a report's facts."""
    tokens = f"{facts['tokens']:,.0f} tokens on average are common to {what}"
    display.line("prefix", f"{tokens}: computed once, {facts['saved']:.0%} of all inputs saved")
