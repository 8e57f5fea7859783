"""Choose how the frozen weights are multiplied, by measuring it here.

For each distinct weight shape of the base the three paths run forward and backward on the rows of
this run; their times are added up over the base. A path that cannot fit into memory is not taken,
and one that is far behind is given up early.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import mlx.nn as nn

from . import runtime
from .nn.quantized import dequantized_weight, quantized_modules, transient_matmul
from .runtime import mx

_MEASURED_ROWS = 512
_GIVE_UP = 3.0  # times the best so far
_DENSE_SHARE = 0.6  # of the memory that is left


@dataclass(frozen=True)
class BasePathChoice:
    """``base_path`` and the milliseconds a step that each measured path would take."""

    base_path: str
    step_ms: dict[str, float]
    reason: str

    def line(self) -> str:
        """The numbers and the choice, for the log."""
        if not self.step_ms:
            return f"{self.base_path} ({self.reason})"
        parts = [f"{name} {ms:,.0f} ms" for name, ms in self.step_ms.items()]
        return f"{' · '.join(parts)} → {self.base_path}" + (
            f" ({self.reason})" if self.reason else ""
        )


def _weight_shape(module: nn.Module) -> tuple[int, int]:
    return module.weight.shape[0], module.weight.shape[1] * 32 // module.bits


def dense_bytes(model: nn.Module) -> int:
    """Bytes that the dense path adds: every quantized weight in the dtype of its scales."""
    total = 0
    for _, module in quantized_modules(model):
        out, width = _weight_shape(module)
        itemsize = 4 if module.scales.dtype == mx.float32 else 2
        total += out * width * itemsize
    return total


def _seconds(multiply: Callable[[mx.array], mx.array], x: mx.array) -> float:
    """Forward and input gradient of one product; the best of two after a first run."""
    gradient = mx.grad(lambda v: multiply(v).sum())

    def once() -> float:
        start = time.perf_counter()
        mx.eval(gradient(x))
        return time.perf_counter() - start

    first = once()
    return first if first > 0.5 else min(once(), once())


def _path_seconds(path: str, module: nn.Module, x: mx.array, dense: mx.array) -> float:
    if path == "dense":
        return _seconds(lambda v: v @ dense.T, x)
    if path == "transient":
        return _seconds(lambda v: transient_matmul(v, module), x)

    def fused(v: mx.array) -> mx.array:
        return mx.quantized_matmul(
            v, module.weight, module.scales, module.get("biases"), transpose=True,
            group_size=module.group_size, bits=module.bits, mode=module.mode,
        )  # fmt: skip

    return _seconds(fused, x)


def weight_kinds(model: nn.Module) -> int:
    """How many kinds of quantized weights (shape, bits, group, mode) there are to measure."""
    return len({_kind(m) for _, m in quantized_modules(model)})


def _kind(module: nn.Module) -> tuple:
    return _weight_shape(module), module.bits, module.group_size, module.mode


def choose_base_path(
    model: nn.Module, rows: int, advance: Callable[[], None] | None = None
) -> BasePathChoice:
    """Measure the three base paths for steps of ``rows`` tokens and take the fastest that fits.

    Embeddings count as heads. Times are for ``min(rows, 512)`` tokens, scaled up. ``advance`` is
    called after each kind of weight.
    """
    modules = quantized_modules(model)
    if not modules:
        return BasePathChoice("quantized", {}, "the base is not quantized")
    shapes = Counter(_kind(m) for _, m in modules)
    example = {_kind(m): m for _, m in modules}
    free = runtime.total_memory() - mx.get_active_memory()
    fits = dense_bytes(model) < _DENSE_SHARE * free
    sample = min(rows, _MEASURED_ROWS)
    totals = dict.fromkeys(("dense", "transient", "quantized"), 0.0)
    for key, count in shapes.items():
        module = example[key]
        x = mx.random.normal((sample, key[0][1]), key=mx.random.key(0)).astype(module.scales.dtype)
        weight = dequantized_weight(module)
        mx.eval(x, weight)
        seconds: dict[str, float] = {}
        for path in totals:
            small = max(1, sample // 16)
            best = min(seconds.values(), default=None)
            if path == "quantized" and best is not None and sample > small:
                guess = _path_seconds(path, module, x[:small], weight) * sample / small
                if guess > _GIVE_UP * best:
                    seconds[path] = guess
                    continue
            seconds[path] = _path_seconds(path, module, x, weight)
        for path, value in seconds.items():
            totals[path] += value * count * rows / sample
        if advance is not None:
            advance()
    step_ms = {path: totals[path] * 1e3 for path in ("quantized", "transient", "dense")}
    candidates = {p: ms for p, ms in step_ms.items() if p != "dense" or fits}
    best_path = min(candidates, key=candidates.get)
    reason = "" if fits else f"dense would need {dense_bytes(model) / 1e9:.1f} GB more"
    return BasePathChoice(best_path, step_ms, reason)
