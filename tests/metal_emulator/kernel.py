"""Kernels that run here: the same call as MLX's, emulated instead of launched."""

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from . import machine
from .launch import Call, Definition, Program
from .passes import Compiled, compile_call, quote
from .report import Checks, KernelFault, Report


class EmulatedKernel:
    """What ``mx.fast.metal_kernel`` returns, for this machine: call it with the same arguments.

    With ``compile_only`` set, a call is checked but not run, and gives zeros: for real model sizes.
    """

    def __init__(self, language: str, definition: Definition, checks: Checks) -> None:
        self.language = language
        self.definition = definition
        self.checks = checks
        self.reports: list[Report] = []
        self.compile_only = False
        self._last: tuple = ()  # a call, its outputs and report: a gradient repeats it

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array | float],
        output_shapes: Sequence[Sequence[int]],
        **arguments,
    ) -> list[mx.array]:
        """The outputs; the report of the run is appended to ``reports``."""
        arrays = tuple(x if isinstance(x, mx.array) else mx.array(x) for x in inputs)
        call = Call(arrays, tuple(map(tuple, output_shapes)), **arguments)
        if self.compile_only:
            report = compile_call(self.language, self.definition, call, self.checks).report
            self.reports.append(report)
            shapes = zip(output_shapes, call.output_dtypes, strict=True)
            return [mx.zeros(shape, dtype) for shape, dtype in shapes]
        values = [(x.shape, x.dtype, _bytes(x)) for x in call.inputs]
        key = (replace(call, inputs=()), values)
        if not self._last or self._last[0] != key:
            self._last = (key, *emulate(self.language, self.definition, call, self.checks))
        _, outputs, report = self._last
        self.reports.append(report)
        return outputs


def metal_kernel(*definition, checks: Checks = Checks(), **named) -> EmulatedKernel:  # noqa: B008
    """``mx.fast.metal_kernel`` for this machine."""
    return EmulatedKernel("metal", Definition(*definition, **named), checks)


def cuda_kernel(*definition, checks: Checks = Checks(), **named) -> EmulatedKernel:  # noqa: B008
    """``mx.fast.cuda_kernel`` for this machine, without dynamic shared memory."""
    return EmulatedKernel("cuda", Definition(*definition, **named), checks)


def emulate(
    language: str, definition: Definition, call: Call, checks: Checks
) -> tuple[list[mx.array], Report]:
    """Compiles, checks and runs one call; a broken rule raises ``KernelFault``."""
    compiled = compile_call(language, definition, call, checks)
    try:
        return _run_all(compiled, language == "cuda", definition, call, checks)
    except KernelFault as fault:
        message = quote(fault.message, compiled.program.source)
        raise KernelFault(fault.kind, fault.kernel, message) from None


def _run_all(
    compiled: Compiled, cuda: bool, definition: Definition, call: Call, checks: Checks
) -> tuple[list[mx.array], Report]:
    """One run for each order of the threads; all must give the same bytes."""
    library, report = compiled.library(cuda), compiled.report
    first: list[machine.Buffer] = []
    for order in checks.orders:
        buffers = _buffers(compiled.program, definition, call)
        if 0 not in call.grid:
            machine.run(
                library,
                definition.name,
                buffers,
                call.grid,
                compiled.group,
                whole_groups=cuda,
                order=order,
                threadgroup_limit=compiled.threadgroup_limit,
                report=report,
            )
        outputs = [buffer for buffer in buffers if buffer.output]
        first = first or outputs
        for a, b in zip(first, outputs, strict=True):
            if a.data != b.data and not definition.atomic_outputs:
                message = f"`{a.name}` differs between the orders {checks.orders[0]} and {order}"
                raise KernelFault("order", definition.name, message)

    report.unwritten = {b.name: b.unwritten for b in first if b.unwritten}
    poisoned = call.init_value is None or call.init_value != call.init_value
    if report.unwritten and poisoned and 0 not in call.grid:
        shown = ", ".join(f"{n} bytes of `{name}`" for name, n in report.unwritten.items())
        raise KernelFault("unwritten", definition.name, f"the kernel never writes {shown}")
    half, bfloat = report.half_operations, report.bfloat_operations
    if half + bfloat and not checks.low_precision:
        message = (
            f"{half} operations in half and {bfloat} in bfloat; compute in float and round once"
        )
        raise KernelFault("precision", definition.name, message)
    described = zip(first, call.output_shapes, call.output_dtypes, strict=True)
    return [_array(b, s, d) for b, s, d in described], report


_SAME_SIZE = {mx.bfloat16: mx.uint16}  # numpy has no bfloat16


def _bytes(array: mx.array) -> bytes:
    flat = mx.contiguous(array).reshape(-1)
    return np.array(flat.view(_SAME_SIZE.get(array.dtype, array.dtype))).tobytes()


def _array(buffer: machine.Buffer, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    seen = _SAME_SIZE.get(dtype, dtype)
    values = np.frombuffer(buffer.data, dtype=str(seen).rpartition(".")[2]).reshape(shape)
    return mx.array(values, dtype=seen).view(dtype) if buffer.data else mx.zeros(shape, dtype)


def _buffers(program: Program, definition: Definition, call: Call) -> list[machine.Buffer]:
    """Memory for each parameter, in order: inputs with their shapes, then poisoned outputs."""
    known: dict[str, bytes] = {}
    for name, array in zip(definition.input_names, call.inputs, strict=True):
        strides = [int(np.prod(array.shape[i + 1 :])) for i in range(array.ndim)]
        # CUDA passes shapes by value, in arrays of MAX_NDIM elements.
        known[name] = _bytes(array)
        known[f"{name}_shape"] = np.resize(np.array(array.shape, np.int32), 8).tobytes()
        known[f"{name}_strides"] = np.resize(np.array(strides, np.int64), 8).tobytes()
        known[f"{name}_ndim"] = np.array(array.ndim, np.int32).tobytes()
        if program.strict_text:
            known[f"{name}_shape"] = known[f"{name}_shape"][: 4 * array.ndim]
            known[f"{name}_strides"] = known[f"{name}_strides"][: 8 * array.ndim]
    buffers = []
    count = len(program.buffers) - len(definition.output_names)
    for name in program.buffers[:count]:
        buffers.append(machine.Buffer(name, known[name]))
    for name, shape, dtype in zip(
        definition.output_names, call.output_shapes, call.output_dtypes, strict=True
    ):
        poison = b"\xff" * (int(np.prod(shape)) * dtype.size)
        filled = call.init_value is not None and call.init_value == call.init_value
        data = _bytes(mx.full(shape, call.init_value, dtype)) if filled else poison
        buffers.append(machine.Buffer(name, data, output=True, initialised=filled))
    return buffers
