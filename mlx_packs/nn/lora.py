"""GroupedLoRA: the adapters of one projection group, the module for one projection, and experts."""

import math
import operator
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn

from ..ops.grouped_lora import grouped_lora, shared_input, with_deltas
from ..ops.lora_qmv import MAX_ROWS, AffineWeight, Format, Launches, LowRank, Norm, prepare
from ..ops.profile import profile

T = TypeVar("T")


@dataclass(frozen=True)
class AdapterShape:
    """The adapter of one slice, or of that slice in each expert of a mixture."""

    out_features: int
    rank: int
    scale: float  # alpha / rank
    experts: int | None = None

    @property
    def stack(self) -> tuple[int, ...]:
        """The axes before the axes of one adapter."""
        if self.experts is None:
            return ()
        return (self.experts,)


class InputDropout:
    """Dropout. With a ``key`` all calls drop the same, as both runs of a recomputed block must."""

    def __init__(self, p: float) -> None:
        self.p = p
        self.key: mx.array | None = None

    def __call__(self, x: mx.array) -> mx.array:
        mask = mx.random.bernoulli(1 - self.p, x.shape, key=self.key)
        return mx.where(mask, x * (1 / (1 - self.p)), 0)


@dataclass
class _Kept:
    """Values that a group computes once for a text, from these factors."""

    masters: Sequence[mx.array] = ()
    values: dict[tuple, Any] = field(default_factory=dict)


