"""One call of a kernel, as MLX takes it, checked for what a device would reject."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from .report import Checks, KernelFault

Template = Sequence[tuple[str, int | bool | mx.Dtype]]
Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Definition:
    """The arguments of ``mx.fast.metal_kernel`` or ``mx.fast.cuda_kernel``."""

    name: str
    input_names: Sequence[str]
    output_names: Sequence[str]
    source: str
    header: str = ""
    ensure_row_contiguous: bool = True
    atomic_outputs: bool = False


@dataclass(frozen=True)
class Call:
    """The arguments of the object that those functions return."""

    inputs: tuple[mx.array, ...]
    output_shapes: tuple[tuple[int, ...], ...]
    output_dtypes: Sequence[mx.Dtype]
    grid: Triple
    threadgroup: Triple
    template: Template = ()
    init_value: float | None = None

    def check(self, definition: Definition, checks: Checks) -> None:
        """Check what a device rejects."""
        threads = math.prod(self.threadgroup)
        if threads > checks.threads_per_group:
            message = f"{threads} threads in a threadgroup, the limit is {checks.threads_per_group}"
            raise KernelFault("launch", definition.name, message)


@dataclass(frozen=True)
class Program:
    """A kernel made ready: C++ for the run, and what its entry wants in each buffer."""

    name: str
    source: str  # as the device's compiler would get it
    run_text: str
    buffers: tuple[str, ...]  # names of parameters: input, input_shape, ..., output
    strict_text: str = ""  # of Metal alone: the same source for the face that checks types
