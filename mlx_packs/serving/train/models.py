"""The models in training, over the base of a server.

The models share the base. One has its adapters on it for the time of a pass; the packs that are
served are off the base then, and back before the next token is generated. Requests of one model
are computed in the order of their arrival. A request is as many forward passes as its rows need.
Those of several models take turns, since each passes the queue of the thread that computes, which
does other work between two.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten
from starlette.concurrency import run_in_threadpool

from ...adapters.attach import attach, without_narrow
from ...adapters.lora import Attached
from ...bases.geometry import find_groups
from ...config.lora import LoRAConfig
from ...config.schema import TrainConfig
from ...errors import PackError
from ...nn.lora import GroupedLoRA
from ...nn.surgery import replace_modules
from ...objectives.causal_lm import Head, split_head
from ...packs.compatibility import check_generates
from ...packs.making import attach_pack, pack_of
from ...packs.pack import Pack
from ...runtime import mx
from ...training.update import Update
from ..fields import field_error, not_found
from ..generation import TextWorker
from ..slots import PackSlots
from .losses import Datum, Grads, Loss, compute, find_loss, split_passes
from .protocol import AdamBody, LoraConfigBody
from .rows import checked_row, forward_output
from .states import Kind, Saved, new_saved, optimizer_of, save_model

ALPHA = 32.0  # of every model: the scale of the adapters' output is ALPHA / rank
MOST_INPUTS = 2048  # inputs of one pass; 512 where all logits are in memory
_MOST_WITH_LOGITS = 512
MOST_MODELS = 8


@dataclass(eq=False)
class TrainedModel:
    """Adapters, the gradients that wait for an update, and the state of the optimizer.

    Attributes:
        modules: what `replace_modules` puts on the base for a pass or an update.
        grads: sum of the gradients since the last update; None without any.
        updates: the compiled update, by its settings.
        id: of the protocol; it and ``session_id`` are empty until `Models` has the model.
        lock: its requests wait for it, and the first that came goes first.
    """

    attached: Attached
    modules: list[tuple[str, nn.Module]]
    head: Head | None
    optimizer: optimizers.AdamW
    rank: int
    grads: Grads | None = None
    updates: dict[tuple, Callable[[dict], mx.array]] = field(default_factory=dict)
    id: str = ""
    session_id: str = ""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def most_inputs(self) -> int:
        if self.head is None or self.head.frozen is None:
            return _MOST_WITH_LOGITS
        return MOST_INPUTS

    def add(self, grads: Grads) -> None:
        self.grads = _added(self.grads, grads)


class Trainer:
    """Makes models and trains them beside the packs of ``slots``, on the thread that computes."""

    def __init__(self, slots: PackSlots) -> None:
        self._slots = slots
        self._base = slots.base

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
            raise field_error("path", f"{reason}, which is not trained here.", "unsupported")

        with self._slots.lifted():
            model = self._model(attach_pack(self._base, pack))
            pack.tensors = None

        if state is not None:
            expected = {name: array.shape for name, array in self.state_of(model).items()}
            if expected != {name: array.shape for name, array in state.items()}:
                text = "its optimizer state is of other adapters."
                raise field_error("path", text, "mismatch")
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
    ) -> tuple[float, list[np.ndarray], Grads | None]:
        """Compute a pass as `compute` does, on the base with the adapters of a model."""
        with self._on_base(model) as base:
            return compute(base, model.head, rows, loss, backward)

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


def _added(total: Grads | None, grads: Grads) -> Grads:
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


class Models:
    """The models of all sessions, over the base of a generator, whose thread computes.

    Attributes:
        passes: forward passes so far.
        waiting: requests of forward passes that are not computed yet.
    """

    def __init__(self, generator: TextWorker, folder: Path) -> None:
        self._generator = generator
        self._folder = folder
        self._trainer = Trainer(generator.registry.slots)
        self.passes = 0
        self.waiting = 0
        self._models: dict[str, TrainedModel] = {}
        self._making = 0  # models that have a place and are not made yet

    @property
    def all(self) -> list[TrainedModel]:
        return list(self._models.values())

    def find(self, model_id: str) -> TrainedModel:
        model = self._models.get(model_id)
        if model is None:
            reason = (
                "is not loaded. It was unloaded, or the server was started again; make a new one "
                "from a saved state."
            )
            raise not_found("model_id", model_id, reason)
        return model

    async def create(self, model_id: str, session_id: str, config: LoraConfigBody) -> None:
        await self._add(model_id, session_id, partial(self._trainer.create, config))

    async def _add(self, model_id: str, session_id: str, make: Callable[[], TrainedModel]) -> None:
        if len(self._models) + self._making >= MOST_MODELS:
            raise PackError(
                f"{MOST_MODELS} models are in training, which is the most. Close a client, or "
                "start the server again: saved models stay.",
                "conflict",
            )

        self._making += 1
        try:
            model = await self._generator.result_of(make)
        finally:
            self._making -= 1
        model.id = model_id
        model.session_id = session_id
        self._models[model_id] = model

    async def unload(self, model: TrainedModel) -> None:
        """Forget a model, when its earlier requests are computed."""
        async with model.lock:
            self._models.pop(model.id, None)

    async def forward(self, model: TrainedModel, request: Any) -> bytes:
        """Compute a ForwardBackwardRequest: a loss, with its gradient unless ``forward_only``.

        The gradient is added to those that wait, of all datums or of none.
        """
        loss = find_loss(request.loss_fn)
        if not request.data:
            raise field_error("data", "has no datum.")

        context = self._generator.limits.context
        vocab_size = self._generator.base.vocab_size

        def checked() -> list[Datum]:
            data = enumerate(request.data)
            return [checked_row(i, each, loss, context, vocab_size) for i, each in data]

        async with model.lock:
            self.find(model.id)
            rows = await run_in_threadpool(checked)
            backward = not request.forward_only
            total, logprobs, grads = await self._forward(model, rows, loss, backward)
            if grads is not None:
                await self._generator.result_of(partial(model.add, grads))
        return forward_output(logprobs, total)

    async def _forward(
        self, model: TrainedModel, rows: Sequence[Datum], loss: Loss, backward: bool
    ) -> tuple[float, list[np.ndarray], Grads | None]:
        """Compute as many passes as the rows need, and return their sum."""
        total = 0.0
        logprobs: dict[int, np.ndarray] = {}
        grads: Grads | None = None

        def compute_pass(numbers: Sequence[int]) -> None:
            nonlocal total, grads
            chosen = [rows[i] for i in numbers]
            value, by_row, more = self._trainer.run(model, chosen, loss, backward)
            total += value
            logprobs.update(zip(numbers, by_row, strict=True))
            if more is not None:
                grads = _added(grads, more)

        self.waiting += 1
        try:
            for numbers in split_passes(rows, model.most_inputs):
                await self._generator.result_of(partial(compute_pass, numbers))
                self.passes += 1
        finally:
            self.waiting -= 1
        return total, [logprobs[i] for i in range(len(rows))], grads

    async def update(self, model: TrainedModel, params: AdamBody) -> float:
        async with model.lock:
            self.find(model.id)
            return await self._generator.result_of(partial(self._trainer.update, model, params))

    async def pack(self, model: TrainedModel) -> Pack:
        """Return a copy of a model, whose lock the caller holds, as a pack."""
        self.find(model.id)
        return await self._generator.result_of(partial(self._trainer.pack, model))

    async def save(
        self,
        model: TrainedModel,
        kind: Kind,
        name: str,
        facts: Mapping[str, Any],
        overwrite: bool = False,
    ) -> Saved:
        """Save a model; one of ``weights`` has the state of its optimizer."""
        saved = new_saved(self._folder, model.id, kind, name, facts)

        def write() -> None:
            optimizer = self._trainer.state_of(model) if kind == "weights" else None
            save_model(saved, self._trainer.pack(model), optimizer, overwrite)

        async with model.lock:
            self.find(model.id)
            await self._generator.result_of(write)
        return saved

    async def load(self, model_id: str, session_id: str, saved: Saved, optimizer: bool) -> None:
        """Make a model of a saved one."""

        def open_saved() -> TrainedModel:
            state = optimizer_of(saved) if optimizer else None
            return self._trainer.of_pack(Pack.open(saved.folder), state)

        await self._add(model_id, session_id, open_saved)
