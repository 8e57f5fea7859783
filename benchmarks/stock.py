"""MLX as its users have it, for a peer that runs in a process where mlx_packs has changed it.

Importing mlx_packs changes two things for the whole process on a Linux CPU (mlx_packs/runtime.py):
libmlx's matrix products go to a real BLAS, and `mx.compile` is off. A peer would profit from the
first and suffer from the second unseen. Here each can be undone for a while.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from mlx_packs import elf, runtime
from mlx_packs.blas import gemm_slots
from mlx_packs.runtime import mx

REFERENCE_BLAS = "reference (MLX wheel)"


def blas_name() -> str:
    """File name of the library that multiplies matrices now, without its folder."""
    return Path(runtime.BLAS.name).name


def blas_is_replaced() -> bool:
    """Whether matrices are multiplied by another library than MLX brings."""
    return runtime.BLAS.bound


@contextmanager
def mlx(reference_blas: bool) -> Iterator[None]:
    """MLX as a peer has it: `mx.compile` on and, if asked for, the BLAS of MLX's own wheel."""
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
    return elf.library_segments("libmlx.so", elf.own_maps())[0].path


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
