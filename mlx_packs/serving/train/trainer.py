"""Models in training over the base of a server; only the thread that computes may call this.

The models share the base. One has its adapters on it for the time of a batch; the packs that are
served are off the base then, and back before the next token is generated.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from ...adapters.attach import attach
from ...adapters.lora import Attached
from ...adapters.targets import without_narrow
from ...bases.geometry import find_groups
from ...bases.model import BaseModel
from ...config.lora import LoRAConfig
from ...config.schema import TrainConfig
from ...errors import PackError
from ...nn.surgery import replace_modules
from ...objectives.causal_lm import Head, LossOptions, split_head, target_loss
from ...packs.compatibility import check_generates
from ...packs.making import attach_pack, pack_of
from ...packs.pack import Pack
from ...runtime import mx
from ...training.update import Update
from ..slots import PackSlots
from .batches import RowBatch
from .losses import Loss, Targets

ALPHA = 32.0  # of every model: the scale of the adapters' output is ALPHA / rank
_BATCH_TOKENS = 2048  # inputs of one pass; 512 where all logits are in memory
_FULL_LOGITS_TOKENS = 512


@dataclass(frozen=True)
class Adapters:
    """Which linear layers of a model have adapters, as the protocol's LoraConfig names them."""

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True)
class AdamStep:
    """One update by AdamW.

    Attributes:
        max_grad_norm: gradients of a larger norm are scaled down to it; 0 never.
    """

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float


@dataclass(eq=False)
class TrainedModel:
    """Adapters, the gradients that wait for an update, and the state of the optimizer.

    Attributes:
        modules: what `replace_modules` puts on the base.
        originals: the base's own modules in their places, in the order of their replacement.
        grads: sum of the gradients since the last update; None without any.
    """

    attached: Attached
    modules: list[tuple[str, nn.Module]]
    originals: list[tuple[str, nn.Module]]
    head: Head | None
    optimizer: optimizers.AdamW
    rank: int
    grads: dict | None = None

    @property
    def batch_tokens(self) -> int:
        """Inputs that are computed at a time."""
        if self.head is None or self.head.frozen is None:
            return _FULL_LOGITS_TOKENS
        return _BATCH_TOKENS


@dataclass(frozen=True)
class Pass:
    """A forward pass: its loss, log-probabilities of each row, and gradients or None."""

    loss: float
    logprobs: list[np.ndarray]
    grads: dict | None


