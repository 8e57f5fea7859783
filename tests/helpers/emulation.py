"""Backends whose kernels run in the emulator, or on the GPU that this machine has, and its rules."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from mlx_packs.ops import _backend, dispatch
from mlx_packs.runtime import mx
from tests import metal_emulator


@contextmanager
def gpu_rules(patch) -> Iterator[None]:
    """Reject what MLX rejects where the default device is a GPU: float64 outside the CPU's stream.

    Only casts are watched; that is how float64 arrays come to be here.
    """
    on_cpu = []
    stream, astype = mx.stream, mx.array.astype

    @contextmanager
    def watched(device):
        with stream(device):
            on_cpu.append(device)
            try:
                yield
            finally:
                on_cpu.pop()

    def cast(self, dtype, *args, **kwargs):
        if not on_cpu and mx.float64 in (self.dtype, dtype):
            raise ValueError("float64 is not supported on the GPU")
        return astype(self, dtype, *args, **kwargs)

    patch.setattr(mx, "stream", watched)
    patch.setattr(mx.array, "astype", cast)
    yield


class Emulated(NamedTuple):
    """A backend whose kernels run in the emulator, and the kernels that were built."""

    backend: str
    built: list

    def launches(self) -> Counter[str]:
        """How often each kernel ran, by its name without the ranks."""
        names = ("down", "up")
        return Counter(
            next(
                (n for n in names if f"lora_{n}" in kernel.definition.name), kernel.definition.name
            )
            for kernel in self.built
            for _ in kernel.reports
        )


class OnDevice:
    """A kernel that runs on this machine's GPU, and counts its runs as those of the emulator do."""

    def __init__(self, make: Callable, definition: dict) -> None:
        self.definition = SimpleNamespace(**definition)
        self.reports: list[SimpleNamespace] = []
        self._kernel = make(**definition)

    def __call__(self, **arguments) -> list[mx.array]:
        outputs = self._kernel(**arguments)
        threads, *_ = arguments["threadgroup"]
        self.reports.append(
            SimpleNamespace(
                threads_per_group=threads,
                threadgroup_bytes=0,
                half_operations=0,
                bfloat_operations=0,
            )
        )
        return outputs


def gpu_language() -> str | None:
    """The language of the kernels of this machine's GPU; None where MLX computes on a CPU."""
    if mx.default_device() == mx.Device(mx.cpu):
        return None
    return "metal" if mx.metal.is_available() else "cuda"


@contextmanager
def on_device(language: str) -> Iterator[list[OnDevice]]:
    """Let kernels run on the GPU that MLX computes on; gives the list of those built."""
    make = _backend.MAKERS[language]
    built = []

    def maker(**definition):
        built.append(OnDevice(make, definition))
        return built[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(_backend.MAKERS, language, maker)
        _forget_kernels()
        yield built
    _forget_kernels()


@contextmanager
def emulation(language: str, orders=("forward", "reverse", "shuffled"), compile_only=False):
    """Make a backend available whose kernels run in the emulator; gives the list of those built.

    Where MLX computes on a GPU, the kernels of that GPU's language run there instead.
    """
    if gpu := gpu_language():
        if gpu != language:
            pytest.skip(f"this machine's kernels are in '{gpu}'")
        with on_device(language) as built:
            yield built
        return

    if reason := metal_emulator.why_not():
        pytest.skip(reason)
    make = {"metal": metal_emulator.metal_kernel, "cuda": metal_emulator.cuda_kernel}[language]
    built = []

    def maker(**definition):
        built.append(make(**definition, checks=metal_emulator.Checks(orders=orders)))
        built[-1].compile_only = compile_only
        return built[-1]

    with pytest.MonkeyPatch.context() as patch, gpu_rules(patch):
        patch.setitem(_backend.MAKERS, language, maker)
        patch.setattr(dispatch, "detect", lambda: language)
        _forget_kernels()
        yield built
    _forget_kernels()


def forget_verdicts() -> None:
    """Decide on kernels again, as in a new process."""
    for known in (_backend._checked, _backend._fallbacks, _backend._decided, _backend._launched):
        known.clear()


def _forget_kernels() -> None:
    forget_verdicts()
    _backend._built.cache_clear()


def failing_maker(kind: str, maker: Callable) -> Callable:
    """A maker of kernels that do not compile, that raise when run, or that are wrong."""

    def make(**definition):
        if kind == "compile":
            raise RuntimeError("[metal::Device] Unable to build metal library from source")
        kernel = maker(**definition)

        def run(**arguments):
            if kind == "exception":
                raise ValueError("threadgroup of 256 exceeds the pipeline's limit of 224")
            outputs = kernel(**arguments)
            return [v + mx.where(mx.arange(v.size).reshape(v.shape) == 5, 0.5, 0) for v in outputs]

        return run

    return make
