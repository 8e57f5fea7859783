"""A reward model: a score for each completion, which is higher for the one that is preferred."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ..adapters.spec import SCORE
from ..config.lora import LoRAConfig
from ..data.encoding import EncodingOptions
from ..data.preferences import encode_scored
from ..data.rows import Splits
from ..data.texts import TextGroups
from ..evaluation.preferences import VALIDATED, score_pairs
from ..objectives.objective import Objective
from ..objectives.reader import score_reader
from ..objectives.text_loss import TextLoss, reward_losses
from ..packs.base import Base
from .phases import RunPhase, encode_each
from .task import Binding, Summary, Trained, summarized
from .texts import TextsTask


class RewardTask(TextsTask):
    """``--task reward``."""

    validated = VALIDATED

    def target(self, base: Base) -> tuple[Base, LoRAConfig]:
        return self.with_trained_head(base)

    def encoded(self, phase: RunPhase, read: Splits) -> dict[str, TextGroups]:
        tokenizer = self.base.tokenizer
        limit = self.longest_text(phase.train)
        options = EncodingOptions(max_seq_length=limit, vocab_size=self.base.vocab_size)

        def encode(split: str, advance: Callable[[], None]) -> TextGroups:
            rows = read.rows[split]
            num_proc = phase.train.num_proc
            return encode_scored(rows, tokenizer, phase.columns, options, num_proc, advance)

        steps = {split: 2 * len(read.rows[split]) for split in read.present()}
        return encode_each(read, encode, self.display, steps, "completions")

    def bind(self, binding: Binding) -> list[Objective]:
        base = replace(self.base, model=binding.trainable.model)
        reader = score_reader(base, base.model[SCORE], "reward")
        losses = partial(reward_losses, centering=self.train.center_rewards_coefficient)
        return [TextLoss(reader, losses, score=score_pairs)] * len(binding.data)

    def summary(self, trained: Trained) -> Summary:
        named = {
            "task": "reward",
            "loss_on": "last token",
            "center_rewards_coefficient": self.train.center_rewards_coefficient,
        }
        return summarized(trained, named)
