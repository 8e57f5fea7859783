"""Choose how the frozen weights are used: by times on this machine, remembered for later runs.

A base takes one path for all weights, since all kinds had the same order of paths on CPUs
(benchmarks/LOG.md). So the kind that a step multiplies most by is timed for all. A path that cannot
fit into memory is not taken. Work that is too short to measure for takes the path that a formula
expects to be the fastest.
"""

import math
import os
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import mlx.nn as nn

from .. import chips, runtime
from ..config.choices import MATMUL_PATHS
from ..measurements import recall, remember
from ..nn.frozen_weight import frozen_weight
from ..nn.quantized import EMBEDDINGS, PATHS, dense_module, multiplied_modules
from ..offload.blocks import weights_readable
from ..ops.profile import profile
from ..runtime import dtype_name, mx
from .plan import MatmulPathChoice

LIMIT_S = 1.6  # of a measurement; with what has begun by then it takes 2 s at most
_SHARE = 0.1  # of the work that follows
_LEAST_S = 0.1
_DENSE_SHARE = 0.6  # of the memory that is left
# The same for generated text, whose keys and values need memory too.
_DENSE_SHARE_TO_GENERATE = 0.25
# A second of a core: multiply-adds of a dense product by OpenBLAS and of MLX's quantized one, and
# dequantized numbers
_CPU_DENSE = 2e10
_CPU_QUANTIZED = 1e9
_CPU_DEQUANTIZED = 1e9

# Bits, group size and mode of quantized weights, and the dtype that they are dense in
Precision = tuple[tuple[int, int, str], str]

# Tokens of a batch that are timed; times are scaled up. On a CPU that of a product in place is in
# proportion to them; on a GPU what a use of a weight costs counts the less the more they are.
_TOKENS_CPU = {True: 64, False: 512}  # by whether it is in place
_TOKENS_GPU = 2048
_LEAST_ROWS = 64  # of a weight
_MOST_NUMBERS = {True: 1 << 20, False: 1 << 22}  # of it, on a CPU and on a GPU
_REPETITIONS = 5


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
    def used(self) -> int:
        """Numbers that a step multiplies by, once for each use: forward and backward."""
        return 2 * self.count * math.prod(self.shape)

    @property
    def multiply_adds(self) -> int:
        return self.used * self.tokens


def weight_kinds(
    model: nn.Module, tokens: int | Sequence[int], head_tokens: int
) -> list[WeightKind]:
    """Return the quantized weights of a step, by what the time of a product depends on.

    ``tokens`` is the size of a batch, or of each pass over the blocks (rows that share a prefix
    take two); ``head_tokens`` reach the head.
    """
    passes = [tokens] if isinstance(tokens, int) else list(tokens)
    kinds: dict[tuple, list[nn.Module]] = {}

    for path, module in multiplied_modules(model):
        is_head = isinstance(module, EMBEDDINGS) or path.endswith("lm_head")
        kind = frozen_weight(module).shape, module.bits, module.group_size, module.mode, is_head
        kinds.setdefault(kind, []).append(module)

    return [
        WeightKind(shape, len(of_kind), count, of_kind[0])
        for (shape, *_, is_head), of_kind in kinds.items()
        for count in ([head_tokens] if is_head else passes)
    ]


