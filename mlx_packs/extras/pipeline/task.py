"""``--pipeline``: the next token by ranks that have some blocks of the base each."""

from collections.abc import Sequence

from ...adapters.trainable import Trainable
from ...config.lora import LoRAConfig
from ...distributed.group import group
from ...memory.memory_choice import MemoryChoice
from ...objectives.objective import Objective
from ...packs.base import Base
from ...tasks.causal_lm import CausalLMTask
from ...tasks.phases import PhaseData
from ...tasks.task import PhaseStarts
from .adapters import check_in_blocks, check_splittable
from .objective import PipelinedCausalLM, PipelinedScorer
from .stage import Stage


class PipelinedTask(CausalLMTask):
    """``--task lm`` on a rank of a pipeline, which completes no sample."""

    lazy_base = True
    completes_text = False

    def target(self, base: Base) -> tuple[Base, LoRAConfig]:
        check_splittable(base, group().size)
        check_in_blocks(base, self.lora)
        return super().target(base)

    def bind(
        self,
        trainable: Trainable,
        data: Sequence[PhaseData],
        starts: PhaseStarts,
        memory: MemoryChoice,
    ) -> list[Objective]:
        stage = Stage(trainable.model, group())
        self.scorer = PipelinedScorer(trainable.model, stage)
        return [PipelinedCausalLM(stage, self.scorer.score, self.loss_options())] * len(data)
