"""Independent graphs at once on a CPU: one here, one in a thread that has a stream of its own.

MLX computes the operations of a stream one by one, and the threads of a BLAS wait for each other in
every product. Two halves of a batch wait for each other once. MLX supports graphs of several
threads that share nothing but arrays which are there (ml-explore/mlx#3078).
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import mlx.nn as nn
import numpy as np

from .nn.blocks import GroupedAttention, GroupedMLP, is_grouped_attention, is_grouped_mlp
from .nn.lora import GroupedLoRA
from .ops import _backend
from .runtime import COMPILES, mx, on_cpu

Tree = TypeVar("Tree")

_building = threading.Lock()  # modules hold other parameters while a graph of theirs is made


def has_lanes(model: nn.Module) -> bool:
    """Whether two graphs of a model can be computed at once.

    That takes a CPU without compiled steps, and blocks that are known to make nothing on the way
    that is left for the next call. Dropout draws from the one random state of the process.
    """
    if not on_cpu() or COMPILES or _backend.detect() != "reference":
        return False
    blocks = getattr(model, "layers", None)
    if not isinstance(blocks, list) or not blocks:
        return False
    known = all(
        _is_known(getattr(block, "self_attn", None), GroupedAttention, is_grouped_attention)
        and _is_known(getattr(block, "mlp", None), GroupedMLP, is_grouped_mlp)
        for block in blocks
    )
    return known and not any(m.dropout.p for m in model.modules() if isinstance(m, GroupedLoRA))


def _is_known(module, ours: type, is_grouped: Callable[[nn.Module], bool]) -> bool:
    return isinstance(module, ours) or (module is not None and is_grouped(module))


def halves(batch: tuple[mx.array, ...]) -> list[tuple[mx.array, ...]]:
    """A batch (`loss.as_arrays`) as two of half of its rows, without padding among their targets.

    One where half of the rows have no target. Targets keep their order, which is that of rows.
    """
    tokens, positions, targets, weights, *segments = batch
    rows, time = tokens.shape[:2]
    real = np.flatnonzero(np.array(weights))
    at = np.array(positions)[real]
    parts = []
    for start, stop in ((0, (rows + 1) // 2), ((rows + 1) // 2, rows)):
        own = mx.array(real[(at >= start * time) & (at < stop * time)])
        if own.size:
            by_row = [a[start:stop] for a in (tokens, *segments)]
            own_targets = [positions[own] - start * time, targets[own], weights[own]]
            parts.append((by_row[0], *own_targets, *by_row[1:]))
    mx.eval(parts)
    return parts


def evaluated(makes: Sequence[Callable[[], Tree]], at_once: bool) -> list[Tree]:
    """What each function makes, evaluated; of two functions both at once, if that is said.

    Args:
        makes: one or two functions that build a graph.
        at_once: whether all arrays that both graphs read have been evaluated before.
    """
    if len(makes) == 1 or not at_once:
        return [_evaluated(make) for make in makes]
    first, second = makes
    beside = _thread().submit(_evaluated, first)
    try:
        here = _evaluated(second)
    finally:
        there = beside.result()
    return [there, here]


def _evaluated(make: Callable[[], Tree]) -> Tree:
    with _building:
        made = make()
    mx.eval(made)
    return made


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "lane")
