"""Compare a kernel with its reference: outputs and every gradient, exactly where sums are exact.

The bound is the plain op's own error: a kernel may be no further from a float64 truth than plain
MLX in the same dtype, but for a rounding of the result. Where all sums are exact, the kernel must
give the truth itself, rounded once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..runtime import mx

Op = Callable[..., Sequence[mx.array]]
_FLOATS = (mx.float32, mx.float16, mx.bfloat16)


@dataclass(frozen=True)
class Check:
    """One set of inputs for a kernel and its reference; both give a list of arrays."""

    name: str
    kernel: Op
    reference: Op
    inputs: Sequence[mx.array]
    exact: bool = False  # all sums are small integers, so that any order gives the same bits
    alone: bool = False  # the kernel is the reference, off by roundings of its inputs' dtype alone


@dataclass(frozen=True)
class Finding:
    """The largest error of a check, relative to the largest number of that output or gradient."""

    max_error: float
    fault: str | None


def examine(check: Check) -> Finding:
    """Return the result of a check: of outputs, and of gradients for every floating-point input."""
    computed = outputs_and_gradients(check.kernel, check.inputs)
    plain = outputs_and_gradients(check.reference, check.inputs)
    mx.eval(computed, plain)

    worst = 0.0
    fault = None
    roundings = 8 * max(_rounding(v.dtype) for v in check.inputs if v.dtype in _FLOATS)

    with mx.stream(mx.cpu):  # GPUs have no float64
        doubles = [v.astype(mx.float64) if v.dtype in _FLOATS else v for v in check.inputs]
        truth = outputs_and_gradients(check.reference, doubles)
        mx.eval(truth)

        for name, value in computed.items():
            if check.exact:
                error = _error(value, truth[name].astype(value.dtype))
                allowed = 0.0
            else:
                error = _error(value, truth[name])
                plain_error = _error(plain[name], truth[name])
                allowed = roundings if check.alone else plain_error + _rounding(value.dtype)

            if value.dtype != plain[name].dtype or value.shape != plain[name].shape:
                fault = fault or f"{check.name}: {name} is {value.dtype} {value.shape}"
            if not error <= allowed:  # NaN too
                off = f"{check.name}: {name} is off by {error:.1e}, allowed {allowed:.1e}"
                fault = fault or off
            if not error <= worst:
                worst = error
    return Finding(worst, fault)


def first_fault(checks: Sequence[Check]) -> str | None:
    """Return the first fault of a kernel, or None."""
    for check in checks:
        fault = examine(check).fault
        if fault is not None:
            return fault
    return None


def outputs_and_gradients(op: Op, inputs: Sequence[mx.array]) -> dict[str, mx.array]:
    """Return the outputs of an op, and the gradient of each floating-point input."""
    floating = [i for i, v in enumerate(inputs) if v.dtype in (*_FLOATS, mx.float64)]

    def of_floats(*floats: mx.array) -> list[mx.array]:
        values = list(inputs)
        for i, v in zip(floating, floats, strict=True):
            values[i] = v
        return list(op(*values))

    primals = [inputs[i] for i in floating]
    outputs = of_floats(*primals)
    # exact in every dtype
    cotangents = [sparse_signs(y.shape, i).astype(y.dtype) for i, y in enumerate(outputs)]
    _, gradients = mx.vjp(of_floats, primals, cotangents)

    arrays = {f"output {i}": y for i, y in enumerate(outputs)}
    arrays |= {f"gradient {i}": g for i, g in zip(floating, gradients, strict=True)}
    return arrays


def sparse_signs(shape: Sequence[int], seed: int) -> mx.array:
    """Return mostly zeros, else 1 or -1, in float32: products and sums of a few are exact."""
    drawn = mx.random.randint(-3, 4, tuple(shape), key=mx.random.key(seed))
    return mx.where(mx.abs(drawn) == 3, mx.sign(drawn), 0).astype(mx.float32)


def seeded(shapes: Sequence[Sequence[int]], exact: bool) -> list[mx.array]:
    """Return inputs of these shapes in float32, whose sums are exact if that is asked for."""
    draw = sparse_signs if exact else normal
    return [draw(shape, i) for i, shape in enumerate(shapes)]


def normal(shape: Sequence[int], seed: int) -> mx.array:
    """Return random numbers that depend on the seed alone, in float32."""
    return mx.random.normal(tuple(shape), key=mx.random.key(seed))


def _error(value: mx.array, truth: mx.array) -> float:
    """Return the largest difference, relative to the largest number of the truth."""
    if truth.size == 0:
        return 0.0
    truth = truth.astype(mx.float64)
    largest = mx.maximum(mx.abs(truth).max(), 1e-30)
    return float((mx.abs(value.astype(mx.float64) - truth).max() / largest).item())


def _rounding(dtype: mx.Dtype) -> float:
    """Return the error of one rounding, but of 8 in float32, whose sums are no finer."""
    roundings = 8 if dtype == mx.float32 else 1
    return roundings * float(mx.finfo(dtype).eps)
