"""Modules that are trained in full beside the adapters of any method (``--modules-to-save``).

Each is replaced by a float32 copy, dequantized where it is quantized. A pack stores the copies
whole; PEFT's name for them is ``modules_to_save``.
"""

import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.nn as nn

from ..bases.geometry import select_saved
from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from ..errors import PackError
from ..nn.lora import is_switch_linear
from ..nn.quantized import QUANTIZED, bare_module, dense_module
from ..nn.tables_on_disk import read_tables
from ..nn.wrapped import FullCopy
from ..runtime import mx
from .spec import check_shapes
from .trainable import Trainable, TrainableWrapper, find_method

if TYPE_CHECKING:
    from ..bases.model import BaseModel


@dataclass(frozen=True)
class TrainedWeight:
    """A trainable weight: its module and name there, and a module with the base's value."""

    module: nn.Module
    key: str
    original: nn.Module

    @property
    def value(self) -> mx.array:
        return self.module[self.key]

    def own(self) -> mx.array:
        """Return the base's own value in float32, dequantized if it is quantized."""
        return _dense(self.original)[self.key].astype(mx.float32)


class WithSavedModules(TrainableWrapper):
    """Adapters and float32 copies of modules, trained together."""

    def __init__(self, adapters: Trainable, weights: Mapping[str, TrainedWeight]) -> None:
        super().__init__(adapters)
        self.replaced = {name: each.value.shape for name, each in weights.items()}
        self._weights = weights

    @property
    def details(self) -> str:
        paths = list(dict.fromkeys(name.rpartition(".")[0] for name in self._weights))
        names = ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in paths))
        return f"{self.adapters.details} · {len(paths)} modules in full ({names})"

    def tensors(self) -> dict[str, mx.array]:
        return self.adapters.tensors() | self._values()

    def _values(self) -> dict[str, mx.array]:
        return {name: each.value for name, each in self._weights.items()}

    def _set(self, values: Mapping[str, mx.array]) -> None:
        for name, each in self._weights.items():
            each.module[each.key] = values[name].astype(mx.float32)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        trained = self._values()
        try:
            self._set({name: each.own() for name, each in self._weights.items()})
            with self.adapters.disabled():
                yield
        finally:
            self._set(trained)

    @contextmanager
    def altered_b(self, change: Callable[[int, mx.array], mx.array]) -> Iterator[None]:
        """Return a context in which ``change`` replaces every B and every weight."""
        trained = self._values()
        numbers = itertools.count()

        try:
            self._set({name: change(next(numbers), w) for name, w in trained.items()})
            with self.adapters.altered_b(change):
                yield
        finally:
            self._set(trained)

    def load(self, tensors: Mapping[str, mx.array], where: str) -> None:
        present = {n: tensors[n].shape for n in self.replaced if n in tensors}
        check_shapes(self.replaced, present, where)
        self.adapters.load({n: t for n, t in tensors.items() if n not in present}, where)
        self._set(tensors)

    def parameter_count(self) -> int:
        """Return the number of trainable parameters; a tied table counts once."""
        return self.adapters.parameter_count() + sum(
            math.prod(shape) for shape in self.replaced.values()
        )


def attach_method(
    base: "BaseModel", lora: LoRAConfig, train: TrainConfig, matmul_path: str
) -> Trainable:
    """Attach what the method of a run trains, and the modules that it saves in full beside it."""
    read_tables(base.model, lora.modules_to_save)
    saved = [path for path, _ in select_saved(base.model, lora.modules_to_save)]
    trainable = find_method(train.method).attach(base, lora, train, matmul_path)
    if not saved:
        return trainable

    try:
        return WithSavedModules(trainable, _install(trainable, saved))
    except BaseException:
        trainable.detach()
        raise


def _install(trainable: Trainable, paths: Sequence[str]) -> dict[str, TrainedWeight]:
    """Put trainable float32 copies in the place of modules; return their weights by name."""
    present = dict(trainable.model.named_modules())
    copies = {}
    swapped = []
    shared = Counter(map(id, present.values()))

    for path in paths:
        original = bare_module(present.get(path))
        if original is None or is_switch_linear(original) or shared[id(present[path])] > 1:
            raise PackError(
                f"--modules-to-save: {path} cannot be trained in full next to adapters: it is a "
                "stack of experts, or is used at several places. Leave it out.",
                "unsupported",
                "modules_to_save",
            )

        dense, dtypes = _trainable_copy(original)
        copies |= {f"{path}.{key}": TrainedWeight(dense, key, original) for key in dtypes}
        narrow = {key: dtype for key, dtype in dtypes.items() if dtype != mx.float32}
        if narrow:
            dense = FullCopy(dense, narrow)
        swapped.append((path, dense))

    trainable.swap(swapped)
    mx.eval([each.value for each in copies.values()])
    trainable.model.train(trainable.model.training)  # new modules join the mode of the rest
    return copies


def _trainable_copy(original: nn.Module) -> tuple[nn.Module, dict[str, mx.Dtype]]:
    """Return a copy with trainable float32 weights, and the dtype of each in the base."""
    dense = copy.copy(_dense(original))
    dense._no_grad = set(dense._no_grad)  # a shallow copy shares it

    dtypes = {
        key: value.dtype
        for key, value in dense.items()
        if isinstance(value, mx.array)
        and not key.startswith("_")
        and mx.issubdtype(value.dtype, mx.floating)
    }

    for key in dtypes:
        dense[key] = dense[key].astype(mx.float32)
    dense.unfreeze(recurse=False, keys=list(dtypes))
    return dense, dtypes


def _dense(module: nn.Module) -> nn.Module:
    if isinstance(module, QUANTIZED):
        return dense_module(module)
    return module
