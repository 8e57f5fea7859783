"""Choose how the frozen weights are used: by times on this machine, remembered for later runs.

The times of a base's kinds of weights are added up; it takes one path: a path for each kind never
won more than 3 % (benchmarks/LOG.md). A path that cannot fit into memory is not taken. Work that is
too short to measure for takes the path that a formula expects to be the fastest.
"""

import math
import os
from collections.abc import Mapping, Sequence, Set

import mlx.nn as nn

from .. import chips, runtime
from ..config.choices import MATMUL_PATHS
from ..measurements import recall, remember
from ..nn.frozen_weight import frozen_weight
from ..nn.quantized import quantized_modules
from ..offload.blocks import weights_readable
from ..runtime import mx
from .path_timing import Precision, WeightKind, time_paths, weight_kinds
from .plan import MatmulPathChoice

LIMIT_S = 1.6  # of a measurement; with what has begun by then it takes 2 s at most
_SHARE = 0.1  # of the work that follows
_LEAST_S = 0.1
_DENSE_SHARE = 0.6  # of the memory that is left
# The same for generated text, whose keys and values need memory too.
_DENSE_SHARE_TO_GENERATE = 0.25
_LARGE = 1 << 20  # numbers of a weight whose rate is worth keeping
# A second of a core: multiply-adds of a dense product by OpenBLAS and of MLX's quantized one, and
# dequantized numbers
_CPU_DENSE = 2e10
_CPU_QUANTIZED = 1e9
_CPU_DEQUANTIZED = 1e9


def dense_bytes(model: nn.Module) -> int:
    """Return the bytes that the dense path adds: every quantized weight in its scales' dtype."""
    total = 0
    for _, module in quantized_modules(model):
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
        source, step_s = _times(kinds, paths, steps)
    reason = f"{source}; {left_out}" if left_out else source
    if step_s is None:
        expected = _expected(kinds, paths)
        return MatmulPathChoice(min(expected, key=expected.__getitem__), {}, reason)

    step_ms = {path: 1e3 * sum(seconds[path] for seconds in step_s) for path in paths}
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
) -> tuple[str, list[dict[str, float]] | None]:
    """Return the seconds of a step by kind and path, None if not known, and where they are from."""
    of = {"weights": [[*kind.shape, kind.count, kind.tokens, *kind.precision] for kind in kinds]}
    before = recall("matmul-path", of)
    if before is not None and all(path in before["step_s"][0] for path in paths):
        return "measured before", before["step_s"]

    limit = LIMIT_S
    if steps is not None:
        limit = min(limit, _SHARE * steps * min(_expected(kinds, paths).values()))
    if limit < _LEAST_S:
        return "by formula, since measuring would take longer than it could save", None

    timing = time_paths(kinds, paths, limit)
    if timing is None:
        return f"by formula, since {limit:.1f} s were too short to measure", None

    remember("matmul-path", of, {"step_s": timing.step_s})
    _remember_rates(kinds, timing.step_s)

    source = f"measured in {timing.seconds:.1f} s"
    if timing.timed < len(kinds):
        source += f", {timing.timed} of {len(kinds)} kinds of weights"
    return source, timing.step_s


def _expected(kinds: Sequence[WeightKind], paths: Sequence[str]) -> dict[str, float]:
    """Return the seconds of a step by path, by measured rates of this device or nominal ones."""
    expected = dict.fromkeys(paths, 0.0)
    for kind in kinds:
        precision = kind.precision
        if expected.keys() <= (rates := matmul_rates(precision)).keys():
            for path in paths:
                expected[path] += kind.multiply_adds / rates[path]
            continue

        chip = None if runtime.on_cpu() else chips.chip_here()
        used = 2 * kind.count * math.prod(kind.shape)  # forward and backward
        for path in paths:
            expected[path] += nominal_seconds(kind.multiply_adds, used, path, precision, chip)

    return expected


def nominal_seconds(
    multiply_adds: float, used: float, path: str, precision: Precision, chip: chips.Chip | None
) -> float:
    """Return the seconds of products with frozen weights by nominal rates; None is a CPU's chip.

    ``used`` counts the numbers of the weights, once for each use.
    """
    facts = MATMUL_PATHS[path]
    if chip is None:
        cores = os.cpu_count() or 1
        seconds = multiply_adds / cores / (_CPU_QUANTIZED if facts.in_place else _CPU_DENSE)
        dequantized_s = used / _CPU_DEQUANTIZED
    else:
        (bits, group_size, mode), dtype = precision
        share = chip.quantized_share(mode) if facts.in_place else 1.0
        itemsize = 4 if dtype == "float32" else 2
        reading_s = itemsize * used / chip.bytes_per_s
        seconds = max(reading_s, 2 * multiply_adds / (chip.products_per_s * share))
        dequantized_s = reading_s + used * (bits + 32 / group_size) / 8 / chip.bytes_per_s

    if facts.dequantizes:
        seconds += dequantized_s
    return seconds


def matmul_rates(precision: Precision) -> dict[str, float]:
    """Return the multiply-adds per second by path that this device reached, where measured."""
    return recall("matmul-rates", {"precision": precision}) or {}


def _remember_rates(kinds: Sequence[WeightKind], step_s: Sequence[Mapping[str, float]]) -> None:
    """Keep the rates of the largest weight, which those of other bases will be like."""
    largest = max(range(len(kinds)), key=lambda i: (math.prod(kinds[i].shape), kinds[i].tokens))
    kind = kinds[largest]
    if math.prod(kind.shape) < _LARGE:
        return

    rates = {path: kind.multiply_adds / seconds for path, seconds in step_s[largest].items()}
    known = matmul_rates(kind.precision)
    remember("matmul-rates", {"precision": kind.precision}, known | rates)
