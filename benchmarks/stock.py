"""Stock MLX for a baseline that runs in a process where mlx_packs has changed MLX.

Importing mlx_packs changes two things for the whole process on a Linux CPU (mlx_packs/runtime.py):
libmlx's matrix products go to OpenBLAS, and `mx.compile` is off. A baseline would silently gain from
the first and lose from the second. Here each can be undone temporarily.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from mlx_packs import runtime
from mlx_packs.cpu.blas import gemm_slots, loaded_library
from mlx_packs.runtime import mx

REFERENCE_BLAS = "reference (MLX wheel)"


def blas_name() -> str:
    """Return the file name of the library that multiplies matrices now, without its folder."""
    return Path(runtime.BLAS.name).name


def blas_is_replaced() -> bool:
    """Return whether another library than MLX's own multiplies matrices."""
    return runtime.BLAS.bound


@contextmanager
def mlx(reference_blas: bool) -> Iterator[None]:
    """Run stock MLX: with `mx.compile` and, if requested, the BLAS of MLX's own wheel."""
    with _compile_on(), _reference_blas() if reference_blas else nullcontext():
        yield


@contextmanager
def _reference_blas() -> Iterator[None]:
    """Matrix products by the library of MLX's own wheel; the real one is back on leaving."""
    slots = gemm_slots()
    libmlx = ctypes.CDLL(_libmlx_file())
    bound = {symbol: slot.value for symbol, slot in slots.items()}
    try:
        for symbol, slot in slots.items():
            # dlsym on a library's handle finds what the library itself was linked with
            slot.value = ctypes.cast(getattr(libmlx, symbol), ctypes.c_void_p).value
        yield
    finally:
        for symbol, slot in slots.items():
            slot.value = bound[symbol]


def _libmlx_file() -> str:
    """The path that libmlx.so was loaded from."""
    return os.fsdecode(loaded_library("libmlx.so").path)


@contextmanager
def _compile_on() -> Iterator[None]:
    """Let `mx.compile` compile; whether it did before is restored on leaving."""
    was_on = compiles()
    mx.enable_compile()
    try:
        yield
    finally:
        if not was_on:
            mx.disable_compile()


def compiles() -> bool:
    """Whether `mx.compile` compiles now: a compiled function is traced once for two calls."""
    traces = []

    def traced(x: mx.array) -> mx.array:
        traces.append(x)
        return x + 1

    compiled = mx.compile(traced)
    compiled(mx.array(0.0)), compiled(mx.array(0.0))
    return len(traces) == 1