def time_paths(
    kinds: Sequence[WeightKind], paths: Sequence[str], limit_s: float
) -> dict[str, float] | None:
    """Return the seconds of a step by path, timed for ``limit_s`` seconds at most.

    The first rows of a weight of the kind that a step multiplies most by are timed, the best of
    some repetitions, after a run that compiles and allocates. Those of the paths alternate, so that
    what else the machine does hits all of them. None if there was no time for each path.
    """
    end = perf_counter() + limit_s
    kind = max(kinds, key=lambda kind: kind.multiply_adds)
    rows = min(kind.shape[0], max(_LEAST_ROWS, _MOST_NUMBERS[runtime.on_cpu()] // kind.shape[1]))
    products = _products(kind, paths, rows)
    best = dict.fromkeys(paths, math.inf)

    for repetition in range(1 + _REPETITIONS):
        for path, compute in products.items():
            start = perf_counter()
            if start < end:
                compute()
                if repetition:
                    best[path] = min(best[path], perf_counter() - start)

    if math.inf in best.values():
        return None
    times = kind.count * sum(each.multiply_adds for each in kinds) / kind.multiply_adds
    return {path: times * seconds / _share(kind, path, rows) for path, seconds in best.items()}


def _share(kind: WeightKind, path: str, rows: int) -> float:
    return rows / kind.shape[0] * _sample(kind, path) / kind.tokens


def _sample(kind: WeightKind, path: str) -> int:
    most = _TOKENS_CPU[MATMUL_PATHS[path].in_place] if runtime.on_cpu() else _TOKENS_GPU
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


def dense_bytes(model: nn.Module) -> int:
    """Return the bytes that the dense path adds: its weights in the dtype of their scales."""
    total = 0
    for _, module in multiplied_modules(model):
        out, width = frozen_weight(module).shape
        itemsize = 4 if frozen_weight(module).dtype == mx.float32 else 2
        total += out * width * itemsize
    return total


def generation_path(model: nn.Module) -> str:
    """Return the matmul path to generate text by.

    On a CPU it is ``dense`` if there is the memory, else ``transient``: the products of a prompt
    with quantized weights are some 18 times as slow, those of a single token hardly faster. GPUs
    read a quantized weight faster than a dense one.
    """
    if not runtime.on_cpu() or hasattr(model, "blocks_on_disk"):
        return "quantized"
    free = runtime.total_memory() - mx.get_active_memory()
    if dense_bytes(model) < _DENSE_SHARE_TO_GENERATE * free:
        return "dense"
    return "transient"


def choose_matmul_path(
    model: nn.Module,
    tokens: int | Sequence[int],
    head_tokens: int | None = None,
    planned: Set[str] | None = None,
    steps: int | None = None,
) -> MatmulPathChoice:
    """Return the matmul path that is the fastest for a number of steps, of those that fit.

    The paths are timed on this device for `LIMIT_S` and a tenth of the work that follows at most,
    or not at all where that was done before.

    Args:
        model: The base.
        tokens: Of a batch, or of each of its passes over the blocks.
        head_tokens: That reach the head, by default all.
        planned: The paths that fit by the plan of the run; without a plan, ``dense`` must leave
            some of the free memory to the run.
        steps: How many follow; None is many.
    """
    every = tokens if isinstance(tokens, int) else sum(tokens)
    kinds = weight_kinds(model, tokens, head_tokens or every)
    if not kinds:
        return MatmulPathChoice("dense", {}, "the base is not quantized")

    planned = planned or _paths_that_fit(model)
    if hasattr(model, "blocks_on_disk"):
        planned = {path for path in planned if not MATMUL_PATHS[path].keeps_dense}
    paths = [path for path in MATMUL_PATHS if path in planned]
    left_out = _left_out(model, paths)
    if len(paths) == 1:
        return MatmulPathChoice(paths[0], {}, left_out)

    with weights_readable(model):
        source, seconds = _times(kinds, paths, steps)
    reason = f"{source}; {left_out}" if left_out else source
    if seconds is None:
        expected = _expected(kinds, paths)
        return MatmulPathChoice(min(expected, key=expected.__getitem__), {}, reason)

    step_ms = {path: 1e3 * seconds[path] for path in paths}
    return MatmulPathChoice(min(step_ms, key=step_ms.__getitem__), step_ms, reason)


def _paths_that_fit(model: nn.Module) -> Set[str]:
    free = runtime.total_memory() - mx.get_active_memory()
    fits = dense_bytes(model) < _DENSE_SHARE * free
    return {path for path, facts in MATMUL_PATHS.items() if fits or not facts.keeps_dense}


def _left_out(model: nn.Module, paths: Sequence[str]) -> str:
    others = [path for path in MATMUL_PATHS if path not in paths]
    if not others:
        return ""

    names = " and ".join(others)
    if all(MATMUL_PATHS[path].keeps_dense for path in others):
        return f"{names} would need {dense_bytes(model) / 1e9:.1f} GB more"
    return f"{names} would not fit"


def _times(
    kinds: Sequence[WeightKind], paths: Sequence[str], steps: int | None
) -> tuple[str, dict[str, float] | None]:
    """Return where the seconds of a step by path are from, and these; None if not known."""
    of = {"weights": [[*kind.shape, kind.count, kind.tokens, *kind.precision] for kind in kinds]}
    before = (recall("matmul-path", of) or {}).get("seconds", {})
    if before.keys() >= set(paths):
        return "measured before", before

    limit = LIMIT_S
    if steps is not None:
        limit = min(limit, _SHARE * steps * min(_expected(kinds, paths).values()))
    if limit < _LEAST_S:
        return "by formula, since measuring would take longer than it could save", None

    start = perf_counter()
    seconds = time_paths(kinds, paths, limit)
    if seconds is None:
        return f"by formula, since {limit:.1f} s were too short to measure", None

    remember("matmul-path", of, {"seconds": seconds})
    return f"measured in {perf_counter() - start:.1f} s", seconds


def _expected(kinds: Sequence[WeightKind], paths: Sequence[str]) -> dict[str, float]:
    """Return the seconds of a step by path, by nominal rates."""
    return {
        path: sum(nominal_seconds(kind.used, kind.tokens, path, kind.precision) for kind in kinds)
        for path in paths
    }


def nominal_seconds(used: float, tokens: int, path: str, precision: Precision) -> float:
    """Return the seconds of products with frozen weights by nominal rates of this device.

    Each of the ``used`` numbers of weights, once for each use, is multiplied by ``tokens`` rows.
    """
    facts = MATMUL_PATHS[path]
    multiply_adds = used * tokens
    if runtime.on_cpu():
        cores = os.cpu_count() or 1
        seconds = multiply_adds / cores / (_CPU_QUANTIZED if facts.in_place else _CPU_DENSE)
        dequantized_s = used / _CPU_DEQUANTIZED
    else:
        chip = chips.chip_here()
        (bits, group_size, mode), dtype = precision
        share = chip.quantized_share(mode) if facts.in_place else 1.0
        itemsize = 4 if dtype == "float32" else 2
        reading_s = itemsize * used / chip.bytes_per_s
        seconds = max(reading_s, 2 * multiply_adds / (chip.products_per_s * share))
        dequantized_s = reading_s + used * (bits + 32 / group_size) / 8 / chip.bytes_per_s

    if facts.dequantizes:
        seconds += dequantized_s
    return seconds
