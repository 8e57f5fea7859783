"""The three ways to multiply by a frozen weight (matmul paths), and swapping modules for them.

``quantized``: MLX's fused kernel on the quantized weight. ``transient``: dequantize for one use, then
a dense product; the backward dequantizes again, so nothing dense is kept. ``dense``: dequantize
once and keep. Which is fastest depends on device, rows and shape: `auto` measures (matmul_path.py).
"""

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from ..config.choices import MATMUL_PATHS, registered
from ..ops import nf4
from ..ops.linear_cross_entropy import FrozenHead, HeadSlice
from ..ops.matmul import dense_matmul, dequantize, sliced_matmul
from ..ops.streams import stream_count
from ..runtime import on_cpu
from .experts import is_switch_linear
from .nf4 import NF4Embedding, NF4Linear
from .wrapped import Hidden

LINEARS = (nn.QuantizedLinear, NF4Linear)
EMBEDDINGS = (nn.QuantizedEmbedding, NF4Embedding)
NF4 = (NF4Linear, NF4Embedding)
QUANTIZED = (*LINEARS, *EMBEDDINGS)


def true_shape(module: nn.Module) -> tuple[int, int]:
    """Return [out, in] of the weight of a linear or embedding, adapted ones included."""
    while "linear" in module:
        module = module["linear"]
    if isinstance(module, NF4):
        return module.nf4_weight.shape
    if "scales" not in module:
        return module.weight.shape
    return module.weight.shape[0], module.weight.shape[1] * 32 // module.bits


def dense_dtype(module: nn.Module) -> mx.Dtype:
    """Return the dtype that a quantized module has when it is dense."""
    return module.dtype if isinstance(module, NF4) else module.scales.dtype


def dense_weight(module: nn.Module) -> mx.array:
    """Return the weight of a linear, an embedding or a stack of experts, dequantized if quantized.

    It is [out, in], of experts [E, out, in], in the dtype of `dense_dtype`.
    """
    if isinstance(module, NF4):
        return module.dequantized()
    if "scales" not in module:
        return module.weight
    return mx.dequantize(
        module.weight, module.scales, module.get("biases"), **_quantization(module)
    )


def _quantization(module: nn.Module) -> dict:
    """Return how one of MLX's quantized modules is quantized, as MLX's functions take it."""
    return {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}


def _dequantized_rows(
    module: nn.Module, at: slice | mx.array, after: mx.array | None = None
) -> mx.array:
    """Return some rows of a weight in one of MLX's formats, not before ``after`` is computed."""
    names = [name for name in ("weight", "scales", "biases") if name in module]
    arrays = [module[name][at] for name in names]
    if after is not None:
        arrays = mx.depends(arrays, after)
    weight, scales, biases = arrays if "biases" in module else (*arrays, None)
    return dequantize(weight, scales, biases, module.group_size, module.bits, module.mode)


def quantized_matmul(x: mx.array, module: nn.Module) -> mx.array:
    """Compute ``x @ W.T`` for a quantized module by the kernel that reads W quantized."""
    if isinstance(module, NF4):
        return nf4.matmul(x, module.nf4_weight)
    return mx.quantized_matmul(
        x, module.weight, module.scales, module.get("biases"), **_quantization(module)
    )


def transient_matmul(x: mx.array, module: nn.Module) -> mx.array:
    """Compute ``x @ W.T`` for a quantized module, dequantizing W for this one use.

    The result is in the dtype of x. The gradient reaches x only; the weight is frozen.
    """
    if isinstance(module, NF4):  # for more than a few rows that is what the op does anyway
        return nf4.matmul(x, module.nf4_weight)

    def rows(start: int, stop: int, after: mx.array) -> mx.array:
        return _dequantized_rows(module, slice(start, stop), after).astype(after.dtype)

    return sliced_matmul(x, true_shape(module), rows)


class TransientLinear(nn.Module):
    """A quantized linear whose weight is dequantized for each use."""

    def __init__(self, linear: nn.QuantizedLinear) -> None:
        super().__init__()
        self.linear = linear

    def __call__(self, x: mx.array) -> mx.array:
        """Map x [..., D] to [..., O]."""
        y = transient_matmul(x, self.linear)
        return y + self.linear.bias if "bias" in self.linear else y


