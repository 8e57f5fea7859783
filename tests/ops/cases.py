"""Cases of kernels in each dtype, and a weight of zeros."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from mlx_packs.ops import nf4
from mlx_packs.runtime import mx

DTYPES = (mx.float32, mx.bfloat16, mx.float16)


def by_dtype(cases: Iterable, some: Iterable) -> list:
    """Each case in each dtype; those in half precision are slow, but for some.

    Half precisions differ from float32 in how numbers are read and written.
    """
    return [
        pytest.param(
            dtype, case, marks=() if dtype == mx.float32 or case in some else pytest.mark.slow
        )
        for dtype in DTYPES
        for case in cases
    ]


def quantized_weight(outputs: int, depth: int, double_quant: bool) -> nf4.NF4Weight:
    """A weight of zeros in the blocks of 64 that QLoRA takes."""
    blocks = outputs * depth // 64
    codes = mx.zeros((outputs, depth // 2), mx.uint8)
    if not double_quant:
        return nf4.NF4Weight(codes, mx.zeros((blocks,)))
    nested = mx.zeros((-(-blocks // 256),))
    return nf4.NF4Weight(codes, mx.zeros((blocks,), mx.uint8), nested, mx.zeros((1,)))


def with_workload(instance, workload):
    """An instance that is timed on other inputs."""
    return replace(instance, spec=replace(instance.spec, workload=workload))
