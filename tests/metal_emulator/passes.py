"""The passes before a run: MLX's text, what Metal rejects, the size of threadgroup memory."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import cuda_source, metal_source, toolchain
from .launch import Call, Definition, Program
from .lint import lint_llvm, lint_words, threadgroup_bytes
from .report import Checks, KernelFault, Report
from .toolchain import HERE, OPTIMIZED_FLAGS, STRICT_FLAGS, SYNTAX_FLAGS, CompileError

METAL_SHIM, CUDA_SHIM = HERE / "shim", HERE / "shim" / "cuda"
CUDA_SHARED_BYTES = 49152


@dataclass(frozen=True)
class Compiled:
    """A call that a device's compiler and launch would take, as far as can be seen without one."""

    program: Program
    report: Report
    group: tuple[int, int, int]
    threadgroup_limit: int

    def library(self, cuda: bool) -> Path:
        """The library for the run."""
        try:
            return toolchain.build(self.program.run_text, CUDA_SHIM if cuda else METAL_SHIM)
        except CompileError as error:
            raise KernelFault("compile", self.program.name, str(error)) from None


def compile_call(language: str, definition: Definition, call: Call, checks: Checks) -> Compiled:
    """All that can be checked of a call without running it; a broken rule is a ``KernelFault``."""
    cuda = language == "cuda"
    call.check(definition, checks)
    program = (cuda_source if cuda else metal_source).prepare(definition, call)
    if not cuda and len(program.buffers) > checks.buffers:
        message = f"{len(program.buffers)} buffers, the limit is {checks.buffers}"
        raise KernelFault("launch", definition.name, message)
    if cuda:
        used = _check_cuda(program)
    else:
        used = _check_metal(program) if checks.strict else 0
    limit = CUDA_SHARED_BYTES if cuda else checks.threadgroup_bytes
    if used > limit:
        message = f"threadgroup arrays take {used} bytes, the limit is {limit}"
        raise KernelFault("threadgroup memory", definition.name, message)
    # Metal runs the threads of the grid and no more; CUDA rounds up to whole groups.
    sizes = zip(call.threadgroup, call.grid, strict=True)
    group = call.threadgroup if cuda else tuple(max(1, min(t, g)) for t, g in sizes)
    groups = [-(-threads // size) for threads, size in zip(call.grid, group, strict=True)]
    report = Report(
        threads_per_group=group[0] * group[1] * group[2],
        groups=groups[0] * groups[1] * groups[2],
        threadgroup_bytes=used,
    )
    return Compiled(program, report, group, limit)


def private_arrays(definition: Definition, call: Call) -> list[str]:
    """Arrays of a Metal thread that an optimizing compiler cannot keep in registers.

    An index that it does not know puts an array into memory of the thread, which is device memory.
    """
    program = metal_source.prepare(definition, call)
    llvm = _llvm(program, program.strict_text, METAL_SHIM, OPTIMIZED_FLAGS)
    return re.findall(r"^\s*(%\S+ = alloca .*)$", llvm, re.MULTILINE)


@functools.cache  # a text is the same for many shapes
def _check_metal(program: Program) -> int:
    """The strict pass: types, address spaces, and language that Metal does not have."""
    _refuse(program.name, lint_words(program.source), program.source)
    llvm = _llvm(program, program.strict_text, METAL_SHIM, STRICT_FLAGS)
    _refuse(program.name, lint_llvm(llvm, metal=True), program.source)
    return threadgroup_bytes(llvm)


@functools.cache
def _check_cuda(program: Program) -> int:
    """The twin compiles, and computes nothing in double."""
    llvm = _llvm(program, program.run_text, CUDA_SHIM, SYNTAX_FLAGS)
    _refuse(program.name, lint_llvm(llvm, metal=False), program.source)
    return threadgroup_bytes(llvm)


def _llvm(program: Program, text: str, include: Path, flags: Sequence[str]) -> str:
    try:
        return toolchain.llvm(text, include, flags)
    except CompileError as error:
        raise KernelFault("compile", program.name, str(error)) from None


def _refuse(kernel: str, problems: list[str], source: str) -> None:
    if problems:
        raise KernelFault("lint", kernel, quote("; ".join(problems), source))


def quote(message: str, source: str) -> str:
    """The message, and the source lines that it speaks of."""
    lines = source.splitlines()
    numbers = dict.fromkeys(int(n) for n in re.findall(r"\bline (\d+)", message))
    shown = [f"\n  {n}: {lines[n - 1].strip()}" for n in numbers if 0 < n <= len(lines)]
    return message + "".join(shown)
