"""A stack of a base's own projections: embedding rows, square projections in a row, the head.

No attention, feed-forward, norm, residual or position: no token sees another. The modules are the
base's own objects under its own paths, so that adapters on the stack are adapters of the base.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from .frozen_blocks import FrozenBlock, Injection


class _Part(nn.Module):
    """A node in the tree of paths."""


class _NoTable(nn.Module):
    """Replaces an embedding table that is not in memory; its rows are injected as states."""

    def __call__(self, tokens: mx.array) -> mx.array:
        """Raise: without injected rows there is nothing to return."""
        raise ValueError("rows of the embedding table must be injected: it is not in memory")


class ProjectionStack(nn.Module):
    """Embedding rows, square projections one after the other, and the head.

    Semantics: x = embedding[tokens]; for P in projections: x = P(x); logits = head(x)
    """

    def __init__(
        self,
        blocks: Sequence[str],  # paths of all, with a projection in the stack or without
        projections: Sequence[tuple[str, nn.Module]],  # path and module, in the order of blocks
        embedding: tuple[str, nn.Module] | None,  # None where its rows are injected instead
        head: tuple[str, nn.Module] | None,  # None where it is the table
    ) -> None:
        super().__init__()
        modules = [*projections, *(pair for pair in (embedding, head) if pair is not None)]
        empty = [
            (block, _Part())
            for block in blocks
            if not any(path.startswith(f"{block}.") for path, _ in modules)
        ]
        for name, child in tree_unflatten([*modules, *empty]).items():
            self[name] = _as_modules(child)
        self._blocks = tuple(blocks)
        self._projections = tuple(path for path, _ in projections)
        self._embedding = embedding and embedding[0]
        self._head = head and head[0]
        if embedding is None:
            self["table"] = FrozenBlock(_NoTable(), Injection(), is_last=True)

    @property
    def layers(self) -> list[nn.Module]:
        """The blocks, as models of mlx-lm have them."""
        return [self.at(path) for path in self._blocks]

    def at(self, path: str) -> nn.Module:
        """Return the module that is at a path now."""
        node = self
        for part in path.split("."):
            node = node[int(part)] if isinstance(node, list) else node[part]
        return node

    def hidden(self, tokens: mx.array, cache: object = None) -> mx.array:
        """Map tokens [B, T] to states [B, T, D]; packed examples need no mask here."""
        x = self.at(self._embedding)(tokens) if self._embedding else self["table"](tokens)
        for path in self._projections:
            x = self.at(path)(x)
        return x

    @property
    def head(self) -> nn.Module:
        """The linear that makes logits, or the table that does where they are tied."""
        return self.at(self._head or self._embedding)

    def logits(self, states: mx.array) -> mx.array:
        """Map states [..., D] to [..., V]."""
        head = self.head
        return head(states) if self._head else head.as_linear(states)

    def __call__(self, tokens: mx.array, cache: object = None) -> mx.array:
        """Map tokens [B, T] to logits [B, T, V]."""
        return self.logits(self.hidden(tokens, cache))


def _as_modules(node: Any) -> nn.Module | list:
    """Return a tree of dicts, lists and modules as modules."""
    if isinstance(node, nn.Module):
        return node
    if isinstance(node, list):
        return [_as_modules(child) for child in node]
    part = _Part()
    for name, child in node.items():
        part[name] = _as_modules(child)
    return part
