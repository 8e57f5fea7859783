"""Runs the text of Metal kernels, and of their CUDA twins, on Linux, with every access checked.

``metal_kernel`` and ``cuda_kernel`` take the arguments of their namesakes in ``mx.fast`` and return
an object that is called like theirs. README.md says how it works and what it catches.
"""

from .kernel import EmulatedKernel, cuda_kernel, emulate, metal_kernel
from .launch import Call, Definition
from .passes import compile_call
from .report import Checks, KernelFault, Report
from .toolchain import find_toolchain, why_not

__all__ = [
    "Call",
    "Checks",
    "Definition",
    "EmulatedKernel",
    "KernelFault",
    "Report",
    "compile_call",
    "cuda_kernel",
    "emulate",
    "find_toolchain",
    "metal_kernel",
    "why_not",
]
