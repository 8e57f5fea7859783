"""The next token, where tokens that are predicted well count less."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ..adapters.trainable import Trainable
from ..objectives.causal_lm import LossOptions
from ..objectives.focal import focal_loss
from .causal_lm import CausalLMTask
from .phases import PhaseData
from .task import Summary, Trained


class FocalTask(CausalLMTask):
    """``--task focal``: as ``lm``, with another loss."""

    def loss_options(self) -> LossOptions:
        loss = partial(focal_loss, gamma=self.train.focal_gamma)
        return replace(super().loss_options(), custom=loss)

    def summary(
        self,
        trainable: Trainable,
        data: Sequence[PhaseData],
        trained: Trained,
        sources: Sequence[str],
    ) -> Summary:
        summary = super().summary(trainable, data, trained, sources)
        own = {"task": "focal", "focal_gamma": self.train.focal_gamma}
        return replace(summary, objective=summary.objective | own)
