"""One call of a kernel, as MLX takes it, checked for what a device would reject."""

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
    output_dtypes: tuple[mx.Dtype, ...]
    grid: Triple
    threadgroup: Triple
    template: Template = ()
    init_value: float | None = None

    def check(self, definition: Definition, checks: Checks) -> None:
        """Check what both back ends of MLX, or their drivers, reject."""

        def refuse(message: str) -> None:
            raise KernelFault("launch", definition.name, message)

        pairs = (
            ("inputs", self.inputs, definition.input_names),
            ("output_shapes", self.output_shapes, definition.output_names),
            ("output_dtypes", self.output_dtypes, definition.output_names),
        )
        for argument, values, names in pairs:
            if len(values) != len(names):
                refuse(f"`{argument}` must have size {len(names)} but got {len(values)}")
        if min(self.grid) < 0 or min(self.threadgroup) < 1:
            refuse(f"grid {self.grid} and threadgroup {self.threadgroup} must be positive")
        threads = self.threadgroup[0] * self.threadgroup[1] * self.threadgroup[2]
        if threads > checks.threads_per_group:
            refuse(f"{threads} threads in a threadgroup, the limit is {checks.threads_per_group}")


@dataclass(frozen=True)
class Program:
    """A kernel made ready: C++ for the run, and what its entry wants in each buffer."""

    name: str
    source: str  # as the device's compiler would get it
    run_text: str
    buffers: tuple[str, ...]  # names of parameters: input, input_shape, ..., output
