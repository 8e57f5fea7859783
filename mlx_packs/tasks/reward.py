"""A reward model: a score for each completion, which is higher for the one that is preferred."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..adapters.score_head import fresh_score_head, with_score_head
from ..adapters.spec import SCORE
from ..adapters.trainable import Trainable
from ..config.data import DataConfig
from ..config.lora import LoRAConfig
from ..data.encoding import EncodingOptions
from ..data.formats import Row
from ..data.preferences import PreferenceExamples, encode_scored
from ..data.rows import Splits
from ..evaluation.preferences import score_pairs
from ..gates import gates_text
from ..memory.memory_choice import MemoryChoice
from ..objectives.causal_lm import split_head
from ..objectives.objective import Objective
from ..objectives.reward_model import RewardModel, hidden_states
from ..objectives.sequence_packing import prepare_packing
from ..packs.base import Base
from ..packs.card import format_change, phase_lines
from .causal_lm import phase_reports
from .phases import PhaseData
from .preference import PreferenceTask, before_and_after
from .shared_prefix import check_trees
from .task import PhaseStarts, Summary, Trained, bad_rows_lines, cost, evaluated, speed


class RewardTask(PreferenceTask):
    """``--task reward``."""

    is_scored = True

    def target(self, base: Base) -> tuple[Base, LoRAConfig]:
        """Return the base with a head besides, which is trained in full."""
        hidden_states(base.model, base.name)
        head = fresh_score_head(base, self.train.seed)
        saved = (*self.lora.modules_to_save, SCORE)
        return (
            replace(base, model=with_score_head(base.model, head)),
            replace(self.lora, modules_to_save=saved),
        )

    def _encoded(
        self,
        rows: Sequence[Row],
        columns: DataConfig,
        options: EncodingOptions,
        advance: Callable[[], None] | None,
    ) -> PreferenceExamples:
        num_proc = self.train.num_proc
        return encode_scored(rows, self.base.tokenizer, columns, options, num_proc, advance)

    def _targets_line(self, examples: PreferenceExamples) -> str:
        return "each completion scored at its last token"

    def _cut_line(self, cut: int, dropped: int, limit: int) -> str:
        if not dropped:
            return ""
        return f"{limit} tokens or more (--max-seq-length): {dropped} examples dropped"

    def _choose_examples(self, data: PhaseData, splits: Splits) -> None:
        """Take none: a reward model generates no text."""

    def bind(
        self,
        trainable: Trainable,
        data: Sequence[PhaseData],
        starts: PhaseStarts,
        memory: MemoryChoice,
    ) -> list[Objective]:
        """Return the loss of the rewards, which is one for all phases."""
        train = self.train
        model = trainable.model
        if self.trees:
            check_trees(trainable, split_head(model))
        if train.packing:
            vocab_size = self.base.vocab_size
            prepare_packing(trainable, split_head(model), train.max_seq_length, vocab_size)

        states = hidden_states(model, self.base.name)
        centering = train.center_rewards_coefficient
        return [RewardModel(model, states, model[SCORE], centering, score_pairs)] * len(data)

    def summary(
        self,
        trainable: Trainable,
        data: Sequence[PhaseData],
        trained: Trained,
        sources: Sequence[str],
    ) -> Summary:
        train = self.train
        last = data[-1]
        phases = phase_reports(data, sources, trained)
        facts = {}
        if phases:
            facts["phases"] = phases

        shared = None
        trees = self.trees.get(last.phase.name)
        if trees is not None:
            shared = trees.to_json(last.train.examples)

        named = {"task": "reward", "loss_on": last.splits["train"].loss_on}
        named["center_rewards_coefficient"] = train.center_rewards_coefficient
        values = {"preference_accuracy": "accuracy", "reward_margin": "margin", "loss": "nll"}

        return Summary(
            eval={
                "split": last.held_out_split,
                "available": last.held_out_examples.count,
                **before_and_after(*trained.ends(last.phase), values),
            },
            objective=named,
            facts=facts,
            report={
                "phases": phases,
                "objective": named,
                "shared_prefix": shared,
            },
        )

    @staticmethod
    def report_lines(report: dict) -> list[str]:
        held_out = report["held_out"]
        return [
            f"done    held-out {format_change(report)} on {evaluated(held_out)}"
            f"{gates_text(report['gates'])}",
            *(f"phase   {line}" for line in phase_lines(report["phases"])),
            *bad_rows_lines(report),
            f"speed   {speed(report)} · {cost(report)}",
            f"pack    {report['pack']} ({report['pack_mb']:.1f} MB)    try: packs eval "
            f"{report['pack']} --data DATA",
        ]
