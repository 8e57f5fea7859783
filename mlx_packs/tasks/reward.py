"""A reward model: a score for each completion, which is higher for the one that is preferred."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..adapters.spec import SCORE
from ..config.data import DataConfig
from ..config.lora import LoRAConfig
from ..data.encoding import EncodingOptions, Examples
from ..data.formats import Row
from ..data.preferences import encode_scored
from ..data.rows import Splits
from ..evaluation.preferences import score_pairs
from ..objectives.causal_lm import split_head
from ..objectives.objective import Objective
from ..objectives.reader import head_reader
from ..objectives.reward_model import RewardModel
from ..packs.base import Base
from .phases import PhaseData
from .preference import PreferenceTask
from .task import Binding, Summary, Trained, summarized


class RewardTask(PreferenceTask):
    """``--task reward``."""

    is_scored = True

    def target(self, base: Base) -> tuple[Base, LoRAConfig]:
        return self.with_trained_head(base)

    def _encoded(
        self,
        rows: Sequence[Row],
        columns: DataConfig,
        options: EncodingOptions,
        advance: Callable[[], None] | None,
    ) -> Examples:
        num_proc = self.train.num_proc
        limit = min(options.max_seq_length, self.base.text_limit)
        options = replace(options, max_seq_length=limit)
        return encode_scored(rows, self.base.tokenizer, columns, options, num_proc, advance)

    def _targets_line(self, examples: Examples) -> str:
        return "each completion scored at its last token"

    def _cut_line(self, cut: int, dropped: int, limit: int) -> str:
        if not dropped:
            return ""
        return f"{limit} tokens or more (--max-seq-length): {dropped} examples dropped"

    def _choose_examples(self, data: PhaseData, splits: Splits) -> None:
        """Take none: a reward model generates no text."""

    def bind(self, binding: Binding) -> list[Objective]:
        model = binding.trainable.model
        self.prepare_rows(binding.trainable, split_head(model))

        reader = head_reader(model, model[SCORE], self.base.name, self.train.task)
        centering = self.train.center_rewards_coefficient
        objective = RewardModel(reader, centering, score_pairs)
        return [objective] * len(binding.data)

    def summary(self, trained: Trained) -> Summary:
        named = {
            "task": "reward",
            "loss_on": trained.last.splits["train"].loss_on,
            "center_rewards_coefficient": self.train.center_rewards_coefficient,
        }
        report = {"shared_prefix": self.shared_report(trained.last)}
        return summarized(trained, named, report=report)
