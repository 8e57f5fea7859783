"""GroupedLoRA: the adapters of one projection group, and the module that carries a group of one."""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from ..ops.grouped_lora import grouped_lora, shared_input, with_deltas
from ..runtime import on_cpu


@dataclass(frozen=True)
class AdapterShape:
    """The adapter of one slice, or of that slice in each expert of a mixture."""

    out_features: int
    rank: int
    scale: float  # alpha / rank
    experts: int | None = None

    @property
    def stack(self) -> tuple[int, ...]:
        """The axes before those of one adapter."""
        return () if self.experts is None else (self.experts,)


class InputDropout:
    """Dropout whose mask can be drawn again: with a ``key``, every call gives the same mask.

    A recomputed block runs twice, and both runs must drop the same inputs (nn/recompute.py).
    """

    def __init__(self, p: float) -> None:
        self.p = p
        self.key: mx.array | None = None

    def __call__(self, x: mx.array) -> mx.array:
        """Return x with a share p of its numbers at zero and the others scaled by 1 / (1 - p)."""
        mask = mx.random.bernoulli(1 - self.p, x.shape, key=self.key)
        return mx.where(mask, x * (1 / (1 - self.p)), 0)


class GroupedLoRA(nn.Module):
    """Adapters of the projections that read one input; some of them may have none.

    Args:
        in_features: D of the shared input.
        shapes: for each projection in order, its adapter or None.
        dropout: share of the input dropped in training, one mask for the whole group.
        keys: a random key for each projection; A is uniform in ±1/sqrt(D) and B is zero, so that
            attaching changes no output (as in mlx-lm and the paper).
    """

    def __init__(
        self,
        in_features: int,
        shapes: Sequence[AdapterShape | None],
        dropout: float,
        keys: Sequence[mx.array],
    ) -> None:
        super().__init__()
        bound = 1 / math.sqrt(in_features)
        adapted = [(i, s) for i, s in enumerate(shapes) if s is not None]
        self._slots = [i for i, _ in adapted]
        self._scales = [s.scale for _, s in adapted]
        self.dropout = InputDropout(dropout)
        self.lora_a = [
            mx.random.uniform(-bound, bound, (*s.stack, in_features, s.rank), key=keys[i])
            for i, s in adapted
        ]
        self.lora_b = [mx.zeros((*s.stack, s.rank, s.out_features)) for _, s in adapted]

    def project(
        self, x: mx.array, projections: Sequence[Callable[[mx.array], mx.array]]
    ) -> list[mx.array]:
        """Return what all projections make of x [..., D], [..., O_i] each, with their deltas."""
        if on_cpu() or not self.training or self.dropout.p:
            return self(x, [projection(x) for projection in projections])
        x, hidden = shared_input(x, self.lora_a)
        outputs = [projection(x) for projection in projections]
        adapted = [outputs[i] for i in self._slots]
        return self._replaced(outputs, with_deltas(adapted, hidden, self.lora_b, self._scales))

    def __call__(self, x: mx.array, outputs: Sequence[mx.array]) -> list[mx.array]:
        """Return the outputs of all projections, [..., O_i] each, with the deltas of adapted ones."""
        if self.training and self.dropout.p:
            x = self.dropout(x)
        adapted = [outputs[i] for i in self._slots]
        summed = grouped_lora(x, adapted, self.lora_a, self.lora_b, self._scales)
        return self._replaced(outputs, summed)

    def _replaced(self, outputs: Sequence[mx.array], summed: Sequence[mx.array]) -> list[mx.array]:
        """Return all outputs, those of adapted projections replaced."""
        result = list(outputs)
        for i, y in zip(self._slots, summed, strict=True):
            result[i] = y
        return result

    def fused(self, x: mx.array, output: mx.array, widths: Sequence[int]) -> mx.array:
        """Return the same for the output [..., sum(widths)] of one projection of several slices."""
        if self.training and self.dropout.p:
            x = self.dropout(x)
        empty_a = mx.zeros((x.shape[-1], 0))
        a, b, scales = [], [], []
        for i, width in enumerate(widths):
            at = self._slots.index(i) if i in self._slots else None
            a.append(empty_a if at is None else self.lora_a[at])
            b.append(mx.zeros((0, width)) if at is None else self.lora_b[at])
            scales.append(0.0 if at is None else self._scales[at])
        return grouped_lora(x, [output], a, b, scales)[0]

    def of_experts(
        self, x: mx.array, output: mx.array, indices: mx.array, sorted_indices: bool
    ) -> mx.array:
        """Return the same for experts: each row of x [..., 1, D] by the adapter of its index."""
        if not self._slots:
            return output
        if self.training and self.dropout.p:
            x = self.dropout(x)
        chosen = {"rhs_indices": indices, "sorted_indices": sorted_indices}
        hidden = mx.gather_mm(x, self.lora_a[0].astype(x.dtype), **chosen)  # [..., 1, R]
        hidden = (self._scales[0] * hidden).astype(output.dtype)
        return output + mx.gather_mm(hidden, self.lora_b[0].astype(output.dtype), **chosen)


class AdaptedLinear(nn.Module):
    """A frozen linear with adapters on slices of its output: one slice, or those of a fused one.

    A fused linear that splits its output itself (Apple's foundation model) gives a list of slices.
    """

    def __init__(self, linear: nn.Module, lora: GroupedLoRA, widths: Sequence[int]) -> None:
        super().__init__()
        self.linear = linear
        self.lora = lora
        self._widths = tuple(widths)

    def __call__(self, x: mx.array) -> mx.array | list[mx.array]:
        """Map x [..., D] to [..., O], or to its slices."""
        output = self.linear(x)
        if isinstance(output, (list, tuple)):
            return self.lora(x, output)
        return self.lora.fused(x, output, self._widths)


def low_rank_delta(lora_a: mx.array, lora_b: mx.array, scale: float) -> mx.array:
    """Return the delta of an adapter: scale * (A B)^T, [O, D] (or [E, O, D]) in float32."""
    product = lora_a.astype(mx.float32) @ lora_b.astype(mx.float32)
    return scale * product.swapaxes(-1, -2)


def adapter_key(seed: int, path: str) -> mx.array:
    """Return a random key for the adapter at ``path``; it depends on no other adapter."""
    return mx.random.key((seed << 32) ^ zlib.crc32(path.encode()))
