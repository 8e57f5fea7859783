"""The architectures of mlx-lm that cannot be trained, with the reason.

Every other one can; docs/families.md lists them all, and tests/bases/test_families.py trains each.
"""

from importlib import metadata

import mlx.nn as nn

from ..errors import PackError
from ..nn.experts import is_switch_linear
from ..runtime import mx

# By the name of the module in mlx_lm.models.
UNTRAINABLE = {
    "bitnet": "its projections (BitLinear) are a kernel for Metal that has no gradient",
    "dbrx": "its experts are chosen on the host, which a compiled step cannot do",
    "deepseek_v41": "its router lets gradients into indices, which MLX refuses",
    "muse_spark": "its attention and norms are kernels for Metal that have no gradient",
    "olmo": "mlx-lm needs the package ai2-olmo for it and ends the program without",
    "prism_hadamard_qwen35": "its projections are HadamardQuantizedLinear, which carry no adapters",
    "recurrent_gemma": "mlx-lm's Model is not set up as a module and cannot be frozen",
}
UNTRAINABLE_ON_METAL = {
    "rwkv7": "its kernel for Metal (the recurrence) has no gradient",
}
MIXTURES_SINCE = (0, 32)  # of mlx-lm


def family_of(model: nn.Module) -> str:
    """The module of mlx_lm.models that a model comes from, or where else it is defined."""
    return type(model).__module__.rpartition(".")[2]


def why_untrainable(family: str) -> str | None:
    """Why a family cannot be trained on this device; None if it can."""
    on_metal = mx.default_device() == mx.gpu and mx.metal.is_available()
    if on_metal and family in UNTRAINABLE_ON_METAL:
        return f"{UNTRAINABLE_ON_METAL[family]}; a CPU or CUDA trains it"
    return UNTRAINABLE.get(family)


def check_trainable(name: str, model: nn.Module) -> None:
    """Raises: PackError with the reason, if a model is of a family that cannot be trained."""
    family = family_of(model)
    reason = why_untrainable(family)
    if reason is None and any(is_switch_linear(m) for m in model.modules()):
        reason = _why_no_mixture()
    if reason:
        raise PackError(f"{name}: mlx-lm's {family} cannot carry adapters: {reason}.")


def version_of_mlx_lm() -> tuple[int, int]:
    """Major and minor version of the mlx-lm that is installed."""
    major, minor = metadata.version("mlx-lm").split(".")[:2]
    return int(major), int(minor)


def _why_no_mixture() -> str | None:
    if version_of_mlx_lm() >= MIXTURES_SINCE:
        return None
    return (
        f"in mlx-lm {metadata.version('mlx-lm')} gradients reach the indices of a mixture's "
        "experts, which MLX refuses; upgrade mlx-lm (0.32 needs Python 3.11)"
    )
