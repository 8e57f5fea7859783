"""Tasks that train a head of their own, in addition to adapters."""

from dataclasses import replace

from ..adapters.score_head import fresh_score_head, with_score_head
from ..adapters.spec import SCORE
from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from ..objectives.reward_model import hidden_states
from ..packs.base import Base


def with_trained_head(base: Base, lora: LoRAConfig, train: TrainConfig) -> tuple[Base, LoRAConfig]:
    """Return a base with a score head beside it, and which modules are trained in full as it is."""
    hidden_states(base.model, base.name, train.task)
    model = with_score_head(base.model, fresh_score_head(base, train.seed))
    saved = (*lora.modules_to_save, SCORE)
    return replace(base, model=model), replace(lora, modules_to_save=saved)
