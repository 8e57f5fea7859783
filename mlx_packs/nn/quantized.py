"""The three ways to multiply by a frozen weight (matmul paths), and swapping modules for them.

``quantized``: MLX's fused kernel on the quantized weight. ``transient``: dequantize for one use,
then a dense product; the backward dequantizes again, so nothing dense is kept. ``dense``:
dequantize once and keep. The fastest depends on device, rows and shape: `auto` measures.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from ..config.choices import MATMUL_PATHS, registered
from ..ops.profile import profile
from .frozen_weight import (
    CustomEmbedding,
    CustomLinear,
    CustomWeight,
    FloatingEmbedding,
    FrozenWeight,
    frozen_weight,
)
from .lora import is_switch_linear
from .surgery import replace_modules
from .tables_on_disk import kind_of

LINEARS = (nn.QuantizedLinear, CustomLinear)
EMBEDDINGS = (nn.QuantizedEmbedding, CustomEmbedding)
QUANTIZED = (*LINEARS, *EMBEDDINGS)
_MLX_EMBEDDINGS = (nn.QuantizedEmbedding, FloatingEmbedding)
_MLX_QUANTIZED = (nn.QuantizedLinear, *_MLX_EMBEDDINGS)


class TransientLinear(nn.Module):
    def __init__(self, linear: nn.QuantizedLinear) -> None:
        super().__init__()
        self.linear = linear

    def __call__(self, x: mx.array) -> mx.array:
        y = frozen_weight(self.linear).transient_product(x)
        if "bias" in self.linear:
            y = y + self.linear.bias
        return y


class TransientEmbedding(nn.Module):
    """A quantized embedding whose table, used as a head, is dequantized for each use."""

    def __init__(self, embedding: nn.QuantizedEmbedding) -> None:
        super().__init__()
        self.embedding = embedding

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.embedding(tokens)

    def as_linear(self, x: mx.array) -> mx.array:
        return frozen_weight(self.embedding).transient_product(x)


def bare_module(module: nn.Module | None) -> nn.Module | None:
    """Return the module that one of a matmul path replaces."""
    if isinstance(module, TransientLinear):
        return module.linear
    if isinstance(module, TransientEmbedding):
        return module.embedding
    return module


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
        y = x @ self.weight.astype(x.dtype).T
        if "bias" in self:
            y = y + self.bias.astype(x.dtype)
        return y


class DenseLinear(nn.Linear):
    """A linear whose product the streams of a CPU share."""

    def __call__(self, x: mx.array) -> mx.array:
        device = profile()
        if device.streams == 1:
            return super().__call__(x)

        y = device.matmul(x, self.weight)
        if "bias" in self:
            y = y + self.bias
        return y


def dense_module(module: nn.Module, dtype: mx.Dtype | None = None) -> nn.Module:
    """Return a frozen nn.Linear or nn.Embedding with the weight of ``module``, dequantized."""
    if isinstance(module, EMBEDDINGS):
        dense = nn.Embedding(1, 1)
    else:
        dense = DenseLinear(1, 1, bias="bias" in module)

    dense.weight = frozen_weight(module).dense()
    if "bias" in module:
        dense.bias = module.bias
    if dtype is not None:
        dense.set_dtype(dtype)
    dense.freeze()
    return dense


def is_plain_linear(module: nn.Module) -> bool:
    """Return whether a module is a dense or quantized linear, of no class that computes more."""
    return type(module) in (nn.Linear, nn.QuantizedLinear) or isinstance(module, CustomLinear)


def quantized_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(path, m) for path, m in model.named_modules() if isinstance(m, QUANTIZED)]


def multiplied_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the quantized modules that tokens are multiplied by: no table beside a head."""
    has_head = any(path.rpartition(".")[2] == "lm_head" for path, _ in model.named_modules())
    modules = quantized_modules(model)
    return [each for each in modules if not (has_head and isinstance(each[1], EMBEDDINGS))]


def count_weights(model: nn.Module) -> int:
    """Count the weights and biases of a model; a quantized weight counts as a dense one."""
    count = 0
    for module in model.modules():
        own = {k: v for k, v in module.items() if isinstance(v, mx.array) and not k.startswith("_")}
        if "weight" in own and (bits := frozen_weight(module).bits) is not None:
            count += own["weight"].nbytes * 8 // bits + own.get("bias", mx.zeros(0)).size
        else:
            count += sum(v.size for v in own.values())

    return count


def _transient(module: nn.Module) -> nn.Module | None:
    """Return a module that dequantizes for each use; a `CustomWeight` does so by itself."""
    kind = kind_of(module)
    if kind is nn.QuantizedLinear:
        return TransientLinear(module)
    if kind in _MLX_EMBEDDINGS:
        return TransientEmbedding(module)
    return None


def _dense(module: nn.Module) -> nn.Module | None:
    """Return a dense module; of a linear that is dense anyway one that streams share, if any do."""
    device = profile()
    if type(module) is nn.Linear and device.streams > 1:
        return dense_module(module)
    if is_switch_linear(module):
        return None
    if type(module) not in _MLX_QUANTIZED and not isinstance(module, CustomWeight):
        return None
    if getattr(module, "is_on_disk", False):  # it would be in memory, four times as large
        return None
    # the dtype of activations, whatever the format dequantizes to
    return dense_module(module, device.dtype)


# Returns the module to install; None leaves it: a subclass keeps its own forward.
Replacement = Callable[[nn.Module], nn.Module | None]


@dataclass(frozen=True)
class MatmulPath:
    product: Callable[[FrozenWeight, mx.array], mx.array]  # x @ W.T
    replacement: Replacement


PATHS: dict[str, MatmulPath] = registered(
    MATMUL_PATHS,
    {
        "quantized": MatmulPath(lambda weight, x: weight.product(x), lambda _: None),
        "transient": MatmulPath(lambda weight, x: weight.transient_product(x), _transient),
        "dense": MatmulPath(lambda weight, x: weight.product(x), _dense),
    },
)


def apply_matmul_path(
    model: nn.Module, matmul_path: str, lazy: bool = False
) -> list[tuple[str, nn.Module]]:
    """Make all quantized modules compute by a matmul path; ``lazy`` reads no weight.

    An embedding beside a head stays as it is: a few rows of it are looked up. Return (path,
    original module) of those replaced; `replace_modules` puts them back.
    """
    replacement = PATHS[matmul_path].replacement
    multiplied = {id(module) for _, module in multiplied_modules(model)}
    replacements: dict[int, nn.Module | None] = {
        id(module): None for _, module in quantized_modules(model) if id(module) not in multiplied
    }
    originals = []
    replaced = []
    for path, module in model.named_modules():
        if id(module) not in replacements:
            replacements[id(module)] = replacement(module)
        other = replacements[id(module)]
        if other is not None:
            originals.append((path, module))
            replaced.append((path, other))

    replace_modules(model, replaced)
    if not lazy:
        mx.eval([m.parameters() for _, m in replaced])
    return originals
