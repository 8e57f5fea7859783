"""The next token, where tokens that are predicted well count less."""

from dataclasses import replace
from functools import partial

from ..objectives.causal_lm import LossOptions
from ..objectives.focal import focal_loss
from .causal_lm import CausalLMTask
from .task import Summary, Trained


class FocalTask(CausalLMTask):
    """``--task focal``: as ``lm``, with another loss."""

    def loss_options(self) -> LossOptions:
        loss = partial(focal_loss, gamma=self.train.focal_gamma)
        return replace(super().loss_options(), custom=loss)

    def summary(self, trained: Trained) -> Summary:
        summary = super().summary(trained)
        own = {"task": "focal", "focal_gamma": self.train.focal_gamma}
        return replace(summary, objective=summary.objective | own)
