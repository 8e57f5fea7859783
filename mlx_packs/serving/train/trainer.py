"""Models in training over the base of a server; only the thread that computes may call this.

The models share the base. One has its adapters on it for the time of a pass; the packs that are
served are off the base then, and back before the next token is generated.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.nn as nn
import mlx.optimizers as optimizers
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten

from ...adapters.attach import attach
from ...adapters.lora import Attached
from ...adapters.targets import without_narrow
from ...bases.geometry import find_groups
from ...bases.model import BaseModel
from ...config.lora import LoRAConfig
from ...config.schema import TrainConfig
from ...errors import PackError
from ...nn.lora import GroupedLoRA
from ...nn.surgery import replace_modules
from ...objectives.causal_lm import split_head
from ...packs.compatibility import check_generates
from ...packs.making import attach_pack, pack_of
from ...packs.pack import Pack
from ...runtime import mx
from ...training.update import Update
from ..slots import PackSlots
from .batches import Datum, batch_of
from .losses import Loss
from .passes import Grads, PassResult, TrainedModel, compute
from .protocol import AdamBody, LoraConfigBody

ALPHA = 32.0  # of every model: the scale of the adapters' output is ALPHA / rank


class Trainer:
    """Makes models and trains them.

    Args:
        slots: the packs that are served on the base.
    """

    def __init__(self, slots: PackSlots) -> None:
        self._slots = slots
        self._base: BaseModel = slots.base

    def create(self, config: LoraConfigBody) -> TrainedModel:
        """Return a model with fresh adapters (B = 0), which computes what the base does."""
        seed = secrets.randbits(31) if config.seed is None else config.seed
        with self._slots.lifted():
            targets = self._targets(config)
            lora = LoRAConfig(rank=config.rank, alpha=ALPHA, target_modules=targets)
            return self._model(attach(self._base, lora, seed=seed))

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
            ranks = {s.rank for spec in attached.specs.values() for s in spec.slices}
            optimizer = optimizers.AdamW(0.0, bias_correction=True)
            optimizer.init(attached.model.trainable_parameters())
            mx.eval(attached.model.trainable_parameters(), optimizer.state)
            modules = attached.lift()
        except BaseException:
            attached.detach()
            raise

        return TrainedModel(attached, modules, head, optimizer, max(ranks))

    def _targets(self, config: LoraConfigBody) -> tuple[str, ...]:
        """Return the paths of the linears that get adapters."""
        groups, _ = find_groups(self._base.model, self._base.config, (), -1)
        groups, _ = without_narrow(groups, LoRAConfig(rank=config.rank))
        paths = [geometry.path for group in groups for geometry in group.members]
        if config.train_unembed and isinstance(self._base.model.get("lm_head"), nn.Module):
            paths.append("lm_head")
        return tuple(paths)

    @contextmanager
    def _on_base(self, model: TrainedModel) -> Iterator[nn.Module]:
        """Return the base's model with adapters on it, for training."""
        base = self._base.model
        with self._slots.lifted():
            replace_modules(base, model.modules)
            base.train()
            try:
                yield base
            finally:
                model.attached.lift()

    def run(
        self, model: TrainedModel, rows: Sequence[Datum], loss: Loss, backward: bool
    ) -> PassResult:
        """Compute a pass, with its gradients if asked for; `add` keeps them."""
        with self._on_base(model) as base:
            return compute(base, model.head, batch_of(rows), loss, backward)

    def add(self, model: TrainedModel, grads: Grads) -> None:
        model.grads = added(model.grads, grads)

    def update(self, model: TrainedModel, step: AdamBody) -> float:
        """Update a model by the gradients that wait, and return their norm before clipping."""
        if model.grads is None:
            raise PackError(
                "optim_step: there is no gradient. Call forward_backward first.", "conflict"
            )

        optimizer = model.optimizer
        optimizer.learning_rate = step.learning_rate
        optimizer.betas = [step.beta1, step.beta2]
        optimizer.eps = step.eps
        optimizer.weight_decay = step.weight_decay

        grads = model.grads
        with self._on_base(model) as module:
            tree = tree_map_with_path(lambda name, _: grads[name], module.trainable_parameters())
            norm = _update_of(model, module, step)(tree)
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
        return dict(tree_flatten(model.optimizer.state))


def added(total: Grads | None, grads: Grads) -> Grads:
    """Return the sum of gradients, computed."""
    if total is None:
        return grads
    total = {name: grad + grads[name] for name, grad in total.items()}
    mx.eval(total)
    return total


def _update_of(
    model: TrainedModel, module: nn.Module, step: AdamBody
) -> Callable[[dict], mx.array]:
    """Return what updates a model on its base by gradients, compiled for the settings of a step.

    The learning rate is part of the optimizer's state, so that a schedule compiles nothing anew.
    """
    settings = (step.beta1, step.beta2, step.eps, step.weight_decay, step.grad_clip_norm)
    if settings not in model.updates:
        update = Update(module, model.optimizer, max(0.0, step.grad_clip_norm), skips=True)
        factors = [m.state for m in module.modules() if isinstance(m, GroupedLoRA)]
        state = [factors, model.optimizer.state]

        def apply(grads: dict) -> mx.array:
            return update.apply(grads, mx.array(1.0))

        model.updates.clear()
        model.updates[settings] = mx.compile(apply, inputs=state, outputs=state)
    return model.updates[settings]