class GroupedLoRA(nn.Module):
    """Adapters A [D, R] and B [R, O] of some of the projections that read one input.

    ``adapted`` are the places of these projections. One dropout mask serves the group.
    """

    def __init__(
        self,
        adapted: Sequence[int],
        scales: Sequence[float],
        lora_a: Sequence[mx.array],
        lora_b: Sequence[mx.array],
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self._adapted = list(adapted)
        self._kept: _Kept | None = None
        self._scales = list(scales)
        self.dropout = InputDropout(dropout)
        self.lora_a = list(lora_a)
        self.lora_b = list(lora_b)

    @classmethod
    def fresh(
        cls,
        in_features: int,
        shapes: Sequence[AdapterShape | None],
        dropout: float,
        keys: Sequence[mx.array],
    ) -> "GroupedLoRA":
        """Return new adapters of these shapes; a projection without one has None.

        A is uniform in ±1/sqrt(D), by a random key for each projection, and B is zero, so that
        attaching changes no output (as in mlx-lm and the paper).
        """
        bound = 1 / math.sqrt(in_features)
        adapted = {i: s for i, s in enumerate(shapes) if s is not None}
        lora_a = [
            mx.random.uniform(-bound, bound, (*s.stack, in_features, s.rank), key=keys[i])
            for i, s in adapted.items()
        ]
        lora_b = [mx.zeros((*s.stack, s.rank, s.out_features)) for s in adapted.values()]
        return cls(adapted, [s.scale for s in adapted.values()], lora_a, lora_b, dropout)

    def keep_casts(self) -> None:
        """Cast factors once from now on, as inside of `factors_cast`."""
        if profile().dtype is None:
            self._kept = _Kept()

    def multiplied(self) -> tuple[list[mx.array], list[mx.array]]:
        """Return A and B of each adapter as inputs are multiplied by them."""
        return self.lora_a, self.lora_b

    def project(
        self, x: mx.array, projections: Sequence[Callable[[mx.array], mx.array]]
    ) -> list[mx.array]:
        """Return all outputs of x [..., D], [..., O_i] each, with their deltas."""
        if (decoded := self.decoded(x, projections)) is not None:
            return decoded
        if not profile().saves_passes or not self.training or self.dropout.p:
            return self(x, [projection(x) for projection in projections])

        a, b = self.multiplied()
        x, hidden = shared_input(x, a)
        outputs = [projection(x) for projection in projections]
        adapted = [outputs[i] for i in self._adapted]
        return self._replaced(outputs, with_deltas(adapted, hidden, b, self._scales))

    def __call__(self, x: mx.array, outputs: Sequence[mx.array]) -> list[mx.array]:
        """Return ``outputs`` [..., O_i], with the deltas of adapted projections."""
        x = self._dropped(x)
        adapted = [outputs[i] for i in self._adapted]
        summed = grouped_lora(x, adapted, *self.factors(x.dtype))
        return self._replaced(outputs, summed)

    def _replaced(self, outputs: Sequence[mx.array], summed: Sequence[mx.array]) -> list[mx.array]:
        result = list(outputs)
        for i, y in zip(self._adapted, summed, strict=True):
            result[i] = y
        return result

    def decoded(
        self,
        x: mx.array,
        projections: Sequence[Callable[[mx.array], mx.array]],
        norms: Sequence[nn.Module | None] = (),
        gated: bool = False,
    ) -> list[mx.array] | None:
        """Return `project` of few rows by a kernel, on a GPU inside of `factors_cast`; else None.

        With ``norms`` the RMSNorm of each output's heads follows, with ``gated`` only
        silu(y[0]) * y[1] is returned. Weights must be affine.
        """
        if self._kept is None or self.training or x.size > MAX_ROWS * x.shape[-1]:
            return None

        key = ("launches", x.shape, x.dtype, bool(norms), gated)
        launches = self._once(key, lambda: self._launches(x, projections, norms, gated))
        if launches is None:
            return None
        return launches(x)

    def _launches(
        self,
        x: mx.array,
        projections: Sequence[Callable],
        norms: Sequence[nn.Module | None],
        gated: bool,
    ) -> Launches | None:
        form = common_format(projections)
        if not self._adapted or form is None:
            return None
        if getattr(projections[0], "is_on_disk", False):  # what is prepared would stay in memory
            return None
        if any(n is not None and type(n) is not nn.RMSNorm for n in norms):
            return None

        weights = [AffineWeight(m.weight, m.scales, m.biases) for m in projections]
        of_heads = [None if n is None else Norm(n.weight, n.eps) for n in norms]
        slices = self._of_slices([(None, None, 0.0)] * len(projections))
        factors = LowRank.of(*zip(*slices, strict=True), x.dtype)
        return prepare(x.shape, x.dtype, weights, form, factors, of_heads, gated)

    def factors(self, dtype: mx.Dtype) -> tuple[list[mx.array], list[mx.array], list[float]]:
        """Return A's, B's and scales; inside of `factors_cast` in a dtype, with B's scaled."""
        all_a, all_b = self.multiplied()
        if self._kept is None or self.training:
            return all_a, all_b, self._scales

        def cast() -> tuple[list[mx.array], list[mx.array], list[float]]:
            pairs = zip(all_b, self._scales, strict=True)
            scaled = [(b if s == 1 else b * s).astype(dtype) for b, s in pairs]
            return [a.astype(dtype) for a in all_a], scaled, [1.0] * len(scaled)

        return self._once(("factors", dtype), cast)

    def _once(self, key: tuple, compute: Callable[[], T]) -> T:
        """Return a result that is computed once inside of `factors_cast` for the same factors."""
        kept = self._kept
        masters = [*self.lora_a, *self.lora_b]
        if len(masters) != len(kept.masters) or not all(map(operator.is_, masters, kept.masters)):
            kept.masters = masters
            kept.values = {}

        if key not in kept.values:
            kept.values[key] = compute()
        return kept.values[key]

    def fused(self, x: mx.array, output: mx.array, widths: Sequence[int]) -> mx.array:
        """Return the output [..., sum(widths)] of one projection of several slices, with deltas."""
        x = self._dropped(x)
        empty_a = mx.zeros((x.shape[-1], 0))
        slices = self._of_slices([(empty_a, mx.zeros((0, width)), 0.0) for width in widths])
        return grouped_lora(x, [output], *map(list, zip(*slices, strict=True)))[0]

    def _of_slices(self, absent: Sequence[tuple]) -> list[tuple]:
        """Return A, B and scale of every slice; a slice without an adapter has ``absent``."""
        slices = list(absent)
        for i, *factors in zip(self._adapted, *self.multiplied(), self._scales, strict=True):
            slices[i] = tuple(factors)
        return slices

    def _dropped(self, x: mx.array) -> mx.array:
        if self.training and self.dropout.p:
            return self.dropout(x)
        return x

    def of_experts(
        self, x: mx.array, output: mx.array, indices: mx.array, sorted_indices: bool
    ) -> mx.array:
        """Return the output of experts: each row of x [..., 1, D] by the adapter of its index."""
        if not self._adapted:
            return output
        x = self._dropped(x)

        selection = {"rhs_indices": indices, "sorted_indices": sorted_indices}
        (a,), (b,), (scale,) = self.factors(x.dtype)
        hidden = mx.gather_mm(x, a.astype(x.dtype), **selection)  # [..., 1, R]
        if scale != 1:
            hidden = (scale * hidden).astype(output.dtype)
        return output + mx.gather_mm(
            hidden.astype(output.dtype), b.astype(output.dtype), **selection
        )


@contextmanager
def factors_cast(model: nn.Module) -> Iterator[None]:
    """Cast factors once, not at each call, while nothing is trained; replaced ones are cast again.

    On a CPU activations are float32 as they are.
    """
    groups = [m for m in model.modules() if isinstance(m, GroupedLoRA)]
    for group in groups:
        group.keep_casts()

    try:
        yield
    finally:
        for group in groups:
            group._kept = None


def common_format(projections: Sequence[Callable]) -> Format | None:
    """Return the common format of projections that only multiply; None if they differ."""
    forms = set()
    for p in projections:
        if type(p) is not nn.QuantizedLinear or p.mode != "affine" or "bias" in p:
            return None
        forms.add(Format(p.group_size, p.bits))

    return forms.pop() if len(forms) == 1 else None


class AdaptedLinear(nn.Module):
    """A frozen linear with adapters on slices of its output: one slice, or several of a fused one.

    A fused linear that splits its output itself (Apple's foundation model) gives a list of slices.
    """

    def __init__(self, linear: nn.Module, lora: GroupedLoRA, widths: Sequence[int]) -> None:
        super().__init__()
        self.linear = linear
        self.lora = lora
        self._widths = tuple(widths)

    def __call__(self, x: mx.array) -> mx.array | list[mx.array]:
        alone = len(self._widths) == 1
        if alone and (decoded := self.lora.decoded(x, [self.linear])) is not None:
            return decoded[0]

        output = self.linear(x)
        if isinstance(output, (list, tuple)):
            return self.lora(x, output)
        if alone:
            return self.lora(x, [output])[0]
        return self.lora.fused(x, output, self._widths)


def low_rank_delta(lora_a: mx.array, lora_b: mx.array, scale: float) -> mx.array:
    """Return the delta of an adapter: scale * (A B)^T, [O, D] (or [E, O, D]) in float32."""
    product = lora_a.astype(mx.float32) @ lora_b.astype(mx.float32)
    return scale * product.swapaxes(-1, -2)


def adapter_key(seed: int, path: str) -> mx.array:
    """Return a random key for the adapter at ``path``; it depends on no other adapter."""
    return mx.random.key((seed << 32) ^ zlib.crc32(path.encode()))


_SWITCH_LAYERS = ("mlx_lm.models.switch_layers", "mlx_vlm.models.switch_layers")
_SWITCH_LINEARS = ("SwitchLinear", "QuantizedSwitchLinear")


def is_switch_linear(module: nn.Module) -> bool:
    """Return whether a module is a stack of experts, dense or quantized."""
    kind = type(module)
    return kind.__module__ in _SWITCH_LAYERS and kind.__name__ in _SWITCH_LINEARS


class AdaptedSwitchLinear(nn.Module):
    """A frozen switch linear with an adapter for each expert; called as the switch linear is.

    The weight is [E, O, D], dense or quantized. The adapter has A [E, D, R] and B [E, R, O], and a
    row meets the factors of its own expert only.
    """

    def __init__(self, linear: nn.Module, lora: GroupedLoRA) -> None:
        super().__init__()
        self.linear = linear
        self.lora = lora

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Map x [..., 1, D] and the expert of each row, [...], to [..., 1, O]."""
        output = self.linear(x, indices, sorted_indices=sorted_indices)
        return self.lora.of_experts(x, output, indices, sorted_indices)


class EmbeddingLoRA(GroupedLoRA):
    """The adapter of one table [V, D]: A [V, R] begins at zero and B [R, D] normal, as in PEFT."""

    def __init__(self, vocab_size: int, width: int, rank: int, scale: float, key: mx.array) -> None:
        lora_b = mx.random.normal((rank, width), key=key)
        super().__init__([0], [scale], [mx.zeros((vocab_size, rank))], [lora_b])

    def rows(self, tokens: mx.array) -> mx.array:
        """Return what is added to the rows of tokens [...], [..., D] in float32."""
        return self._scales[0] * (self.lora_a[0][tokens] @ self.lora_b[0])

    def logits(self, x: mx.array) -> mx.array:
        """Return what is added to the product of x [..., D] with the table, [..., V]."""
        a = self.lora_a[0]
        b = self._scales[0] * self.lora_b[0]
        return (x @ b.T.astype(x.dtype)) @ a.T.astype(x.dtype)


class AdaptedEmbedding(nn.Module):
    """A frozen embedding [V, D] with an adapter on its table: y = E[x] + s A[x] B.

    No dropout acts on it, as in PEFT.

    With ``head`` the adapter acts on the output too, where the table is the head: as in mlx-lm,
    and as one merged table does. PEFT's acts on the input alone, unless its config has
    ``ensure_weight_tying``.
    """

    def __init__(self, embedding: nn.Module, lora: EmbeddingLoRA, head: bool) -> None:
        super().__init__()
        self.embedding = embedding
        self.lora = lora
        self._head = head

    def __call__(self, tokens: mx.array) -> mx.array:
        rows = self.embedding(tokens)
        return rows + self.lora.rows(tokens).astype(rows.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        y = self.embedding.as_linear(x)
        if self._head:
            y = y + self.lora.logits(x).astype(y.dtype)
        return y
