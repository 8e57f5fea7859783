"""The facts of a base without its weights: its config and the headers of its tensors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import mlx.nn as nn
from mlx.utils import tree_flatten

from ..bases.compressed_tensors import format_on_loading
from ..bases.model_classes import classes_of
from ..bases.precision import stored_dtype
from ..bases.quantization import check_not_quantized
from ..bases.unsupported import INSTEAD
from ..bases.weight_formats import WeightFormat, format_class, named_format
from ..config.choices import WEIGHT_MODES, weight_modes_of
from ..config.schema import TrainConfig
from ..errors import PackError
from ..reading import DTYPE_BITS, FLOATS
from ..runtime import dtype_name
from ..tensors import DTYPES

if TYPE_CHECKING:
    from ..bases.model import BaseModel

Tensors = Mapping[str, Mapping]  # name -> {"dtype": as safetensors spells it, "shape": [...]}

_ASSUMED = {  # of a config without them
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_HALF = ("F16", "BF16")
_WIDEST = 64  # bits of a number whose dtype is not known


@dataclass(frozen=True)
class Headers:
    """Name, config and tensor headers of a base, and what its memory depends on in the examples."""

    name: str
    config: dict
    tensors: Tensors
    image_tokens: int | None = None  # of the images of rows; None where rows are not known
    outputs: int = 1  # rows of a score head
    teacher_tokens: int = 64  # of a target, whose probabilities a teacher's cache has

    @classmethod
    def of(cls, base: "BaseModel") -> "Headers":
        """Return the headers of a loaded base, before adapters are attached."""
        return cls(base.name, base.config, tensors_of(base.model))

    @property
    def code(self) -> str | None:
        """The Python file of the base that replaces mlx-lm's model; None without one."""
        if "model_file" not in self.config:
            return None
        return str(self.config["model_file"])

    @cached_property
    def weight_modes(self) -> dict[str, str]:
        """The modes of quantized weights, by the paths of their modules."""
        return weight_modes_of(self.tensors)

    @property
    def is_quantized(self) -> bool:
        return bool(self.weight_modes)

    def custom_format(self, quantize: str = "none") -> WeightFormat | None:
        """Return the format that MLX lacks, of weights stored so or quantized on loading."""
        modes = set(self.weight_modes.values())
        formats = [format_class(mode)() for mode in WEIGHT_MODES if mode in modes]
        if quantize != "none":
            formats.append(named_format(quantize))
        return next((each for each in formats if not each.native), None)

    def check_formats(self) -> None:
        """Raise a PackError if a weight is quantized in a format that no plan knows."""
        for name, tensor in self.tensors.items():
            path, _, part = name.rpartition(".")
            is_dense = tensor["dtype"] in (*FLOATS, "F64")
            if "weight" in part and not is_dense and path not in self.weight_modes:
                raise PackError(
                    f"no plan: {name} of {self.name} is {tensor['dtype']}, in a format of "
                    f"quantized weights that no plan knows. {INSTEAD}",
                    "unsupported",
                    "model",
                )

    def without_scales(self) -> "Headers":
        """Return the same names, as if no weight were quantized."""
        first = tuple(f".{part}" for facts in WEIGHT_MODES.values() for part in facts.parts[:1])
        dense = {n: t for n, t in self.tensors.items() if not n.endswith(first)}
        return replace(self, tensors=dense)

    def as_loaded(self, train: TrainConfig) -> TrainConfig:
        """Return settings with the format that loading quantizes the base to."""
        quantize = format_on_loading(self.config, train.quantize)
        if train.trains_base or quantize == train.quantize:
            return train
        return replace(train, quantize=quantize)

    def check_quantize(self, train: TrainConfig) -> None:
        """Raise a PackError, as `load_base` does, if a quantized base is to be quantized anew."""
        check_not_quantized(train.quantize, self.config)


def dense_tensors(config: Mapping) -> Tensors:
    """Return the headers of the dense checkpoint of a model that is made of a config.

    Its arrays are lazy: none is computed. Raises a PackError if the config lacks something.
    """
    complete = _ASSUMED | dict(config)
    model_class, arguments_class = classes_of(complete)
    try:
        model = model_class(arguments_class.from_dict(complete))
    except (TypeError, ValueError, KeyError) as error:
        raise PackError(f"no plan: config.json is incomplete ({error}).", "unsupported") from error

    dtype = DTYPES[stored_dtype(config)]
    return {name: {**tensor, "dtype": dtype} for name, tensor in tensors_of(model).items()}


def tensors_of(model: nn.Module) -> Tensors:
    return {
        name: {"dtype": DTYPES[dtype_name(array.dtype)], "shape": list(array.shape)}
        for name, array in tree_flatten(model.parameters())
    }


def tensor_bytes(tensor: Mapping, widen: bool) -> int:
    """Return a tensor's bytes in memory; ``widen`` takes half precision to float32, as on CPUs."""
    bits = 32 if widen and tensor["dtype"] in _HALF else DTYPE_BITS.get(tensor["dtype"], _WIDEST)
    return bits * math.prod(tensor["shape"]) // 8