class Trainer:
    """Makes models and trains them.

    Args:
        slots: the packs that are served on the base.
    """

    def __init__(self, slots: PackSlots) -> None:
        self._slots = slots
        self._base: BaseModel = slots.base

    def create(self, adapters: Adapters) -> TrainedModel:
        """Return a model with fresh adapters (B = 0), which computes what the base does."""
        with self._slots.lifted():
            targets = self._targets(adapters)
            lora = LoRAConfig(rank=adapters.rank, alpha=ALPHA, target_modules=targets)
            return self._model(attach(self._base, lora, seed=adapters.seed))

    def of_pack(self, pack: Pack, state: Mapping[str, Any] | None) -> TrainedModel:
        """Return a model with the adapters of a pack; ``state`` is its optimizer's, or None."""
        check_generates(pack)
        if reason := pack._beyond_lora:
            raise PackError(f"path: {reason}, which is not trained here.", "unsupported", "path")

        with self._slots.lifted():
            model = self._model(attach_pack(self._base, pack))
            pack.tensors = None

        if state is not None:
            expected = {name: array.shape for name, array in self.state_of(model).items()}
            if expected != {name: array.shape for name, array in state.items()}:
                raise PackError(
                    "path: its optimizer state is of other adapters.", "mismatch", "path"
                )
            model.optimizer.state = tree_unflatten(list(state.items()))
        return model

    def _model(self, attached: Attached) -> TrainedModel:
        """Return the model of adapters that are on the base, and take them off."""
        try:
            head = split_head(attached.model)
            originals = list(attached._originals)
            ranks = {s.rank for spec in attached.specs.values() for s in spec.slices}
            optimizer = optimizers.AdamW(0.0, bias_correction=True)
            optimizer.init(attached.model.trainable_parameters())
            mx.eval(attached.model.trainable_parameters(), optimizer.state)
            modules = attached.lift()
        except BaseException:
            attached.detach()
            raise

        return TrainedModel(attached, modules, originals, head, optimizer, max(ranks))

    def _targets(self, adapters: Adapters) -> tuple[str, ...]:
        """Return the paths of the linears that get adapters; all but attention count as MLP."""
        groups, _ = find_groups(self._base.model, self._base.config, (), -1)
        groups, _ = without_narrow(groups, LoRAConfig(rank=adapters.rank))
        linears = [geometry.path for group in groups for geometry in group.members]

        paths = []
        for path in linears:
            is_attention = "attn" in path or "attention" in path
            if adapters.train_attn if is_attention else adapters.train_mlp:
                paths.append(path)
        if adapters.train_unembed and isinstance(self._base.model.get("lm_head"), nn.Module):
            paths.append("lm_head")

        if not paths:
            raise PackError(
                "lora_config: no layer of this base is chosen; its head is the table of its "
                "embeddings, which is not trained here. Set train_attn or train_mlp.",
                "conflict",
                "lora_config",
            )
        return tuple(paths)

    @contextmanager
    def _on_base(self, model: TrainedModel) -> Iterator[nn.Module]:
        """Return the base's model with the adapters of a model on it, for training."""
        base = self._base.model
        with self._slots.lifted():
            replace_modules(base, model.modules)
            base.train()
            try:
                yield base
            finally:
                for original in reversed(model.originals):
                    replace_modules(base, [original])

    def run(self, model: TrainedModel, batch: RowBatch, loss: Loss, backward: bool) -> Pass:
        """Compute a batch, with its gradient if asked for; `add` keeps it."""
        arrays = {name: mx.array(values) for name, values in batch.arrays.items()}
        inputs = {name: mx.array(values) for name, values in batch.inputs.items()}
        options = LossOptions(gradient=backward)

        with self._on_base(model) as module:

            def total() -> tuple[mx.array, mx.array]:
                nll, _ = target_loss(module, model.head, arrays, options=options)
                targets = Targets(-nll, inputs, arrays["owners"], len(batch.numbers))
                return loss.terms(targets).sum(), targets.logprobs

            grads = None
            if backward:
                (value, logprobs), grads = nn.value_and_grad(module, total)()
            else:
                value, logprobs = total()
            mx.eval(value, logprobs, grads)

        _check_finite(value, grads)
        sizes = [int(np.prod(shape)) for shape in batch.shapes]
        parts = np.split(np.array(logprobs), np.cumsum(sizes)[:-1])
        rows = [part.reshape(shape) for part, shape in zip(parts, batch.shapes, strict=True)]

        return Pass(float(value.item()), rows, grads)

    def add(self, model: TrainedModel, grads: dict) -> None:
        """Add gradients to those that wait for the next update."""
        if model.grads is not None:
            grads = added(model.grads, grads)
        model.grads = grads

    def update(self, model: TrainedModel, step: AdamStep) -> float:
        """Update a model by the gradients that wait, and return their norm before clipping."""
        if model.grads is None:
            raise PackError(
                "optim_step: there is no gradient. Call forward_backward first.", "conflict"
            )

        optimizer = model.optimizer
        optimizer.learning_rate = step.learning_rate
        optimizer.betas = list(step.betas)
        optimizer.eps = step.eps
        optimizer.weight_decay = step.weight_decay

        with self._on_base(model) as module:
            update = Update(module, optimizer, step.max_grad_norm, skips=True)
            norm = update.apply(model.grads, mx.array(1.0))
            mx.eval(norm, module.trainable_parameters(), optimizer.state)

        model.grads = None
        if not mx.isfinite(norm).item():
            raise PackError(
                "optim_step: the sum of the gradients is not finite; the weights are unchanged.",
                "diverged",
            )
        return float(norm.item())

    def pack(self, model: TrainedModel) -> Pack:
        """Return the adapters as they are now, as a pack that is not saved."""
        pack = pack_of(model.attached, objective={"task": TrainConfig.task})
        mx.eval(pack.tensors)
        return pack

    def state_of(self, model: TrainedModel) -> dict[str, mx.array]:
        """Return the state of the optimizer, flat."""
        return dict(tree_flatten(model.optimizer.state))


def added(grads: dict, others: dict) -> dict:
    """Return the sum of gradients, computed."""
    total = tree_map(mx.add, grads, others)
    mx.eval(total)
    return total


def _check_finite(loss: mx.array, grads: dict | None) -> None:
    """Raise a PackError if a loss or a gradient is not finite; nothing was changed then."""
    arrays = [loss, *(grad for _, grad in tree_flatten(grads or {}))]
    finite = mx.stack([mx.isfinite(array).all() for array in arrays])
    if not finite.all().item():
        raise PackError(
            "The loss or its gradient is not finite, and nothing was added to the gradient. Check "
            "weights, advantages and logprobs of the datums.",
            "diverged",
        )
