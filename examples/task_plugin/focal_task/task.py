"""The next token with a focal loss, which counts tokens less the better they are predicted.

Focal loss: https://arxiv.org/abs/1708.02002
"""

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from mlx_packs.objectives.causal_lm import LossOptions
from mlx_packs.tasks.causal_lm import CausalLMTask


class FocalTask(CausalLMTask):
    """Examples, scores and the report are the same as in `--task lm`."""

    def loss_options(self) -> LossOptions:
        """Return the options of the loss, (1 - p)^gamma * -log p of each target."""
        gamma = self.train.task_settings.gamma

        def focal_loss(logits: mx.array, targets: mx.array) -> mx.array:
            nll = nn.losses.cross_entropy(logits, targets)
            return (1 - mx.exp(-nll)) ** gamma * nll

        return replace(super().loss_options(), custom=focal_loss)