class TransientEmbedding(nn.Module):
    """A quantized embedding whose table, used as a head, is dequantized for each use."""

    def __init__(self, embedding: nn.QuantizedEmbedding) -> None:
        super().__init__()
        self.embedding = embedding

    def __call__(self, tokens: mx.array) -> mx.array:
        """Return rows [..., D] of the table."""
        return self.embedding(tokens)

    def as_linear(self, x: mx.array) -> mx.array:
        """Multiply x [..., D] by the table, [..., V]."""
        return transient_matmul(x, self.embedding)


class Requantized(nn.Module):
    """A frozen module whose weight is quantized anew, and that can be used as it was, too.

    Attributes:
        linear: the linear, embedding or stack of experts with the new weight.
        unchanged: whether the module as it was is used instead.
        unchanged_in_training: the same for training alone.
    """

    def __init__(self, own: nn.Module, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear
        self.unchanged = self.unchanged_in_training = False
        self._own = Hidden([own])
        self.freeze()

    @property
    def used(self) -> nn.Module:
        """The module that computes."""
        unchanged = self.unchanged or (self.training and self.unchanged_in_training)
        return self._own.all[0] if unchanged else self.linear

    def __call__(self, *args: mx.array, **kwargs: object) -> mx.array:
        """Return what the module in use computes."""
        return self.used(*args, **kwargs)

    def as_linear(self, x: mx.array) -> mx.array:
        """Multiply x [..., D] by the table, [..., V]."""
        return self.used.as_linear(x)


def bare_module(module: nn.Module | None) -> nn.Module | None:
    """Return the module that one of a matmul path replaces."""
    if isinstance(module, TransientLinear):
        return module.linear
    return module.embedding if isinstance(module, TransientEmbedding) else module


class HalfLinear(nn.Module):
    """A frozen fp16 copy of a weight [O, D] whose geometry could not be probed.

    It multiplies in the dtype of its input, so that nothing downstream is promoted.
    """

    def __init__(self, weight: mx.array, bias: mx.array | None) -> None:
        super().__init__()
        self.weight = weight
        if bias is not None:
            self.bias = bias
        self.freeze()

    def __call__(self, x: mx.array) -> mx.array:
        """Map x [..., D] to [..., O], in the dtype of x."""
        y = x @ self.weight.astype(x.dtype).T
        return y + self.bias.astype(x.dtype) if "bias" in self else y


class DenseLinear(nn.Linear):
    """A linear whose product the streams of a CPU share."""

    def __call__(self, x: mx.array) -> mx.array:
        """Map x [..., D] to [..., O]."""
        if stream_count() == 1:
            return super().__call__(x)
        y = dense_matmul(x, self.weight)
        return y + self.bias if "bias" in self else y


def dense_module(module: nn.Module, dtype: mx.Dtype | None = None) -> nn.Module:
    """Return a frozen nn.Linear or nn.Embedding with the weight of ``module``, dequantized."""
    weight = dense_weight(module)
    if dtype is not None:
        weight = weight.astype(dtype)
    if isinstance(module, EMBEDDINGS):
        dense = nn.Embedding(1, 1)
    else:
        dense = DenseLinear(1, 1, bias="bias" in module)
        if "bias" in module:
            dense.bias = module.bias if dtype is None else module.bias.astype(dtype)
    dense.weight = weight
    dense.freeze()
    return dense


def stored_weight(module: nn.Module, dtype: mx.Dtype, after: Sequence[mx.array] = ()) -> mx.array:
    """Return the dense weight of a module bit-identical to that of its checkpoint.

    On a CPU a loaded base has scales, and dense weights, in float32.

    Args:
        module: a linear, an embedding or a stack of experts.
        dtype: of the dense weight in the checkpoint.
        after: what is computed before the weight is dequantized.
    """
    names = [name for name, value in module.items() if isinstance(value, mx.array)]
    part = copy.copy(module)
    if after:
        arrays = mx.depends([module[name] for name in names], list(after))
        for name, array in zip(names, arrays, strict=True):
            part[name] = array
    if isinstance(part, NF4):
        return nf4.dequantize(part.nf4_weight, dtype)
    if "scales" in part and part.mode == "affine":
        part.scales, part.biases = part.scales.astype(dtype), part.biases.astype(dtype)
    return dense_weight(part).astype(dtype)


def dense_like(module: nn.Module, weight: mx.array) -> nn.Module:
    """Return a frozen dense module of the kind of another one, with its bias, and this weight."""
    if isinstance(module, (nn.Linear, *LINEARS)):
        return linear_of(weight, module.get("bias"))
    if is_switch_linear(module):
        from mlx_lm.models.switch_layers import SwitchLinear

        dense = SwitchLinear(1, 1, 1, bias="bias" in module)
        if "bias" in module:
            dense.bias = module.bias
    else:
        dense = nn.Embedding(1, 1)
    dense.weight = weight
    dense.freeze()
    return dense


def linear_of(weight: mx.array, bias: mx.array | None = None) -> nn.Module:
    """Return a frozen linear with a dense weight [O, D]; no random number is drawn."""
    linear = DenseLinear.__new__(DenseLinear)
    nn.Module.__init__(linear)
    linear.weight = weight
    if bias is not None:
        linear.bias = bias
    linear.freeze()
    return linear


def first_rows(module: nn.Module, count: int) -> nn.Module:
    """Return a quantized linear or embedding with the first rows of its weight and no others."""
    sizes = {"weight": count, "scales": count, "biases": count, "bias": count}
    if isinstance(module, NF4):
        sizes["absmax"] = -(-count * true_shape(module)[1] // module.group_size)
        sizes["nested_absmax"] = -(-sizes["absmax"] // nf4.NESTED_BLOCK_SIZE)
    part = copy.copy(module)
    for name in sizes.keys() & module.keys():
        part[name] = module[name][: sizes[name]]
    return part


def frozen_head(module: nn.Module) -> FrozenHead | None:
    """Return a linear or embedding as a head that is read by slices of rows; None if it is neither.

    By the transient path, and from NF4, a slice is dense while it is used.
    """
    if isinstance(module, Requantized):
        return _head_in_use(module)
    if isinstance(module, TransientLinear):
        return _quantized_head(module.linear, dense=True)
    if isinstance(module, TransientEmbedding):
        return _quantized_head(module.embedding, dense=True)
    if isinstance(module, QUANTIZED):
        return _quantized_head(module, dense=isinstance(module, NF4))
    if type(module) in (nn.Linear, DenseLinear, nn.Embedding, HalfLinear):
        return _head(module, *module.weight.shape, lambda at: module.weight[at])
    return None


def _head_in_use(module: Requantized) -> FrozenHead | None:
    """Return a head that is read from whichever module is in use then."""
    head = frozen_head(module.linear)
    return head and head._replace(
        part=lambda start, stop: frozen_head(module.used).part(start, stop),
        rows=lambda at: frozen_head(module.used).rows(at),
    )


def _head(
    module: nn.Module, vocab_size: int, width: int, rows: Callable[[slice | mx.array], mx.array]
) -> FrozenHead:
    """Return a head whose rows are dequantized or dense."""

    def part(start: int, stop: int) -> HeadSlice:
        weight = rows(slice(start, stop))
        bias = module.bias[start:stop] if "bias" in module else None
        return HeadSlice(
            lambda h: _biased(h @ weight.astype(h.dtype).T, bias),
            lambda p: p @ weight.astype(p.dtype),
        )

    return FrozenHead(vocab_size, width, part, rows)


def _biased(y: mx.array, bias: mx.array | None) -> mx.array:
    return y if bias is None else y + bias.astype(y.dtype)


def _quantized_head(module: nn.Module, dense: bool) -> FrozenHead:
    """Return a head of quantized rows; ``dense`` slices of it are dequantized, then multiplied."""
    vocab_size, width = true_shape(module)
    how = _quantization(module)

    def rows(at: slice | mx.array) -> mx.array:
        if isinstance(module, NF4):
            at = mx.arange(at.start, at.stop) if isinstance(at, slice) else at
            return nf4.rows(module.nf4_weight, at, module.dtype)
        return _dequantized_rows(module, at)

    def part(start: int, stop: int) -> HeadSlice:
        biases = module.get("biases")
        arrays = [p if p is None else p[start:stop] for p in (module.weight, module.scales, biases)]
        bias = module.bias[start:stop] if "bias" in module else None
        return HeadSlice(
            lambda h: _biased(mx.quantized_matmul(h, *arrays, **how), bias),
            lambda p: mx.quantized_matmul(p, *arrays, transpose=False, **how),
        )

    head = _head(module, vocab_size, width, rows)
    return head if dense else head._replace(part=part)


def quantized_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return paths and modules of every quantized linear and embedding of a model."""
    return [(path, m) for path, m in model.named_modules() if isinstance(m, QUANTIZED)]


def count_weights(model: nn.Module) -> int:
    """Count the weights and biases of a model; a quantized weight counts as a dense one."""
    count = 0
    for module in model.modules():
        own = {k: v for k, v in module.items() if isinstance(v, mx.array) and not k.startswith("_")}
        if "scales" in own or isinstance(module, NF4):
            count += own["weight"].nbytes * 8 // module.bits + own.get("bias", mx.zeros(0)).size
        else:
            count += sum(v.size for v in own.values())
    return count


def _stored_dense_matmul(x: mx.array, module: nn.Module) -> mx.array:
    """Compute ``x @ W.T`` for a module whose weight is dense."""
    return dense_matmul(x, module.weight)


def _unchanged(module: nn.Module) -> None:
    """Return nothing: every module stays."""


def _transient(module: nn.Module) -> nn.Module | None:
    """Return a module that dequantizes for each use; NF4 does so by itself."""
    if type(module) is nn.QuantizedLinear:
        return TransientLinear(module)
    return TransientEmbedding(module) if type(module) is nn.QuantizedEmbedding else None


def _dense(module: nn.Module) -> nn.Module | None:
    """Return a dense module; of a linear that is dense anyway one that streams share, if any do."""
    if type(module) is nn.Linear and stream_count() > 1:
        return dense_module(module)
    if type(module) not in QUANTIZED:
        return None
    # on a CPU activations are float32, whatever the format dequantizes to
    return dense_module(module, mx.float32 if on_cpu() else None)


@dataclass(frozen=True)
class MatmulPath:
    """A way to multiply by frozen weights."""

    modules: tuple[type[nn.Module], ...]  # that multiply so
    product: Callable[[mx.array, nn.Module], mx.array]  # x @ W.T
    # What replaces a base's module; None where it stays, as subclasses do: they compute something
    # of their own with the product.
    replacement: Callable[[nn.Module], nn.Module | None]


PATHS: dict[str, MatmulPath] = registered(
    MATMUL_PATHS,
    {
        "quantized": MatmulPath(QUANTIZED, quantized_matmul, _unchanged),
        "transient": MatmulPath(
            (TransientLinear, TransientEmbedding), transient_matmul, _transient
        ),
        "dense": MatmulPath((nn.Linear, nn.Embedding, HalfLinear), _stored_dense_matmul, _dense),
    },
)


def matmul_path_of(module: nn.Module) -> str | None:
    """Return the matmul path of a frozen linear or embedding; None for other modules."""
    return next((name for name, path in PATHS.items() if isinstance(module, path.modules)), None)


def replace_modules(model: nn.Module, modules: list[tuple[str, nn.Module]]) -> None:
    """Put each module at its path; one inside another goes into the new one."""

    def depth(item: tuple[str, nn.Module]) -> int:
        return item[0].count(".")

    for _, level in itertools.groupby(sorted(modules, key=depth), key=depth):
        model.update_modules(tree_unflatten(list(level)))


def apply_matmul_path(
    model: nn.Module, matmul_path: str, lazy: bool = False
) -> list[tuple[str, nn.Module]]:
    """Make every quantized module of ``model`` compute by ``matmul_path``; ``lazy`` reads no weight.

    Returns:
        (path, original module) of those replaced; `replace_modules` puts them back.
    """
    replacement = PATHS[matmul_path].replacement
    originals, replaced = [], []
    for path, module in model.named_modules():
        if (other := replacement(module)) is not None:
            originals.append((path, module))
            replaced.append((path, other))
    replace_modules(model, replaced)
    if not lazy:
        mx.eval([m.parameters() for _, m in replaced])
    return originals
