"""Adapters that are trained on the grid of a quantized merge (``--for-merge``).

In the last fifth of training the rounding of `packs merge --requantize FORMAT` is in every forward
pass. adapters/merged.py applies a pack that was trained so.

Straight-through estimator: https://arxiv.org/abs/1308.3432. Of a weight with low-rank adapters:
LR-QAT, https://arxiv.org/abs/2406.06385, which learns the scales too; here they are the format's.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import mlx.nn as nn

from ..adapters.attach import attach, install
from ..adapters.lora import Attached
from ..adapters.merged import Grid, Rounding, compute_dtype, grid_of, rounded_module
from ..adapters.spec import ModuleSpec
from ..adapters.tensors import AdapterPlace
from ..bases.quantization import QuantizeOptions, format_for
from ..bases.weight_formats import MLXFormat, named_format
from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from ..errors import PackError
from ..nn.frozen_weight import frozen_weight
from ..nn.lora import AdaptedLinear, GroupedLoRA, low_rank_delta
from ..nn.quantized import PATHS, QUANTIZED, DenseLinear, is_plain_linear, stored_weight
from ..nn.wrapped import Hidden
from ..objectives.causal_lm import HeadOf
from ..ops.grouped_lora import grouped_lora
from ..ops.linear_cross_entropy import FrozenHead
from ..ops.lora_qmv import MAX_ROWS
from ..ops.profile import profile
from ..runtime import mx

if TYPE_CHECKING:
    from ..bases.model import BaseModel
    from ..memory.headers import Headers
    from ..memory.planned_adapters import PlannedAdapters

Arrays = Sequence[mx.array]
Modules = Mapping[str, tuple[int, int]]  # path -> (out, in)

# Share of a run before it rounds. Deltas smaller than a quantization step are rounded away: runs
# that rounded earlier were behind (benchmarks/guides.md).
ROUNDED_FROM = 0.8

# Bytes in flight for each weight that is rounded, of a quantized and of a dense base. Read off
# peaks on a CPU; a GPU in half precision has fewer.
_BYTES = {True: 16, False: 28}


@dataclass(frozen=True)
class QuantizedSum:
    """A frozen weight W [O, D] that is quantized together with what its adapters add.

    Attributes:
        linear: the frozen linear.
        dtype: of W in the checkpoint, and of the sum when it is quantized.
        quantize: a dense weight [O, D] to a linear without bias, lazily.
        slices: the outputs of each slice, and the index of its adapter in the group, if it has one.
    """

    linear: nn.Module
    dtype: mx.Dtype
    quantize: Callable[[mx.array], nn.Module]
    slices: tuple[tuple[int, int | None], ...]

    @property
    def adapters(self) -> list[int]:
        """The indices of its adapters in the group."""
        return [i for _, i in self.slices if i is not None]

    def module(self, lora_a: Arrays, lora_b: Arrays, after: Arrays = ()) -> nn.Module:
        """Return the linear of Q(W + B A), which is not computed before ``after``.

        ``lora_a`` has A [D, R] of each of `adapters`, ``lora_b`` B [R, O] with its scale.
        """
        weight = stored_weight(self.linear, self.dtype, after)
        if after:
            lora_a = mx.depends(list(lora_a), list(after))
        pairs = zip(lora_a, lora_b, strict=True)
        deltas = []
        for width, i in self.slices:
            if i is None:
                deltas.append(mx.zeros((width, weight.shape[1])))
            else:
                deltas.append(low_rank_delta(*next(pairs), 1.0))
        delta = deltas[0]
        if len(deltas) > 1:
            delta = mx.concatenate(deltas)

        return self.quantize((weight.astype(mx.float32) + delta).astype(self.dtype))


def quantized_sum_matmul(
    x: mx.array,
    lora_a: Arrays,
    lora_b: Arrays,
    scales: Sequence[float],
    sums: Sequence[QuantizedSum],
) -> list[mx.array]:
    """Return the products with quantized sums; gradients are LoRA's, as if nothing was rounded.

    Semantics: y = x @ Q(W + s (A B)^T)^T
        dx = dy @ Q(W + s (A B)^T),  dA = s x^T (dy B^T),  dB = s (x A)^T dy

    No weight is kept for the backward pass: it is made again. One after another is made, so that
    one dense weight at a time is in memory.

    Args:
        x: [..., D], any float dtype, which products have.
        lora_a: A [D, R] of each adapter of the sums, in float32.
        lora_b: B [R, O] likewise.
        scales: alpha / R of each.
        sums: frozen weights, with the indices of their adapters in these lists.

    Returns:
        [..., O] of each sum, in the dtype of x.
    """
    count = len(lora_a)

    def quantized(total: QuantizedSum, factors: Arrays, after: Arrays) -> nn.Module:
        scaled = [scales[i] * factors[count + i] for i in total.adapters]
        return total.module([factors[i] for i in total.adapters], scaled, after)

    @mx.custom_function
    def products(x: mx.array, *factors: mx.array) -> list[mx.array]:
        outputs: list[mx.array] = []
        for total in sums:
            outputs.append(multiply(x, quantized(total, factors, [x, *outputs[-1:]])))
        return outputs

    @products.vjp
    def products_vjp(primals: Arrays, cotangents: Arrays, _: Arrays) -> list[mx.array]:
        x, *factors = primals
        of_x: list[mx.array] = []
        gradients = [mx.array(0.0)] * (2 * count)

        rows = x.reshape(-1, x.shape[-1])
        for total, dy in zip(sums, cotangents, strict=True):
            weight = quantized(total, factors, [dy, *of_x[-1:]])
            _, (own,) = mx.vjp(partial(multiply, module=weight), [x], [dy])
            of_x.append(of_x[-1] + own if of_x else own)

            column = 0
            for width, i in total.slices:
                if i is not None:
                    part = dy[..., column : column + width].reshape(-1, width)
                    pair = factors[i], factors[count + i]
                    of_a, of_b = _gradients(rows, part, *pair, scales[i])
                    gradients[i] = of_a
                    gradients[count + i] = of_b
                column += width
        return [of_x[-1], *gradients]

    outputs = products(x, *lora_a, *lora_b)
    if isinstance(outputs, mx.array):
        return [outputs]
    return list(outputs)


def _gradients(
    rows: mx.array, dy: mx.array, a: mx.array, b: mx.array, scale: float
) -> tuple[mx.array, mx.array]:
    """Return dA and dB in float32, by products in the dtype of the rows [N, D] and [N, O]."""
    hidden = rows @ a.astype(rows.dtype)
    back = dy @ (scale * b).astype(rows.dtype).T
    return (rows.T @ back).astype(a.dtype), scale * (hidden.T @ dy).astype(b.dtype)


def multiply(x: mx.array, module: nn.Module) -> mx.array:
    """Return the product of x [..., D] with the weight of a frozen linear, without its bias."""
    if not isinstance(module, QUANTIZED):
        return profile().matmul(x, module.weight)
    return frozen_weight(module).transient_product(x)


class QuantizedSums:
    """The quantized sums of a group, by the place of their projection in it."""

    def __init__(self, sums: Mapping[int, QuantizedSum]) -> None:
        self.all = dict(sums)


class StraightThroughLoRA(GroupedLoRA):
    """Adapters of a projection group, whose adapted weights are quantized as they will be merged.

    Semantics: y = Q(W + s B A) x + bias, where the gradient takes Q for the identity

    Without a rank (A [D, 0]) it computes y = W x + bias, and in training before it ``rounds`` what
    LoRA does: y = W x + s B A x + bias.

    ``lora`` is the group that it takes the place of; ``sums`` are the adapted projections, by their
    place in the group.
    """

    keeps_on_cpu = True

    def __init__(self, lora: GroupedLoRA, sums: Mapping[int, QuantizedSum]) -> None:
        nn.Module.__init__(self)
        self._adapted = lora._adapted
        self._scales = lora._scales
        self._kept = None
        self.dropout = lora.dropout
        self.lora_a = list(lora.lora_a)
        self.lora_b = list(lora.lora_b)
        self._sums = QuantizedSums(sums)
        self.rounding = mx.zeros((1,))
        self.freeze(recurse=False, keys="rounding")

    @property
    def rounds(self) -> bool:
        """Whether weights are quantized in training.

        The size of an array says so: functions that are compiled with the state of the module as an
        input are traced again when it changes.
        """
        return self.rounding.size > 0

    @rounds.setter
    def rounds(self, value: bool) -> None:
        if value != self.rounds:
            self.rounding = mx.zeros((int(value),))

    def decoded(self, *_: object, **__: object) -> None:
        """Return None: decoding takes the quantized sums."""
        return None

    def project(
        self, x: mx.array, projections: Sequence[Callable[[mx.array], mx.array]]
    ) -> list[mx.array]:
        """Return the outputs of all projections of x [..., D], [..., O_i] each."""
        sums = self._sums.all
        places = [i for i in range(len(projections)) if i in sums]
        products = iter(self._products(x, [(i, sums[i]) for i in places]))

        outputs = []
        for i, projection in enumerate(projections):
            if i not in sums:
                outputs.append(projection(x))
                continue
            output = next(products)
            bias = sums[i].linear.get("bias")
            if bias is not None:
                output = output + bias
            outputs.append(output)

        return outputs

    def _products(self, x: mx.array, sums: Sequence[tuple[int, QuantizedSum]]) -> list[mx.array]:
        if not any(a.shape[-1] for a in self.lora_a):
            return [multiply(x, total.linear) for _, total in sums]
        if self.training and not self.rounds:
            return [self._unrounded(x, total) for _, total in sums]

        if self._kept is None or self.training:
            factors = self.lora_a, self.lora_b, self._scales
            return quantized_sum_matmul(x, *factors, [total for _, total in sums])

        modules = [self._once(("quantized", i), partial(self._module, total)) for i, total in sums]
        few = x.size <= MAX_ROWS * x.shape[-1]
        if few:
            return [module(x) for module in modules]
        return [multiply(x, module) for module in modules]

    def _unrounded(self, x: mx.array, total: QuantizedSum) -> mx.array:
        a: list[mx.array] = []
        b: list[mx.array] = []
        scales: list[float] = []
        for width, i in total.slices:
            if i is None:
                a.append(mx.zeros((x.shape[-1], 0)))
                b.append(mx.zeros((0, width)))
                scales.append(0.0)
            else:
                a.append(self.lora_a[i])
                b.append(self.lora_b[i])
                scales.append(self._scales[i])
        return grouped_lora(x, [multiply(x, total.linear)], a, b, scales)[0]

    def _module(self, total: QuantizedSum) -> nn.Module:
        indices = total.adapters
        scaled = [self._scales[i] * self.lora_b[i] for i in indices]
        return total.module([self.lora_a[i] for i in indices], scaled)


class StraightThroughLinear(AdaptedLinear):
    """A frozen linear whose sum with its adapters is quantized: of one slice, or of several."""

    def __call__(self, x: mx.array) -> mx.array:
        return self.lora.project(x, [self.linear])[0]


class Requantized(nn.Module):
    """A frozen module that holds a re-quantized copy of its weight and the original.

    Attributes:
        linear: the linear, embedding or stack of experts with the new weight.
        unchanged: whether the original is used.
        unchanged_in_training: the same, only in training.
    """

    def __init__(self, own: nn.Module, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear
        self.unchanged = self.unchanged_in_training = False
        self._own = Hidden([own])
        self.freeze()

    @property
    def used(self) -> nn.Module:
        unchanged = self.unchanged or (self.training and self.unchanged_in_training)
        if unchanged:
            return self._own.all[0]
        return self.linear

    def __call__(self, *args: mx.array, **kwargs: object) -> mx.array:
        return self.used(*args, **kwargs)

    def as_linear(self, x: mx.array) -> mx.array:
        """Multiply x [..., D] by the table, [..., V]."""
        return self.used.as_linear(x)

    def frozen_head(self, head_of: HeadOf) -> FrozenHead | None:
        """Return a head that is read from whichever module is in use then."""
        head = head_of(self.linear)
        return head and head._replace(
            part=lambda start, stop: head_of(self.used).part(start, stop),
            rows=lambda at: head_of(self.used).rows(at),
        )


class ForMerge(Attached):
    """Adapters that are trained on the grid of a merge; ``for_merge`` is its format."""

    def __init__(
        self, attached: Attached, for_merge: str, grid: Grid, matmul_path: str = "transient"
    ) -> None:
        super().__init__(attached.base, attached.specs, attached.groups, attached.notes)
        vars(self).update(vars(attached))
        self.for_merge = for_merge
        self._others: list[Requantized] = []
        self._install(grid)
        self._requantize_others(grid, matmul_path)

    @property
    def details(self) -> str:
        return f"{super().details} · trained for packs merge --requantize {self.for_merge}"

    def _install(self, grid: Grid) -> None:
        """Put groups that quantize in the place of all groups of adapters."""
        alone = {
            path: module
            for path, module in self.model.named_modules()
            if isinstance(module, AdaptedLinear)
        }
        sums: dict[int, dict[int, QuantizedSum]] = {}
        for path, place in self.places.items():
            index = 0 if path in alone else place.lora._adapted[place.first]
            total = _quantized_sum(path, place, self.frozen[path], grid[path])
            sums.setdefault(id(place.lora), {})[index] = total
        install(self, lambda lora: StraightThroughLoRA(lora, sums[id(lora)]))

        self.swap(
            [
                (path, StraightThroughLinear(module.linear, self.places[path].lora, module._widths))
                for path, module in alone.items()
            ]
        )

    def _requantize_others(self, grid: Grid, matmul_path: str) -> None:
        """Let modules without adapters be what a merge makes of them."""
        modules = dict(self.model.named_modules())
        swapped = []
        replacement = PATHS[matmul_path].replacement

        for path, own in modules.items():
            if path in self.specs or path.removesuffix(".linear") in self.specs:
                continue
            own_used = replacement(own) or own
            if path in grid:
                module = rounded_module(own, grid[path])
                requantized = Requantized(own_used, replacement(module) or module)
                swapped.append((path, requantized))
                self._others.append(requantized)
            elif own_used is not own:
                swapped.append((path, own_used))

        self.swap(swapped)
        self.model.train(self.model.training)

    def progress(self, done: float) -> None:
        """Round in training from this share of a run on; scores are always of rounded weights."""
        rounds = done >= ROUNDED_FROM
        for place in self.places.values():
            place.lora.rounds = rounds  # which lets a compiled step be traced again
        for other in self._others:
            other.unchanged_in_training = not rounds

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Return a context in which the model computes what the base does, nothing quantized anew.

        Adapters have no rank meanwhile: compiled functions are traced again for other shapes.
        """
        groups: list[GroupedLoRA] = list(
            {id(s.lora): s.lora for s in self.places.values()}.values()
        )
        trained = [(list(group.lora_a), list(group.lora_b)) for group in groups]

        try:
            for group in groups:
                group.lora_a[:] = [a[:, :0] for a in group.lora_a]
                group.lora_b[:] = [b[:0] for b in group.lora_b]
            for other in self._others:
                other.unchanged = True
            yield
        finally:
            for group, (a, b) in zip(groups, trained, strict=True):
                group.lora_a[:] = a
                group.lora_b[:] = b
            for other in self._others:
                other.unchanged = False


