"""Embeddings and heads in files, of which each use reads the rows that it needs.

An embedding reads the rows of its tokens. A loss reads a head in the slices of the vocabulary in
which it computes the logits (ops/linear_cross_entropy.py); logits of all tokens read all of it.
"""

import copy
import functools
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .frozen_weight import FROZEN, FloatingEmbedding, FrozenWeight, Product, frozen_weight

EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding, FloatingEmbedding)
KINDS = (*EMBEDDINGS, nn.Linear, nn.QuantizedLinear)  # what can be on disk: exactly these classes


class TableOnDisk(nn.Module):
    """What a module on disk inherits from, before the class that it has in memory.

    Its arrays have their shapes and dtypes, and no values.
    """

    in_memory: type[nn.Module]
    rows_on_disk: Any  # offload.tables.StoredTable

    def with_arrays(self, arrays: dict[str, mx.array]) -> Any:
        """Return the module as it is in memory, with some rows."""
        part = copy.copy(self)
        part.__class__ = self.in_memory
        dict.update(part, arrays)
        return part

    def between(self, start: int, stop: int) -> Any:
        return self.with_arrays(self.rows_on_disk.between(start, stop))

    def whole(self) -> Any:
        return self.between(0, self.weight.shape[0])

    def read(self) -> None:
        """Read all rows, which are in memory from now on."""
        arrays = self.rows_on_disk.between(0, self.weight.shape[0])
        mx.eval(arrays)
        dict.update(self, arrays)
        self.__class__ = self.in_memory

    def __call__(self, x: mx.array) -> mx.array:
        if not issubclass(self.in_memory, EMBEDDINGS):
            return self.whole()(x)

        tokens, places = np.unique(np.array(x), return_inverse=True)
        part = self.with_arrays(self.rows_on_disk.at(tokens))
        return part(mx.array(places.reshape(x.shape).astype(np.uint32)))

    def as_linear(self, x: mx.array) -> mx.array:
        return self.whole().as_linear(x)


class WeightOnDisk(FrozenWeight):
    """The weight of a `TableOnDisk`."""

    def __init__(self, module: TableOnDisk) -> None:
        super().__init__(module)
        self._hollow = frozen_weight(module.with_arrays({}))
        self.bits = self._hollow.bits
        self.group_size = self._hollow.group_size
        self.mode = self._hollow.mode

    @property
    def shape(self) -> tuple[int, int]:
        return self._hollow.shape

    @property
    def dtype(self) -> mx.Dtype:
        return self._hollow.dtype

    def check(self) -> None:
        self._hollow.check()

    def dense(self) -> mx.array:
        return frozen_weight(self.module.whole()).dense()

    def rows(self, at: slice | mx.array) -> mx.array:
        if isinstance(at, slice):
            return frozen_weight(self.module.between(at.start, at.stop)).dense()

        part = self.module.with_arrays(self.module.rows_on_disk.at(np.array(at)))
        return frozen_weight(part).rows(mx.arange(at.size))

    def product(self, x: mx.array) -> mx.array:
        return frozen_weight(self.module.whole()).product(x)

    def transient_product(self, x: mx.array) -> mx.array:
        return frozen_weight(self.module.whole()).transient_product(x)

    def slice_products(self, start: int, stop: int) -> tuple[Product, Product]:
        part = self.module.between(start, stop)
        return frozen_weight(part).slice_products(0, stop - start)

    def dense_slice_products(self, start: int, stop: int) -> tuple[Product, Product]:
        part = self.module.between(start, stop)
        return frozen_weight(part).dense_slice_products(0, stop - start)

    def first_rows(self, count: int) -> nn.Module:
        return self.module.between(0, count)


FROZEN[TableOnDisk] = WeightOnDisk


@functools.cache
def _on_disk(kind: type[nn.Module]) -> type[nn.Module]:
    namespace = {"in_memory": kind, "__module__": kind.__module__}
    return type(kind.__name__, (TableOnDisk, kind), namespace)


def put_table_on_disk(module: nn.Module, rows: Any) -> None:
    """Let a module of one of `KINDS` read its rows; whoever holds it sees that."""
    module.__class__ = _on_disk(type(module))
    module.rows_on_disk = rows


def kind_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module; of one on disk that which it has in memory."""
    return module.in_memory if isinstance(module, TableOnDisk) else type(module)


def read_tables(model: nn.Module, paths: Iterable[str]) -> None:
    """Read those modules on disk into memory whose paths, or ends of paths, are given."""
    names = tuple(paths)
    for path, module in model.named_modules():
        if isinstance(module, TableOnDisk) and f".{path}".endswith(tuple(f".{n}" for n in names)):
            module.read()
