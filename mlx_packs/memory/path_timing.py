"""Time the products with a base's frozen weights by each matmul path, within some seconds.

Weights of one shape and quantization are timed by one of them. Of a large weight the first rows are
timed, as many as there is time for: what a path takes is in proportion to them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import mlx.nn as nn

from ..config.choices import MATMUL_PATHS
from ..nn.frozen_weight import frozen_weight
from ..nn.quantized import EMBEDDINGS, PATHS, dense_module, quantized_modules
from ..ops.profile import profile
from ..runtime import dtype_name, mx, on_cpu

# Bits, group size and mode of quantized weights, and the dtype that they are dense in
Precision = tuple[tuple[int, int, str], str]

# Tokens of a batch that are timed; times are scaled up. On a CPU that of a product in place is in
# proportion to them; on a GPU what a use of a weight costs counts the less the more they are.
_TOKENS_CPU = {True: 64, False: 512}  # by whether it is in place
_TOKENS_GPU = 2048
_FIRST_ROWS = 64  # of a weight
_MOST_NUMBERS = 1 << 24  # of a weight that are dense at a time
_LEAST_REPETITIONS = 3
_REPETITIONS = 100
_AGREEMENT = 1.05
_FAR_BEHIND = 3.0  # times the fastest: not timed again


@dataclass(frozen=True)
class WeightKind:
    """Weights of one shape and quantization, which a pass multiplies by as many tokens each.

    Attributes:
        shape: (out, in).
        count: How many there are.
        tokens: Rows that a pass multiplies by each.
        module: One of them.
    """

    shape: tuple[int, int]
    count: int
    tokens: int
    module: nn.Module

    @property
    def precision(self) -> Precision:
        module = self.module
        dtype = dtype_name(frozen_weight(module).dtype)
        return (module.bits, module.group_size, module.mode), dtype

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of a step: the products, and the gradients of their inputs."""
        return 2 * self.count * self.tokens * math.prod(self.shape)


@dataclass(frozen=True)
class Timing:
    """Seconds of a step by kind of weight and matmul path.

    Attributes:
        step_s: Of each kind; of those that there was no time for by the rate of the others.
        timed: How many kinds were timed.
        seconds: That it took.
    """

    step_s: list[dict[str, float]]
    timed: int
    seconds: float


def weight_kinds(
    model: nn.Module, tokens: int | Sequence[int], head_tokens: int
) -> list[WeightKind]:
    """Return the quantized weights of a step, by what the time of a product depends on.

    An embedding that is only looked up is left out. ``tokens`` are those of a batch, or of each
    pass over the blocks (rows that share a prefix take two), ``head_tokens`` reach the head.
    """
    modules = quantized_modules(model)

    passes = [tokens] if isinstance(tokens, int) else list(tokens)
    has_head = "lm_head" in model or any(path.endswith("lm_head") for path, _ in modules)
    kinds: dict[tuple, list[nn.Module]] = {}

    for path, module in modules:
        is_embedding = isinstance(module, EMBEDDINGS)
        if is_embedding and has_head:
            continue
        is_head = is_embedding or path.endswith("lm_head")
        kind = frozen_weight(module).shape, module.bits, module.group_size, module.mode, is_head
        kinds.setdefault(kind, []).append(module)

    return [
        WeightKind(shape, len(of_kind), count, of_kind[0])
        for (shape, *_, is_head), of_kind in kinds.items()
        for count in ([head_tokens] if is_head else passes)
    ]


def time_paths(kinds: Sequence[WeightKind], paths: Sequence[str], limit_s: float) -> Timing | None:
    """Time products by each path for ``limit_s`` seconds at most; None if that was too short.

    The kinds that a step multiplies most by come first. Repetitions of the paths alternate, so that
    what else the machine does hits all of them.
    """
    start = perf_counter()
    end = start + limit_s
    timed: dict[int, dict[str, float]] = {}

    order = sorted(range(len(kinds)), key=lambda i: -kinds[i].multiply_adds)
    for done, i in enumerate(order):
        now = perf_counter()
        share_end = now + (end - now) / (len(order) - done)
        seconds = _time_kind(kinds[i], paths, share_end, end)
        if seconds is not None:
            timed[i] = {path: kinds[i].count * seconds[path] for path in paths}

    if not timed:
        return None

    work = sum(kinds[i].multiply_adds for i in timed)
    pace = {path: sum(times[path] for times in timed.values()) / work for path in paths}
    step_s = [
        timed.get(i) or {path: pace[path] * kind.multiply_adds for path in paths}
        for i, kind in enumerate(kinds)
    ]
    return Timing(step_s, len(timed), perf_counter() - start)


