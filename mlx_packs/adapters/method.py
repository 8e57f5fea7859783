"""Trainable parameters of a base: their common interface, and the registry of methods.

A new method is a class here and its name in `config.choices.METHODS`.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import mlx.nn as nn
from mlx.utils import tree_flatten

from ..bases.geometry import Group
from ..bases.model import BaseModel
from ..config import choices
from ..config.choices import registered
from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from ..errors import PackError
from ..runtime import mx
from .dora import DoRA
from .for_merge import attach_for_merge
from .full import check_dense, unfreeze
from .initial_factors import orthonormal_factors, principal_factors
from .loftq import LoftQ
from .lora import attach
from .residual import ResidualMethod
from .spec import ModuleSpec, Specs, factor_shapes

Shape = tuple[int, ...]


class Trainable(Protocol):
    """Trainable parameters on a base, by the names that they have on disk.

    Attributes:
        method: name of the method that attached it.
        for_merge: the format of the merge that it is trained for, or none.
        model: the model of the base.
        specs: adapters by path; empty where none are attached.
        groups: projections that share one input, as probed.
        replaced: names and shapes of the base's tensors that a pack stores in full.
        notes: what a user should know of it.
    """

    method: str
    for_merge: str
    base: BaseModel
    model: nn.Module
    specs: Specs
    groups: list[Group]
    replaced: Mapping[str, Shape]
    notes: list[str]

    @property
    def details(self) -> str:
        """Return its kind and extent, for one line of output."""

    def tensors(self) -> dict[str, mx.array]:
        """Return the trainable parameters in float32, by name on disk."""

    def disabled(self) -> AbstractContextManager[None]:
        """Return a context in which the model computes what the base alone does."""

    def load(self, tensors: Mapping[str, mx.array], where: str) -> None:
        """Set all trainable parameters; nothing is changed if a tensor does not fit."""

    def recompute(self, policy: str) -> None:
        """Set the activation checkpointing policy: ``none``, ``selective`` or ``block``."""

    def at(self, share: float) -> None:
        """Take note of the share of a run that is done, in [0, 1), before each of its batches."""

    def swap(self, modules: list[tuple[str, nn.Module]]) -> None:
        """Put modules at their paths until `detach`."""

    def detach(self) -> None:
        """Put the base's own modules and arrays back; can be called twice."""

    def parameter_count(self) -> int:
        """Return the number of trainable parameters."""


class Method(Protocol):
    """A way to train a base; `config.choices.METHODS` has what is known of it without MLX."""

    def check(self, base: BaseModel, matmul_path: str) -> None:
        """Raise a PackError if this method cannot train a base."""

    def attach(
        self, base: BaseModel, lora: LoRAConfig, train: TrainConfig, matmul_path: str
    ) -> Trainable:
        """Make parameters of a base trainable; ``matmul_path`` is what frozen weights use."""

    def adapter_shapes(self, specs: Specs) -> list[Shape]:
        """Return the shapes of the trainable parameters of adapters, for an estimate of memory."""

    def kept_numbers(self, spec: ModuleSpec) -> int:
        """Return how many numbers per token an adapter keeps from the forward to the backward."""


class LoRA:
    """Low-rank adapters beside frozen weights: y = W x + (alpha / r) B A x."""

    def check(self, base: BaseModel, matmul_path: str) -> None:
        """Accept every base; `attach` checks what it targets."""

    def attach(
        self, base: BaseModel, lora: LoRAConfig, train: TrainConfig, matmul_path: str
    ) -> Trainable:
        """Attach fresh adapters, which change no output but by the rounding of ``--for-merge``."""
        if train.for_merge != "none":
            return attach_for_merge(base, lora, train, matmul_path)
        return attach(base, lora, None, matmul_path, train.seed, train.train_fp16_fallback)

    def adapter_shapes(self, specs: Specs) -> list[Shape]:
        """Return the shapes of A [in, r] and B [r, out] of every slice."""
        return factor_shapes(specs)

    def kept_numbers(self, spec: ModuleSpec) -> int:
        """Return the rank: x A is kept."""
        return spec.rank


class FullFineTuning:
    """The base's own weights, in float32."""

    def check(self, base: BaseModel, matmul_path: str) -> None:
        """Check that the weights of a base are dense, or are made so."""
        check_dense(base, matmul_path)

    def attach(
        self, base: BaseModel, lora: LoRAConfig, train: TrainConfig, matmul_path: str
    ) -> Trainable:
        """Make the weights of the last ``lora.num_layers`` blocks trainable, or all."""
        return unfreeze(base, lora.num_layers, matmul_path)

    def adapter_shapes(self, specs: Specs) -> list[Shape]:
        """Return none: there are no adapters."""
        return []

    def kept_numbers(self, spec: ModuleSpec) -> int:
        """Return 0: there are no adapters."""
        return 0


def trainable_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules with trainable parameters of their own, in the order of the model."""
    return [module for module in model.modules() if _has_trainable(module)]


def round_adapters(attached: Trainable, dtype: str) -> None:
    """Round every adapter to a dtype, so that a pack of that dtype loses nothing."""
    rounded = {n: t.astype(getattr(mx, dtype)) for n, t in attached.tensors().items()}
    for name, tensor in rounded.items():
        if not mx.isfinite(tensor).all().item():
            raise PackError(
                f"{name}: is too large for {dtype}. Pass --pack-dtype bfloat16.",
                "mismatch",
                "pack_dtype",
            )
    attached.load(rounded, f"--pack-dtype {dtype}")


def _has_trainable(module: nn.Module) -> bool:
    return any(
        isinstance(leaf, mx.array)
        for key, value in module.items()
        if not key.startswith("_") and key not in module._no_grad
        for _, leaf in tree_flatten(value, is_leaf=lambda v: isinstance(v, nn.Module))
    )


METHODS: dict[str, Method] = registered(
    choices.METHODS,
    {
        "lora": LoRA(),
        "dora": DoRA(),
        "pissa": ResidualMethod("pissa", principal_factors),
        "olora": ResidualMethod("olora", orthonormal_factors),
        "loftq": LoftQ(),
        "full": FullFineTuning(),
    },
)
