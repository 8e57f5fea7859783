"""What repeats in examples, and what `--share-prefix` saves of it, before a run."""

from dataclasses import asdict, dataclass

import numpy as np

from .chains import merged, merged_share
from .encoding import Example, Examples
from .groups import with_groups
from .trees import TreePlan


@dataclass(frozen=True)
class Repeats:
    batch_size: int  # of the batches that save it
    merged: int  # examples that begin others
    merged_share: float  # of all inputs, saved if these are merged
    tokens: float  # that the others begin with, or the examples of a group on average
    groups: int  # 0 if all begin alike
    saved: float  # share of all inputs that `--share-prefix on` saves, with merging

    def to_json(self) -> dict:
        return asdict(self)

    def lines(self) -> list[str]:
        lines = []
        if self.merged:
            lines.append(
                f"{self.merged:,} examples begin others: --share-prefix merges them, which saves "
                f"{self.merged_share:.0%} of all inputs"
            )

        tokens = f"{self.tokens:,.0f} tokens"
        if self.groups:
            lines.append(
                f"{tokens}, on average, begin the examples of each of {self.groups:,} groups: "
                f"--share-prefix on puts these together and saves {self.saved:.0%} of all inputs "
                f"at --batch-size {self.batch_size}"
            )
        elif self.tokens:
            lines.append(
                f"{tokens} begin every example: --share-prefix computes them once a batch and "
                f"saves {self.saved:.0%} of all inputs at --batch-size {self.batch_size}"
            )

        return lines


def cut_to(examples: Examples, limit: int) -> Examples:
    """Cut to ``limit`` tokens; examples that lose all targets by that are left out."""
    if examples.lengths.max() <= limit:
        return examples

    items = [Example(e.tokens[:limit], e.target[:limit], e.where) for e in examples.items]
    items = [e for e in items if e.target.any()]
    return Examples(items, examples.format, examples.loss_on)


def repeats_of(examples: Examples, batch_size: int, limit: int) -> Repeats | None:
    """Examples are of texts, completions or chats; None if no target is left in ``limit``."""
    examples = cut_to(examples, limit)
    if not len(examples):
        return None

    whole = merged(examples)
    chosen = np.arange(len(whole))
    of_all = TreePlan.of(whole, chosen, batch_size, 0, 0.0)
    plan = with_groups(whole, chosen, of_all)
    of_chains = merged_share(whole)
    facts = plan.to_json(whole)

    return Repeats(
        batch_size,
        whole.merged,
        of_chains,
        facts["tokens"],
        facts.get("groups", 0),
        1 - (1 - of_chains) * (1 - facts["saved"]),
    )
