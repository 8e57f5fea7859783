"""The facts of a base without its weights: its config and the headers of its tensors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.nn as nn
from mlx.utils import tree_flatten

from ..bases.nf4 import check_stored_nf4, stored_as_asked
from ..bases.precision import stored_dtype
from ..config.schema import TrainConfig
from ..errors import PackError
from ..runtime import mx

if TYPE_CHECKING:
    from ..bases.model import BaseModel

Tensors = Mapping[str, Mapping]  # name -> {"dtype": as safetensors spells it, "shape": [...]}

_QUANTIZED_TAILS = (".scales", ".weight.absmax", ".absmax")
_ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2}
_ASSUMED = {  # of a config without them
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_HALF = ("F16", "BF16")


@dataclass(frozen=True)
class Headers:
    """Name, config and tensor headers of a base."""

    name: str
    config: dict
    tensors: Tensors

    @classmethod
    def of(cls, base: "BaseModel") -> "Headers":
        """Return those of a loaded base, before adapters are attached."""
        return cls(base.name, base.config, tensors_of(base.model))

    @property
    def code(self) -> str | None:
        """The Python file that comes with the base and replaces mlx-lm's model; None without one."""
        return str(self.config["model_file"]) if "model_file" in self.config else None

    @property
    def is_quantized(self) -> bool:
        """Whether any weight is quantized."""
        return any(name.endswith(_QUANTIZED_TAILS) for name in self.tensors)

    @property
    def is_nf4(self) -> bool:
        """Whether weights are NF4."""
        return any(name.endswith("absmax") for name in self.tensors)

    def quantized_modules(self) -> set[str]:
        """Return the paths of modules whose weight is quantized: affine and similar, NF4."""
        return {
            name.removesuffix(tail)
            for tail in _QUANTIZED_TAILS
            for name in self.tensors
            if name.endswith(tail)
        }

    def without_scales(self) -> "Headers":
        """Return the same names, as if no weight were quantized."""
        dense = {n: t for n, t in self.tensors.items() if not n.endswith(_QUANTIZED_TAILS)}
        return Headers(self.name, self.config, dense)

    def check_quantize(self, train: TrainConfig) -> None:
        """Raise a PackError, as `load_base` does, if a quantized base is to be quantized otherwise."""
        if not stored_as_asked(self.config, train.quantize):
            return
        tails = (".weight.absmax", ".absmax")
        modules = []
        for name in self.tensors:
            if tail := next((tail for tail in tails if name.endswith(tail)), None):
                path = name.removesuffix(tail)
                nested = f"{path}{tail.replace('absmax', 'nested_absmax')}"
                modules.append((path, nested in self.tensors))
        check_stored_nf4(modules, self.name, train.double_quant, train.keep)


def dense_tensors(config: Mapping) -> Tensors:
    """Return the headers of the dense checkpoint that mlx-lm makes of a config.

    Its arrays are lazy: none is computed. Raises a PackError if the config lacks something.
    """
    from mlx_lm.utils import _get_classes

    complete = _ASSUMED | dict(config)
    model_class, arguments_class = _get_classes(complete)
    try:
        model = model_class(arguments_class.from_dict(complete))
    except (TypeError, ValueError, KeyError) as error:
        raise PackError(f"no plan: config.json is incomplete ({error}).", "unsupported") from error
    dtype = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[stored_dtype(config)]
    return {name: {**tensor, "dtype": dtype} for name, tensor in tensors_of(model).items()}


def tensors_of(model: nn.Module) -> Tensors:
    """Return the headers that a model's parameters would have."""
    names = {mx.float32: "F32", mx.bfloat16: "BF16", mx.float16: "F16", mx.uint32: "U32"}
    return {
        name: {
            "dtype": names.get(a.dtype, "U8" if a.dtype.size == 1 else "F64"),
            "shape": list(a.shape),
        }
        for name, a in tree_flatten(model.parameters())
    }


def tensor_bytes(tensor: Mapping, widen: bool) -> int:
    """Return a tensor's bytes in memory; ``widen`` takes half precision to float32, as on CPUs."""
    each = _ITEM_BYTES.get(tensor["dtype"], 1)
    if widen and tensor["dtype"] in _HALF:
        each = 4
    return each * math.prod(tensor["shape"])