def attach_for_merge(
    base: "BaseModel", lora: LoRAConfig, train: TrainConfig, matmul_path: str
) -> ForMerge:
    """Attach fresh adapters on the grid of ``train.for_merge``.

    Raises a PackError if an adapted module cannot be quantized with its adapters.
    """
    attached = attach(base, lora, None, "quantized", train.seed)
    try:
        for path, spec in attached.specs.items():
            _check_module(path, spec, attached.frozen[path])
        grid = grid_of(base, train.for_merge, attached.specs)
        return ForMerge(attached, train.for_merge, grid, matmul_path)
    except BaseException:
        attached.detach()
        raise


def _quantized_sum(
    path: str, place: AdapterPlace, own: nn.Module, rounding: Rounding
) -> QuantizedSum:
    indices = iter(range(place.first, len(place.lora.lora_a)))
    slices = tuple((part.width, next(indices) if part.rank else None) for part in place.spec.slices)
    quantize = partial(rounding.linear, compute_dtype(own))
    return QuantizedSum(own, rounding.dtype, quantize, slices)


def _check_module(path: str, spec: ModuleSpec, module: nn.Module) -> None:
    """Raise a PackError for a module whose product is not that of one matrix."""
    reason = ""
    if spec.experts is not None:
        reason = "is a stack of experts"
    elif type(module) is not DenseLinear and not is_plain_linear(module):
        reason = f"is a {type(module).__name__}, and no plain linear"
    if reason:
        raise PackError(
            f"--for-merge: {path} {reason}. Leave it out of --target-modules, or train without "
            "--for-merge.",
            "unsupported",
        )


