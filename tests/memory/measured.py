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


def peak_of_step(
    base: Base, lora: LoRAConfig, train: TrainConfig, batch: Batch, steps: int = 1
) -> int:
    """The peak bytes of training steps on a batch, without the arrays of other tests.

    On a busy machine MLX allocates less ahead in some steps: the peak is that of all of them.
    """
    weights = sum(array.nbytes for _, array in tree_flatten(base.model.parameters()))
    others = active_bytes() - weights
    attached = attach(base, lora, matmul_path="dense")
    attached.recompute(train.recomputes)
    base.model.train()
    stepper = lm_stepper(base.model, make_optimizer(train), None)
    stepper(batch, True, True)  # makes the state of the optimizer
    mx.reset_peak_memory()
    for _ in range(steps):
        stepper(batch, True, True)
    return mx.get_peak_memory() - others
