"""Which backend computes an op: plain MLX (the reference), or kernels for Metal or CUDA.

The default follows the device; a name forces one. The module of an op has its reference alone. Its
kernels are in a module of their own, which is imported when a GPU first asks.
"""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from ..errors import PackError
from ..runtime import mx, on_cpu

BACKENDS = ("reference", "metal", "cuda")
VARIABLE = "MLX_PACKS_BACKEND"
KERNELS = {  # by op: the module with its launches, checks and plans
    "grouped_lora": "mlx_packs.ops.grouped_lora_kernel",
    "multi_lora": "mlx_packs.ops.multi_lora_kernel",
    "lora_qmv": "mlx_packs.ops.lora_qmv_kernel",
    "nf4": "mlx_packs.ops.nf4_kernel",
    "gated_delta": "mlx_packs.ops.gated_delta_kernel",
}

_forced: str | None = None


def detect() -> str:
    """Return the backend of MLX's default device."""
    if on_cpu():
        return "reference"
    return "metal" if mx.metal.is_available() else "cuda"


def forced() -> str | None:
    """Return the backend specified by name, here or in the environment.

    Raises:
        PackError: There is no such backend, or not on this machine.
    """
    name = _forced
    source = "--backend"
    if name is None:
        name = os.environ.get(VARIABLE) or None
        source = VARIABLE
    if name is None:
        return None

    if name not in BACKENDS:
        choices = ", ".join(BACKENDS)
        raise PackError(f"{source} {name}: must be one of {choices}.", "unknown", "backend")
    if name not in ("reference", here := detect()):
        raise PackError(
            f"{source} {name}: is not available. MLX computes by '{here}' here.",
            "unsupported",
            "backend",
        )
    return name


@contextmanager
def backend(name: str | None) -> Iterator[None]:
    """Compute every operation with one backend inside a ``with`` block.

    Args:
        name: ``"reference"`` (plain MLX), ``"metal"`` or ``"cuda"``; None returns to the choice by
            environment and device.

    Raises:
        PackError: If there is no such backend, or not on this machine.
    """
    global _forced
    before = _forced
    _forced = name
    try:
        forced()
        yield
    finally:
        _forced = before


def kernels(op: str) -> ModuleType | None:
    """Return the module with the kernels of an op; None where plain MLX computes everything."""
    if (forced() or detect()) == "reference":
        return None
    return importlib.import_module(KERNELS[op])
