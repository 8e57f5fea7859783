"""The dtype that a base computes in, and why: as specified, as stored, or fast on the chip."""

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.nn as nn
from mlx.utils import tree_flatten

from .. import chips, runtime
from ..config.choices import architecture_of
from ..runtime import dtype_name, mx
from .files import K_QUANTS, text_config

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
STORED = "as stored"


@dataclass(frozen=True)
class ComputeDtype:
    """The dtype of activations."""

    name: str  # ``float32``, ``float16`` or ``bfloat16``
    why: str  # for people
    cast: str = "auto"  # what `load_base` is to cast a base to; ``auto`` is nothing

    def to_json(self) -> dict[str, str]:
        return {"name": self.name, "why": self.why}


def choose_compute_dtype(
    config: Mapping, requested: str = "auto", trains_base: bool = False
) -> ComputeDtype:
    """Return the dtype in which a run on this device computes.

    ``auto`` is the stored dtype, but float16 for a bfloat16 base on a chip that emulates bfloat16.
    A CPU, an encoder, and full fine-tuning (``trains_base``) compute in float32.
    """
    if trains_base:
        return ComputeDtype("float32", "weights are trained in it", requested)
    if architecture_of(config.get("model_type")) == "encoder":
        return ComputeDtype("float32", "encoders compute in it", requested)
    if runtime.on_cpu():
        return ComputeDtype("float32", "CPUs are far slower in half precision", requested)
    if requested != "auto":
        return ComputeDtype(requested, "as specified", requested)

    stored = stored_dtype(config)
    if stored == "bfloat16" and (chip := _chip_without_bfloat16()):
        return ComputeDtype("float16", f"{chip} has no native bfloat16", "float16")
    return ComputeDtype(stored, STORED)


def activation_bytes(config: Mapping, requested: str) -> int:
    """Bytes of a number that a run with adapters computes."""
    return DTYPES[choose_compute_dtype(config, requested).name].size


def stored_dtype(config: Mapping) -> str:
    """The dtype that config.json names for weights; bfloat16 where it names none."""
    parts = (text_config(dict(config)), config)
    names = [str(part.get("torch_dtype") or part.get("dtype")) for part in parts]
    return next((name for name in names if name in DTYPES), "bfloat16")


def dtype_of(model: nn.Module) -> str:
    """The dtype of most tensors of a model that are not quantized, such as norms."""
    return dtype_name(dense_dtype(dict(tree_flatten(model.parameters()))))


def dense_dtype(weights: Mapping[str, mx.array]) -> mx.Dtype:
    """The dtype of most tensors of a checkpoint that are not quantized, such as norms."""
    dtypes = [
        w.dtype
        for name, w in weights.items()
        if name.endswith((".weight", ".bias")) and w.dtype in DTYPES.values()
    ]
    if not dtypes:
        return mx.bfloat16
    return max(set(dtypes), key=dtypes.count)


def with_rounded_scales(
    weights: Mapping[str, mx.array], config: Mapping, dtype: mx.Dtype
) -> dict[str, mx.array]:
    """Weights with the float32 scales of K-quants in ``dtype``, which a device computes in.

    MLX multiplies in the widest dtype, so activations would become float32 otherwise.
    """
    rounded = dict(weights)
    if K_QUANTS in config:
        for name, tensor in weights.items():
            if name.endswith((".scales", ".biases")) and tensor.dtype == mx.float32:
                rounded[name] = tensor.astype(dtype)
    return rounded


def _chip_without_bfloat16() -> str | None:
    """The name of this machine's GPU if it has no native bfloat16; none is measured for a plan."""
    chip = chips.chip()
    has_gpu = mx.default_device() != mx.Device(mx.cpu)
    if chip is None and has_gpu:
        chip = chips.chip_here()

    if chip is None or chip.native_bf16:
        return None
    return chip.name
