"""Cases of kernels in each dtype, and a weight of zeros."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from mlx.utils import tree_flatten

from mlx_packs.ops import nf4
from mlx_packs.runtime import mx
from tests.helpers.variants import nightly_except, slow_except

DTYPES = (mx.float32, mx.bfloat16, mx.float16)


def by_dtype(cases: Iterable, some: Iterable) -> list:
    """Each case in each dtype: some in the default suite, all in float32 slow, the rest nightly.

    Half precisions differ from float32 in how numbers are read and written.
    """
    cases = list(cases)
    default = [(dtype, case) for dtype in DTYPES for case in some]
    slow = [(mx.float32, case) for case in cases if case not in some]
    nightly = [(d, case) for d in DTYPES[1:] for case in cases if case not in some]
    return [*default, *slow_except(slow), *nightly_except(nightly)]


def output_and_gradients(function: Callable, arrays: list[mx.array]) -> list[mx.array]:
    """The output of a function, and the gradients of its weighted sum."""
    return outputs_and_gradients(lambda *a: [function(*a)], arrays)


def outputs_and_gradients(op: Callable, trained: list, *others) -> list[mx.array]:
    """The outputs of an op on several projections, and the gradients of what is trained.

    Of a weighted sum of all outputs, in the order of the arguments.
    """
    results = op(*trained, *others)
    weights = [mx.random.normal(y.shape, key=mx.random.key(i)) for i, y in enumerate(results)]

    def loss(*trained):
        results = op(*trained, *others)
        return sum((y * w).sum() for y, w in zip(results, weights, strict=True))

    gradients = mx.grad(loss, argnums=tuple(range(len(trained))))(*trained)
    return [*results, *(gradient for _, gradient in tree_flatten(list(gradients)))]


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
