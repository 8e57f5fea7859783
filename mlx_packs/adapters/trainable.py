"""Trainable parameters on a base, and the methods that make them.

A new method is one class and its entry in `config.choices.METHODS`, which names the class.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import mlx.nn as nn
from mlx.utils import tree_flatten

from ..bases.geometry import Group
from ..config.choices import METHODS
from ..errors import PackError
from ..runtime import mx
from .spec import ModuleSpec, Specs

if TYPE_CHECKING:
    from ..bases.model import BaseModel
    from ..config.lora import LoRAConfig
    from ..config.schema import TrainConfig


Shape = tuple[int, ...]


class Trainable(Protocol):
    """Trainable parameters on a base, by the names that they have on disk.

    Attributes:
        method: name of the method that attached it.
        model: the model of the base.
        specs: adapters by path; empty where none are attached.
        groups: projections that share one input, as probed.
        replaced: names and shapes of the base's tensors that a pack stores in full.
        notes: what a user should know of it.
    """

    method: str
    base: "BaseModel"
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

    def swap(self, modules: list[tuple[str, nn.Module]]) -> None:
        """Put modules at their paths until `detach`."""

    def detach(self) -> None:
        """Put the base's own modules and arrays back; can be called twice."""

    def parameter_count(self) -> int:
        """Return the number of trainable parameters."""


class TrainableWrapper:
    """A `Trainable` around another one, which does what a subclass does not define.

    Attributes:
        adapters: the other one.
    """

    def __init__(self, adapters: Trainable) -> None:
        self.adapters = adapters

    def __getattr__(self, name: str) -> Any:
        return getattr(self.adapters, name)


def trainable_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules with trainable parameters of their own, in the order of the model."""
    return [module for module in model.modules() if _has_trainable(module)]


def compiled(model: nn.Module, function: Callable) -> Callable:
    """Compile a function of a model whose trainable parameters change between calls.

    It stays as it is if blocks of the model are on disk: what a trace reads would be constants of
    the compiled function, and all blocks would be in memory.
    """
    if hasattr(model, "blocks_on_disk"):
        return function
    return mx.compile(function, inputs=[module.state for module in trainable_modules(model)])


def _has_trainable(module: nn.Module) -> bool:
    return any(
        isinstance(leaf, mx.array)
        for key, value in module.items()
        if not key.startswith("_") and key not in module._no_grad
        for _, leaf in tree_flatten(value, is_leaf=lambda v: isinstance(v, nn.Module))
    )


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


class Method(Protocol):
    """A way to train a base; `config.choices.METHODS` has what is known of it without MLX."""

    def check(self, base: "BaseModel", matmul_path: str) -> None:
        """Raise a PackError if this method cannot train a base."""

    def attach(
        self, base: "BaseModel", lora: "LoRAConfig", train: "TrainConfig", matmul_path: str
    ) -> Trainable:
        """Make parameters of a base trainable; ``matmul_path`` is what frozen weights use."""

    def adapter_shapes(self, specs: Specs) -> list[Shape]:
        """Return the shapes of the trainable parameters of adapters, for an estimate of memory."""

    def kept_numbers(self, spec: ModuleSpec) -> int:
        """Return how many numbers per token an adapter keeps from the forward to the backward."""


def find_method(name: str) -> Method:
    """Return the method of a name; its module is imported now."""
    return METHODS.load(name, Method)()