def _time_kind(
    kind: WeightKind, paths: Sequence[str], share_end: float, end: float
) -> dict[str, float] | None:
    """Return the seconds of one weight by path; None if not each could be timed until ``end``.

    Those that are not far behind are timed again until ``share_end``, with more rows.
    """
    out, width = kind.shape
    most = min(out, max(_FIRST_ROWS, _MOST_NUMBERS // width))
    rows = min(_FIRST_ROWS, most)

    seconds = _time_rows(kind, paths, rows, 1, end)
    if seconds is None:
        return None

    close = [path for path in paths if seconds[path] < _FAR_BEHIND * min(seconds.values())]
    a_round = sum(seconds[path] * _share(kind, path, rows) for path in close)
    in_time = int((share_end - perf_counter()) / (2 * a_round))

    if in_time > 0:
        rows = min(most, in_time * rows)
        seconds |= _time_rows(kind, close, rows, _REPETITIONS, share_end) or {}
    return seconds


def _time_rows(
    kind: WeightKind, paths: Sequence[str], rows: int, repetitions: int, until: float
) -> dict[str, float] | None:
    """Return the seconds of a weight by path: the best of some repetitions with its first rows.

    None if there is not time for one repetition after a first run of all.
    """
    products = _products(kind, paths, rows)
    rounds: list[dict[str, float]] = []
    last = _seconds(products, until)  # compiles kernels and allocates
    while last and len(rounds) < repetitions and not _agree(rounds):
        if perf_counter() + sum(last.values()) > until:
            break
        last = _seconds(products, until)
        if last:
            rounds.append(last)
    if not rounds:
        return None

    share = {path: _share(kind, path, rows) for path in paths}
    return {path: min(r[path] for r in rounds) / share[path] for path in paths}


def _agree(rounds: Sequence[Mapping[str, float]]) -> bool:
    """Return whether the two best repetitions of each path agree: the machine did little else."""
    if len(rounds) < _LEAST_REPETITIONS:
        return False
    best = (sorted(each[path] for each in rounds)[:2] for path in rounds[0])
    return all(second < _AGREEMENT * first for first, second in best)


def _share(kind: WeightKind, path: str, rows: int) -> float:
    return rows / kind.shape[0] * _sample(kind, path) / kind.tokens


def _sample(kind: WeightKind, path: str) -> int:
    most = _TOKENS_CPU[MATMUL_PATHS[path].in_place] if on_cpu() else _TOKENS_GPU
    return min(kind.tokens, most)


def _products(kind: WeightKind, paths: Sequence[str], rows: int) -> dict[str, Callable[[], None]]:
    """Return a function for each product of a weight's first rows, and its input's gradient."""
    module = frozen_weight(kind.module).first_rows(rows)
    dense = dense_module(module, profile().dtype)  # as `apply_matmul_path` does

    products = {}
    for path in paths:
        weights = dense if MATMUL_PATHS[path].keeps_dense else module
        tokens = _sample(kind, path)

        x = mx.random.normal((tokens, kind.shape[1]), key=mx.random.key(0))
        cotangent = mx.random.normal((tokens, rows), key=mx.random.key(1))
        arrays = [array.astype(dense.weight.dtype) for array in (x, cotangent)]
        mx.eval(arrays, weights.parameters())
        multiply = partial(PATHS[path].product, frozen_weight(weights))
        products[path] = partial(_compute, multiply, *arrays)
    return products


def _compute(multiply: Callable[[mx.array], mx.array], x: mx.array, cotangent: mx.array) -> None:
    mx.eval(mx.vjp(multiply, [x], [cotangent]))  # both, or the product itself would not run


def _seconds(products: Mapping[str, Callable[[], None]], until: float) -> dict[str, float] | None:
    """Time each product once, one after the other; None if time is up before the last."""
    seconds = {}
    for path, compute in products.items():
        start = perf_counter()
        if start > until:
            return None
        compute()
        seconds[path] = perf_counter() - start
    return seconds
