"""Steps of small causal language models, without a run around them."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np
from mlx.utils import tree_flatten, tree_map

from mlx_packs import LoRAConfig, TrainConfig, load_base
from mlx_packs.adapters.attach import attach
from mlx_packs.adapters.lora import Attached
from mlx_packs.adapters.trainable import Trainable
from mlx_packs.data.batches import TokenCollate
from mlx_packs.data.dataset import Batch
from mlx_packs.data.encoding import Example
from mlx_packs.objectives.causal_lm import CausalLM, Head, split_head
from mlx_packs.objectives.exactness import check_packing
from mlx_packs.objectives.objective import arrays_of
from mlx_packs.optim import make_optimizer
from mlx_packs.packs.base import Base
from mlx_packs.runtime import mx
from mlx_packs.training.step import Stepper
from tests.helpers.models import base_of


def examples_of(lengths: Iterable[int], last_k: int | None = None) -> list[Example]:
    """Random examples; the loss is on the last two thirds of each, or on its last k tokens."""
    random = np.random.default_rng(0)
    examples = []
    for length in lengths:
        target = np.arange(length) >= max(1, length // 3)
        if last_k is not None:
            target[:-last_k] = False
        examples.append(Example(random.integers(1, 128, length).astype(np.int32), target, "x"))
    return examples


def fill_b(attached: Attached) -> None:
    """Give B random values: with B at zero, A would get no gradient."""
    for place in attached.places.values():
        place.lora.lora_b[:] = [0.1 * mx.random.normal(b.shape) for b in place.lora.lora_b]


def moved(trainable: Trainable, size: float = 0.1) -> Trainable:
    """Add normal numbers times ``size`` to all that is trained but DoRA's magnitudes."""
    mx.random.seed(3)
    changed = {
        name: t + size * mx.random.normal(t.shape) * (not name.endswith(".m"))
        for name, t in trainable.tensors().items()
    }
    trainable.load(changed, "test")
    return trainable


def make_batch(
    examples: Sequence[Example], indices: Sequence[int], batch_size: int, limit: int
) -> Batch:
    """Examples with these indices in a batch of rows of at most ``limit`` inputs."""
    return TokenCollate(batch_size, limit)(examples, indices)


def loss_sum(model: nn.Module, head: Head | None, batch: Batch) -> mx.array:
    """The sum of the targets' losses."""
    return CausalLM(model, head).loss(arrays_of(batch), batch.layout)[0]


_loss = CausalLM.loss


def weighted(
    objective: CausalLM, inputs: dict[str, mx.array], layout: tuple = ()
) -> tuple[mx.array, mx.array]:
    """The loss of `CausalLM` where targets count the batch's weight each."""
    total, count = _loss(objective, inputs, layout)
    weight = inputs["weight"].mean()
    return total * weight, count * weight


def with_weight(batch: Batch, weight: float) -> Batch:
    """A batch for `weighted`."""
    return batch.having(weight=np.full(len(batch.inputs["tokens"]), weight, np.float32))


def adapted(
    base: Base,
    num_layers: int = -1,
    recompute: str = "none",
    packed_length: int | None = None,
) -> tuple[Attached, Head | None]:
    """Adapters of rank 2 that are not zero, in training mode, and the head of their model.

    Args:
        base: its top blocks get the adapters.
        num_layers: how many blocks; -1 is all.
        recompute: activation checkpointing.
        packed_length: of packed sequences; None is without packing.
    """
    attached = attach(base, LoRAConfig(rank=2, num_layers=num_layers))
    fill_b(attached)
    attached.recompute(recompute)
    head = split_head(base.model)
    if packed_length:
        check_packing(attached, head, packed_length, base.vocab_size)
    base.model.train()
    return attached, head


def lm_stepper(
    model: nn.Module,
    optimizer: optimizers.Optimizer,
    max_grad_norm: float | None = 1.0,
    head: Head | None = None,
) -> Stepper:
    """A stepper on the loss of the next token; by default the model is split into states and head."""
    loss = CausalLM(model, head or split_head(model)).loss
    return Stepper(model, loss, optimizer, max_grad_norm)


def update(batches: Sequence[Batch], accumulate: int, recompute: bool = False) -> tuple:
    """Adapters of a small model after one update over batches, and the stepper that made it."""
    base = base_of("qwen3")
    attached = attach(base, LoRAConfig(rank=4))
    fill_b(attached)
    if recompute:
        attached.recompute("block")

    base.model.train()
    mx.random.seed(11)
    optimizer = make_optimizer(TrainConfig(optimizer="sgd", learning_rate=0.1, iters=1))
    optimizer.init(base.model.trainable_parameters())
    stepper = lm_stepper(base.model, optimizer)

    for i, batch in enumerate(batches, 1):
        stepper(batch, i == len(batches), accumulate == 1)
    return attached.tensors(), stepper


def largest_difference(one: dict[str, mx.array], other: dict[str, mx.array]) -> float:
    """The largest difference of any entry of two sets of tensors with the same names."""
    assert set(one) == set(other)
    return max(mx.abs(one[name] - other[name]).max().item() for name in one)


def loss_and_gradients(
    model: nn.Module,
    head: Head | None,
    batches: Iterable[Batch],
) -> tuple[float, dict[str, mx.array]]:
    """Sums over batches."""
    value_and_grad = nn.value_and_grad(model, lambda batch: loss_sum(model, head, batch))
    total, gradients = 0.0, None
    for batch in batches:
        loss, of_batch = value_and_grad(batch)
        total += loss.item()
        gradients = of_batch if gradients is None else tree_map(mx.add, gradients, of_batch)
    return total, dict(tree_flatten(gradients))


def lora_loss_and_gradients(
    folder: Path, path: str, targets: tuple[str, ...] = ()
) -> tuple[float, dict[str, mx.array]]:
    """Of two examples on a checkpoint, by a matmul path, with random adapters."""
    base = load_base(folder)
    attached = attach(base, LoRAConfig(rank=2, target_modules=targets), matmul_path=path)
    mx.random.seed(1)
    fill_b(attached)
    batch = make_batch(examples_of((9, 14)), [0, 1], 2, 16)
    return loss_and_gradients(base.model, split_head(base.model), [batch])


def assert_same(actual: dict[str, mx.array], expected: dict[str, mx.array]) -> None:
    """Gradients agree to 2e-5 of each tensor's largest entry, and none is all zero."""
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        largest = mx.abs(tensor).max().item()
        assert largest > 0, name
        assert mx.abs(actual[name] - tensor).max().item() < 2e-5 * largest, name
