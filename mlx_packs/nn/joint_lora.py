"""Adapters of several packs in one model, which computes a batch of each of them at once.

A batch has the rows of the first pack, then those of the second, and so on. The frozen modules are
those of the packs' own models; only the adapters differ. Each pack has as many rows, and the
adapters are stacked for each step (`JointLoRA`).
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..ops.multi_lora import multi_lora_in_order
from .lora import GroupedLoRA, InputDropout


class JointLoRA(GroupedLoRA):
    """The adapters of a projection group in every pack; ``lora`` is one of theirs.

    Between `stack` and the end of a step it has A [P, D, R] and B [P, R, O] of each slice, with R
    the largest rank of P packs.
    """

    def __init__(self, lora: GroupedLoRA) -> None:
        nn.Module.__init__(self)
        self._adapted = lora._adapted
        self._kept = None
        self.dropout = InputDropout(0.0)
        self.lora_a = []
        self.lora_b = []
        self._scales = []

    def stack(self, packs: Sequence[GroupedLoRA]) -> None:
        """Take the adapters of packs as they are now, in the order of their rows."""
        self.clear()
        self._scales = []

        for i in range(len(self._adapted)):
            rank = max(pack.lora_a[i].shape[-1] for pack in packs)
            self.lora_a.append(mx.stack([_widened(pack.lora_a[i], rank, 1) for pack in packs]))
            self.lora_b.append(mx.stack([_widened(pack.lora_b[i], rank, 0) for pack in packs]))
            self._scales.append(mx.array([pack._scales[i] for pack in packs]))

    def clear(self) -> None:
        self.lora_a = []
        self.lora_b = []

    def project(self, x: mx.array, projections: Sequence[Any]) -> list[mx.array]:
        return self(x, [projection(x) for projection in projections])

    def __call__(self, x: mx.array, outputs: Sequence[mx.array]) -> list[mx.array]:
        """Return ``outputs`` [B, T, O_i], each row with the deltas of its own pack."""
        packs = self.lora_a[0].shape[0]
        adapted = [outputs[i] for i in self._adapted]

        def by_pack(y: mx.array) -> mx.array:
            return y.reshape(packs, -1, y.shape[-1])

        summed = multi_lora_in_order(
            by_pack(x), [by_pack(y) for y in adapted], self.lora_a, self.lora_b, self._scales
        )

        shaped = [y.reshape(output.shape) for y, output in zip(summed, adapted, strict=True)]
        return self._replaced(outputs, shaped)

    def fused(self, x: mx.array, output: mx.array, widths: Sequence[int]) -> mx.array:
        """Return the output [B, T, sum(widths)] of one projection of several slices, adapted."""
        ends = [sum(widths[: i + 1]) for i in range(len(widths) - 1)]
        return mx.concatenate(self(x, mx.split(output, ends, axis=-1)), axis=-1)


def joint_model(model: nn.Module) -> tuple[nn.Module, dict[int, nn.Module]]:
    """Return a model for several packs, made of the model of one, and its modules by theirs."""
    groups = [module for module in model.modules() if isinstance(module, GroupedLoRA)]
    copies: dict[int, nn.Module] = {id(group): JointLoRA(group) for group in groups}
    return copied(model, copies), copies


def copied(model: nn.Module, copies: dict[int, nn.Module] | None = None) -> nn.Module:
    """Return another model of the same modules and arrays; those with modules in them are copies.

    ``copies`` has what takes the place of some, by their identity, and gets all others.
    """
    if copies is None:
        copies = {}
    return _copied(model, copies)


def _copied(value: Any, copies: dict[int, nn.Module]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_copied(each, copies) for each in value)
    if not isinstance(value, nn.Module):
        return value
    if id(value) in copies:
        return copies[id(value)]
    hides_modules = any(isinstance(each, nn.Module) for each in vars(value).values())
    if not value.children() and not hides_modules:
        return value

    other = type(value).__new__(type(value))
    copies[id(value)] = other

    vars(other).update({name: _copied(each, copies) for name, each in vars(value).items()})
    dict.update(other, {name: _copied(each, copies) for name, each in value.items()})
    return other


def _widened(factor: mx.array, rank: int, axis: int) -> mx.array:
    missing = rank - factor.shape[axis]
    if not missing:
        return factor

    widths = [(0, 0)] * factor.ndim
    widths[axis] = (0, missing)
    return mx.pad(factor, widths)