def planned_bytes(
    modules: Modules,
    adapters: "PlannedAdapters",
    headers: "Headers",
    train: TrainConfig,
    itemsize: int,
) -> tuple[int, int]:
    """Return what rounding adds to the plan of a run, in bytes.

    In flight while the largest adapted weight is rounded; and of the weights without adapters that
    are quantized anew beside the base's. ``modules`` has the shapes of the base's weights by path,
    ``itemsize`` the bytes of a number in activations.
    """
    adapted = _adapted_paths(modules, adapters)
    quantized = headers.is_quantized or train.quantize != "none"
    largest = max(math.prod(modules[path]) for path in adapted)
    others = {path: shape for path, shape in modules.items() if path not in adapted}

    return _BYTES[quantized] * largest, _requantized_bytes(others, headers, train, itemsize)


def _requantized_bytes(
    others: Modules, headers: "Headers", train: TrainConfig, itemsize: int
) -> int:
    options = QuantizeOptions(named_format(train.for_merge))
    stored = _stored_bits(headers)
    if stored is not None and options.weight_format.bits_per_weight >= stored:
        return 0

    formats = [(format_for(path, shape, options), shape) for path, shape in others.items()]
    return sum(
        weight_format.nbytes(shape, itemsize)
        for weight_format, shape in formats
        if not isinstance(weight_format, str)
    )


def _adapted_paths(modules: Modules, adapters: "PlannedAdapters") -> set[str]:
    first = 1 + max(int(path.split(".")[2]) for path in modules if "layers" in path)
    first -= len(adapters.kept)
    names = {f"{i}.{name}" for i, block in enumerate(adapters.kept, first) for name in block}
    return {path for path in modules if path.partition("layers.")[2] in names}


def _stored_bits(headers: "Headers") -> float | None:
    """Return the bits of a weight of a base that is stored quantized; None if it is dense."""
    quantization = headers.config.get("quantization") or {}
    if custom := headers.custom_format():
        return custom.bits_per_weight
    if not headers.is_quantized or "bits" not in quantization:
        return None
    mode = quantization.get("mode", "affine")
    group_size = quantization["group_size"]
    return MLXFormat(mode, quantization["bits"], group_size).bits_per_weight
