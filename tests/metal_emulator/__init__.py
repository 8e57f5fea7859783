"""Runs the text of Metal kernels, and of their CUDA twins, on Linux, with every access checked.

``metal_kernel`` and ``cuda_kernel`` take the arguments of their namesakes in ``mx.fast`` and return
an object that is called like theirs. README.md says how it works and what it catches.
"""

from .kernel import EmulatedKernel, cuda_kernel, metal_kernel
from .report import Checks, KernelFault
from .toolchain import why_not

__all__ = ["Checks", "EmulatedKernel", "KernelFault", "cuda_kernel", "metal_kernel", "why_not"]
