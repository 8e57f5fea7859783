"""Models in training over the base of a server; only the thread that computes may call this.

The models share the base. One or several have their adapters on it for the time of a pass; the
packs that are served are off the base then, and back before the next token is generated.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
import mlx.optimizers as optimizers
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten

from ...adapters.attach import attach, install
from ...adapters.lora import Attached
from ...adapters.spec import Specs
from ...adapters.targets import without_narrow
from ...bases.geometry import find_groups
from ...bases.model import BaseModel
from ...config.lora import LoRAConfig
from ...config.schema import TrainConfig
from ...errors import PackError
from ...nn.joint_lora import RowsLoRA
from ...nn.lora import GroupedLoRA
from ...nn.surgery import replace_modules
from ...objectives.causal_lm import split_head
from ...packs.compatibility import check_generates
from ...packs.making import attach_pack, pack_of
from ...packs.pack import Pack
from ...runtime import mx
from ...training.update import Update
from ..slots import PackSlots, places_of, union_of
from .passes import (
    Grads,
    Lifted,
    Part,
    Pass,
    TrainedModel,
    compute,
    padding_matters,
    share_a_pass,
)

ALPHA = 32.0  # of every model: the scale of the adapters' output is ALPHA / rank
_KEPT = 8  # kinds of models in one pass whose modules are kept


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


@dataclass(frozen=True)
class _Shared:
    """Modules for several models in one pass, and their groups by path."""

    lifted: Lifted
    groups: dict[str, RowsLoRA]


class Trainer:
    """Makes models and trains them.

    Args:
        slots: the packs that are served on the base.
    """

    def __init__(self, slots: PackSlots) -> None:
        self._slots = slots
        self._base: BaseModel = slots.base
        self._shared: dict[str, _Shared] = {}
        self._padding_matters: bool | None = None

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
            groups = _groups(attached.model)
            originals = list(attached._originals)
            ranks = {s.rank for spec in attached.specs.values() for s in spec.slices}
            optimizer = optimizers.AdamW(0.0, bias_correction=True)
            optimizer.init(attached.model.trainable_parameters())
            mx.eval(attached.model.trainable_parameters(), optimizer.state)
            lifted = Lifted(attached.lift(), originals)
        except BaseException:
            attached.detach()
            raise

        return TrainedModel(attached, lifted, groups, head, optimizer, max(ranks))

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
    def _on_base(self, lifted: Lifted) -> Iterator[nn.Module]:
        """Return the base's model with adapters on it, for training."""
        base = self._base.model
        with self._slots.lifted():
            replace_modules(base, lifted.modules)
            base.train()
            try:
                yield base
            finally:
                for original in reversed(lifted.originals):
                    replace_modules(base, [original])

    def can_share(self, models: Sequence[TrainedModel], other: TrainedModel) -> bool:
        """Return whether rows of another model can be computed in one pass with those of models.

        Not if padding to the rows of another model would change them.
        """
        if self._padding_matters is None:
            with self._slots.lifted():
                self._padding_matters = padding_matters(self._base.model)

        if self._padding_matters:
            return False
        return all(share_a_pass(model, other) for model in models)

    def run(self, parts: Sequence[Part], backward: bool) -> list[Pass | PackError]:
        """Compute a pass, with its gradients if asked for; `add` keeps them.

        Returns what became of each part.
        """
        if len(parts) == 1:
            with self._on_base(parts[0].model.lifted) as base:
                return compute(base, parts, backward)

        with self._shared_for(parts) as lifted, self._on_base(lifted) as base:
            return compute(base, parts, backward)

    @contextmanager
    def _shared_for(self, parts: Sequence[Part]) -> Iterator[Lifted]:
        """Return modules that compute the rows of each part with the adapters of its model."""
        specs = union_of([part.model.attached.specs for part in parts])
        key = repr(places_of(specs))
        if key not in self._shared:
            if len(self._shared) >= _KEPT:
                self._shared.clear()
            self._shared[key] = self._shared_by(specs)

        shared = self._shared[key]
        rows = [len(part.batch.numbers) for part in parts]
        for path, group in shared.groups.items():
            group.take([part.model.groups.get(path) for part in parts], rows)
        try:
            yield shared.lifted
        finally:  # models that are unloaded must leave memory
            for group in shared.groups.values():
                group.take((), ())

    def _shared_by(self, specs: Specs) -> _Shared:
        with self._slots.lifted():
            attached = attach(self._base, specs=specs)
            try:
                install(attached, RowsLoRA)
                groups = {
                    path: group
                    for path, group in _groups(attached.model).items()
                    if isinstance(group, RowsLoRA)
                }
                originals = list(attached._originals)
                return _Shared(Lifted(attached.lift(), originals), groups)
            except BaseException:
                attached.detach()
                raise

    def add(self, model: TrainedModel, grads: Grads) -> None:
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

        grads = model.grads
        with self._on_base(model.lifted) as module:
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
        """Return the state of the optimizer, flat."""
        return dict(tree_flatten(model.optimizer.state))


def added(grads: Grads, others: Grads) -> Grads:
    """Return the sum of gradients, computed."""
    total = {name: grad + others[name] for name, grad in grads.items()}
    mx.eval(total)
    return total


def _update_of(
    model: TrainedModel, module: nn.Module, step: AdamStep
) -> Callable[[dict], mx.array]:
    """Return what updates a model on its base by gradients, compiled for the settings of a step.

    The learning rate is part of the optimizer's state, so that a schedule compiles nothing anew.
    """
    settings = (step.betas, step.eps, step.weight_decay, step.max_grad_norm)
    if settings not in model.updates:
        update = Update(module, model.optimizer, step.max_grad_norm, skips=True)
        factors = [group.state for group in model.groups.values()]
        state = [factors, model.optimizer.state]

        def apply(grads: dict) -> mx.array:
            return update.apply(grads, mx.array(1.0))

        model.updates.clear()
        model.updates[settings] = mx.compile(apply, inputs=state, outputs=state)
    return model.updates[settings]


def _groups(model: nn.Module) -> dict[str, GroupedLoRA]:
    return {
        path: module for path, module in model.named_modules() if isinstance(module, GroupedLoRA)
    }
