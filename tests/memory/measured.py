"""The measured peak of a step, beside which plans are put."""

from mlx.utils import tree_flatten

from mlx_packs import LoRAConfig, TrainConfig
from mlx_packs.adapters.attach import attach
from mlx_packs.data.dataset import Batch
from mlx_packs.optim import make_optimizer
from mlx_packs.packs.base import Base
from mlx_packs.runtime import mx
from tests.helpers.memory import active_bytes
from tests.helpers.steps import lm_stepper


def peak_of_step(base: Base, lora: LoRAConfig, train: TrainConfig, batch: Batch) -> int:
    """The peak bytes of a training step on a batch, without the arrays of other tests."""
    weights = sum(array.nbytes for _, array in tree_flatten(base.model.parameters()))
    others = active_bytes() - weights
    attached = attach(base, lora, matmul_path="dense")
    attached.recompute(train.recomputes)
    base.model.train()
    stepper = lm_stepper(base.model, make_optimizer(train), None)
    for _ in range(2):  # the state of the optimizer is there from the second on
        mx.reset_peak_memory()
        stepper(batch, True, True)
    return mx.get_peak_memory() - others
