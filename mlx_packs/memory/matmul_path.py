"""Choose how the frozen weights are used, by measuring it on this machine.

For each distinct weight shape of the base the three paths run forward and backward on as many
tokens as a batch of the run has; their times are added up over the base, which takes one path: a
path for each kind of weight never won more than 3 % (benchmarks/LOG.md). A path that cannot fit
into memory is not taken, and the measurement of one that is far behind ends early.
"""

import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import partial

import mlx.nn as nn

from .. import runtime
from ..config.choices import MATMUL_PATHS
from ..nn.quantized import (
    EMBEDDINGS,
    PATHS,
    dense_dtype,
    dense_module,
    quantized_modules,
    true_shape,
)
from ..runtime import mx

_MEASURED_ROWS = 512
_FAR_BEHIND = 3.0  # times the best so far
_DENSE_SHARE = 0.6  # of the memory that is left


@dataclass(frozen=True)
class KindTimes:
    """Times of the weights of one shape (out, in) and quantization.

    Attributes:
        names: The last names of their paths.
        count: How many a step multiplies.
        step_ms: Milliseconds a step that each matmul path would take for all of them.
    """

    names: tuple[str, ...]
    shape: tuple[int, int]
    count: int
    step_ms: dict[str, float]

    def line(self) -> str:
        """Return the times for the log."""
        parts = [f"{name} {ms:,.1f} ms" for name, ms in self.step_ms.items()]
        return f"{self.count} x {list(self.shape)} {', '.join(self.names)}: {' · '.join(parts)}"


@dataclass(frozen=True)
class MatmulPathChoice:
    """A matmul path, and why.

    Attributes:
        step_ms: Milliseconds a step that each measured path would take.
        reason: Why a faster one was left out, or nothing was measured.
    """

    matmul_path: str
    step_ms: dict[str, float]
    reason: str
    kinds: tuple[KindTimes, ...] = ()

    def line(self) -> str:
        """Return the times and the choice for the log."""
        times = " · ".join(f"{name} {ms:,.0f} ms" for name, ms in self.step_ms.items())
        choice = f"{times} → {self.matmul_path}" if times else self.matmul_path
        return f"{choice} ({self.reason})" if self.reason else choice


def dense_bytes(model: nn.Module) -> int:
    """Return the bytes that the dense path adds: every quantized weight in its scales' dtype."""
    total = 0
    for _, module in quantized_modules(model):
        out, width = true_shape(module)
        itemsize = 4 if dense_dtype(module) == mx.float32 else 2
        total += out * width * itemsize
    return total


def _seconds(multiply: Callable[[mx.array], mx.array], x: mx.array) -> float:
    """Return the seconds of a product and its input gradient; the best of two after a first run."""
    cotangent = mx.random.normal(multiply(x).shape, key=mx.random.key(1)).astype(x.dtype)
    mx.eval(cotangent)

    def once() -> float:
        start = time.perf_counter()
        mx.eval(mx.vjp(multiply, [x], [cotangent]))  # both, or the forward would not run
        return time.perf_counter() - start

    first = once()
    return first if first > 0.5 else min(once(), once())


def _by_kind(model: nn.Module) -> dict[tuple, list[tuple[str, nn.Module]]]:
    """Return the quantized weights that a step multiplies, by what the time of a product depends on.

    A head has another number of rows. An embedding that is only looked up is left out.
    """
    modules = quantized_modules(model)
    has_head = "lm_head" in model or any(path.endswith("lm_head") for path, _ in modules)
    kinds: dict[tuple, list[tuple[str, nn.Module]]] = {}
    for path, module in modules:
        is_embedding = isinstance(module, EMBEDDINGS)
        if is_embedding and has_head:
            continue
        is_head = is_embedding or path.endswith("lm_head")
        kind = true_shape(module), module.bits, module.group_size, module.mode, is_head
        kinds.setdefault(kind, []).append((path, module))
    return kinds


def weight_kinds(model: nn.Module) -> int:
    """Return how many kinds of quantized weights (shape, bits, group, mode) are to be measured."""
    return len(_by_kind(model))


def choose_matmul_path(
    model: nn.Module,
    rows: int,
    head_rows: int | None = None,
    advance: Callable[[], None] | None = None,
    planned: Set[str] | None = None,
) -> MatmulPathChoice:
    """Measure the three matmul paths for steps of ``rows`` tokens and take the fastest that fits.

    Times are for at most 512 tokens, scaled up.

    Args:
        model: The base.
        rows: Tokens of a batch.
        head_rows: Tokens that reach the head, by default all.
        advance: Called after each kind of weight.
        planned: The paths that fit by the plan of the run; without a plan, ``dense`` must leave
            some of the free memory to the run.
    """
    by_kind = _by_kind(model)
    if not by_kind:
        return MatmulPathChoice("dense", {}, "the base is not quantized")
    kinds = []
    for kind, of_kind in by_kind.items():
        is_head = kind[-1]
        tokens = head_rows if is_head and head_rows else rows
        seconds = product_seconds(of_kind[0][1], tokens)
        ms = {path: 1e3 * seconds[path] * len(of_kind) for path in MATMUL_PATHS}
        names = sorted({path.rsplit(".", 1)[-1] for path, _ in of_kind})
        kinds.append(KindTimes(tuple(names), kind[0], len(of_kind), ms))
        if advance is not None:
            advance()
    step_ms = {path: sum(kind.step_ms[path] for kind in kinds) for path in MATMUL_PATHS}
    if planned is None:
        free = runtime.total_memory() - mx.get_active_memory()
        fits = dense_bytes(model) < _DENSE_SHARE * free
        planned = {p for p, facts in MATMUL_PATHS.items() if fits or not facts.keeps_dense}
    candidates = {path: ms for path, ms in step_ms.items() if path in planned}
    left_out = [path for path in step_ms if path not in planned]
    reason = f"{' and '.join(left_out)} would not fit" if left_out else ""
    if left_out and all(MATMUL_PATHS[path].keeps_dense for path in left_out):
        reason = f"{' and '.join(left_out)} would need {dense_bytes(model) / 1e9:.1f} GB more"
    matmul_path = min(candidates, key=candidates.__getitem__)
    return MatmulPathChoice(matmul_path, step_ms, reason, tuple(kinds))


def product_seconds(module: nn.Module, rows: int) -> dict[str, float]:
    """Return the seconds of one product of ``rows`` tokens by each path.

    One whose time is in proportion to the rows is extrapolated where it is far behind.
    """
    sample = min(rows, _MEASURED_ROWS)
    dense = dense_module(module)
    weight = dense.weight
    x = mx.random.normal((sample, weight.shape[1]), key=mx.random.key(0)).astype(weight.dtype)
    mx.eval(x, weight)
    seconds: dict[str, float] = {}
    for path, facts in reversed(MATMUL_PATHS.items()):
        measured = dense if facts.keeps_dense else module
        product = partial(PATHS[path].product, module=measured)
        if facts.in_place:
            few = max(1, sample // 16)
            seconds[path] = _seconds(product, x[:few]) * sample / few
            if seconds[path] > _FAR_BEHIND * min(seconds.values()):
                continue
        seconds[path] = _seconds(product, x)
    return {path: value * rows / sample for path, value in seconds.items()}
