"""Choose how the frozen weights are multiplied, by measuring it here.

For each distinct weight shape of the base the three paths run forward and backward on the rows of
this run; their times are added up over the base, which takes one path: a path for each kind of
weight never won more than 3 % (benchmarks/LOG.md). A path that cannot fit into memory is not taken,
and one that is far behind is given up early.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Set
from dataclasses import dataclass

import mlx.nn as nn

from .. import runtime
from ..nn.quantized import (
    EMBEDDINGS,
    dense_dtype,
    dequantized_weight,
    packed_matmul,
    quantized_modules,
    transient_matmul,
    true_shape,
)
from ..ops.matmul import dense_matmul
from ..runtime import mx

_MEASURED_ROWS = 512
_GIVE_UP = 3.0  # times the best so far
_DENSE_SHARE = 0.6  # of the memory that is left


@dataclass(frozen=True)
class KindTimes:
    """Weights of one shape and packing: their last names, how many a step multiplies, and the
    milliseconds a step that each path would take for all of them."""

    names: tuple[str, ...]
    shape: tuple[int, int]
    count: int
    step_ms: dict[str, float]

    def line(self) -> str:
        parts = [f"{name} {ms:,.1f} ms" for name, ms in self.step_ms.items()]
        return f"{self.count} x {list(self.shape)} {', '.join(self.names)}: {' · '.join(parts)}"


@dataclass(frozen=True)
class MatmulPathChoice:
    """``matmul_path`` and the milliseconds a step that each measured path would take; of which
    ``kinds`` has those of each kind of weight."""

    matmul_path: str
    step_ms: dict[str, float]
    reason: str
    kinds: tuple[KindTimes, ...] = ()

    def line(self) -> str:
        """The numbers and the choice, for the log."""
        if not self.step_ms:
            return f"{self.matmul_path} ({self.reason})"
        parts = [f"{name} {ms:,.0f} ms" for name, ms in self.step_ms.items()]
        return f"{' · '.join(parts)} → {self.matmul_path}" + (
            f" ({self.reason})" if self.reason else ""
        )


def dense_bytes(model: nn.Module) -> int:
    """Bytes that the dense path adds: every quantized weight in the dtype of its scales."""
    total = 0
    for _, module in quantized_modules(model):
        out, width = true_shape(module)
        itemsize = 4 if dense_dtype(module) == mx.float32 else 2
        total += out * width * itemsize
    return total


def _seconds(multiply: Callable[[mx.array], mx.array], x: mx.array) -> float:
    """Forward and input gradient of one product; the best of two after a first run."""
    cotangent = mx.random.normal(multiply(x).shape, key=mx.random.key(1)).astype(x.dtype)
    mx.eval(cotangent)

    def once() -> float:
        start = time.perf_counter()
        mx.eval(mx.vjp(multiply, [x], [cotangent]))  # both, or the forward would not run
        return time.perf_counter() - start

    first = once()
    return first if first > 0.5 else min(once(), once())


def _path_seconds(path: str, module: nn.Module, x: mx.array, dense: mx.array) -> float:
    if path == "dense":
        return _seconds(lambda v: dense_matmul(v, dense), x)
    if path == "transient":
        return _seconds(lambda v: transient_matmul(v, module), x)

    return _seconds(lambda v: packed_matmul(v, module), x)


def _measured(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The quantized weights that a step multiplies: not an embedding that is looked up only."""
    modules = quantized_modules(model)
    heads = [path for path, _ in modules if path.endswith("lm_head")] or "lm_head" in model
    return [(p, m) for p, m in modules if not (heads and isinstance(m, EMBEDDINGS))]


def _kind(path: str, module: nn.Module) -> tuple:
    """What the time of a product depends on; a head has rows of its own."""
    head = isinstance(module, EMBEDDINGS) or path.endswith("lm_head")
    return true_shape(module), module.bits, module.group_size, module.mode, head


def weight_kinds(model: nn.Module) -> int:
    """How many kinds of quantized weights (shape, bits, group, mode) there are to measure."""
    return len({_kind(*item) for item in _measured(model)})


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
        rows: tokens of a batch.   head_rows: those that reach the head, by default all.
        advance: called after each kind of weight.
        planned: the paths that fit by the plan of the run; without a plan, ``dense`` must leave
            some of the free memory to the run.
    """
    modules = _measured(model)
    if not modules:
        return MatmulPathChoice("dense", {}, "the base is not quantized")
    counts = Counter(_kind(*item) for item in modules)
    example = {_kind(*item): item[1] for item in modules}
    names: dict[tuple, set[str]] = defaultdict(set)
    for path, module in modules:
        names[_kind(path, module)].add(path.rsplit(".", 1)[-1])
    kinds = []
    for kind, count in counts.items():
        is_head = kind[-1]
        wanted = head_rows if is_head and head_rows else rows
        seconds = _kind_seconds(example[kind], wanted)
        ms = {path: 1e3 * seconds[path] * count for path in ("quantized", "transient", "dense")}
        kinds.append(KindTimes(tuple(sorted(names[kind])), kind[0], count, ms))
        if advance is not None:
            advance()
    step_ms = {path: sum(kind.step_ms[path] for kind in kinds) for path in kinds[0].step_ms}
    if planned is None:
        free = runtime.total_memory() - mx.get_active_memory()
        fits = dense_bytes(model) < _DENSE_SHARE * free
        planned = {path for path in step_ms if path != "dense" or fits}
    candidates = {path: ms for path, ms in step_ms.items() if path in planned}
    left_out = [path for path in step_ms if path not in planned]
    reason = f"{' and '.join(left_out)} would not fit" if left_out else ""
    if left_out == ["dense"]:
        reason = f"dense would need {dense_bytes(model) / 1e9:.1f} GB more"
    matmul_path = min(candidates, key=candidates.get)
    return MatmulPathChoice(matmul_path, step_ms, reason, tuple(kinds))


def _kind_seconds(module: nn.Module, rows: int) -> dict[str, float]:
    """Seconds of one product by each path; the packed one is guessed where it is far behind."""
    sample = min(rows, _MEASURED_ROWS)
    weight = dequantized_weight(module)
    x = mx.random.normal((sample, weight.shape[1]), key=mx.random.key(0)).astype(weight.dtype)
    mx.eval(x, weight)
    seconds = {path: _path_seconds(path, module, x, weight) for path in ("dense", "transient")}
    small = max(1, sample // 16)
    guess = _path_seconds("quantized", module, x[:small], weight) * sample / small
    far_behind = guess > _GIVE_UP * min(seconds.values())
    seconds["quantized"] = guess if far_behind else _path_seconds("quantized", module, x, weight)
    return {path: value * rows / sample for path, value in seconds.items()}
