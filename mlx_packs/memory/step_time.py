"""Predict how long a training step takes: by rates of the chip, corrected by what was measured.

    seconds = factor x (products / rate + attention / rate + other bytes / bandwidth + launches)

`packs bench` fits the factor to the steps that it measured on this device. Without it it is 1, for
chips whose rates are known. The shares and counts below are
those of captured graphs of Qwen3 and Llama (benchmarks/README.md); no Mac was timed for them.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from .. import chips, runtime
from ..bases.compressed_tensors import quantization_in_mlx
from ..bases.precision import activation_bytes, choose_compute_dtype
from ..bases.weight_formats import named_format
from ..chips import MATMUL_REACHED
from ..config.choices import POLICIES, architecture_of
from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from ..data.shapes import sequence_inputs
from ..errors import PackError
from ..measurements import recall, remember
from .decoder_sizes import sizes_of
from .headers import Headers
from .matmul_path import Precision, nominal_seconds
from .plan import has_logits, recompute_policies
from .planned_adapters import plan_adapters

_KIND = "step-times"
_LAUNCHES = 170  # of a block, both ways; recomputed ones take a quarter more
_OTHER_BYTES = 40  # times the widths of a block, forward and backward, beside its products
_ATTENTION_REACHED = 0.6  # of the nominal rate
_SLOW = 0.6  # of a dense product's rate: a path at this share is not proposed
_LEAST_ERROR = 0.1  # that a calibrated prediction claims


@dataclass(frozen=True)
class Work:
    """The work of a step with adapters.

    Attributes:
        tokens: Rows that each use of a frozen weight multiplies.
        used: Numbers of frozen weights, once for each use: outputs, gradients of inputs,
            recomputation.
        dense: Operations (a multiply-add is two) with A and B and of causal attention, over the
            share of the nominal rate that they reach.
        bytes: That other operations move.
    """

    blocks: float
    tokens: int
    used: float
    dense: float
    bytes: float


@dataclass(frozen=True)
class StepTime:
    """A prediction.

    Attributes:
        source: Where it is from, in words.
        error: The share by which steps that were measured differ from it; None without any.
    """

    seconds: float
    source: str
    error: float | None = None


@dataclass(frozen=True)
class MeasuredStep:
    """A step that was measured on this device, beside what rates alone predict for it."""

    model: str
    shape: tuple[int, int]
    by_rates_s: float
    measured_s: float
    date: str


def work(headers: Headers, lora: LoRAConfig, train: TrainConfig) -> Work | None:
    """Return the work of a step with every token a target; None for what has no formula."""
    is_decoder = architecture_of(headers.config.get("model_type")) == "decoder"
    if train.trains_base or train.objective != "transformer" or not is_decoder:
        return None
    try:
        sizes = sizes_of(headers.config, headers.tensors)
        adapters = plan_adapters(sizes.modules, sizes.blocks, lora, train.method, headers.tensors)
    except PackError:  # a family without a formula
        return None

    length = sequence_inputs(train.max_seq_length)
    tokens = train.sequences * length
    backward = len(adapters.ranks)
    again = POLICIES[recompute_policies(train)[0]].blocks
    # blocks' worth of a forward pass, of those before the first adapter too
    forward = sizes.blocks + again * backward
    # a backward pass moves three times what a forward pass does
    blocks = (forward + 3 * backward) / 4

    block = sum(map(math.prod, sizes.projections.values())) / sizes.blocks
    head = sizes.vocab * sizes.hidden * has_logits(train)

    widths = {path.split(".", 3)[3]: sum(shape) for path, shape in sizes.projections.items()}
    factors = sum(rank * widths[name] for ranks in adapters.ranks for name, rank in ranks.items())
    one_attention = 2 * train.sequences * length**2 * sizes.queries
    attention = one_attention * (forward + 2.5 * backward)
    widest = sizes.hidden + sizes.ffn + sizes.queries + sizes.keys
    itemsize = activation_bytes(headers.config, train.compute_dtype)

    return Work(
        blocks=blocks,
        tokens=tokens,
        used=(forward + backward) * block + 2 * head,
        dense=6 * tokens * factors / MATMUL_REACHED + attention / _ATTENTION_REACHED,
        bytes=_OTHER_BYTES * itemsize * tokens * widest * blocks,
    )


def predict(headers: Headers, lora: LoRAConfig, train: TrainConfig) -> StepTime | None:
    """Return how long a step takes on this device; None where there is no basis for an estimate.

    There is none for devices that are only assumed, for what has no formula, for CPUs without and
    for unknown chips before `packs bench`. Batch size and length are those of every batch; matmul
    path ``auto`` is quantized.
    """
    if runtime.is_assumed() or (needed := work(headers, lora, train)) is None:
        return None

    by_rates = _by_rates(needed, headers, train)
    if by_rates is None:
        return None

    measured = measured_steps()
    if measured:
        factor, error = _fit(measured)
        names = ", ".join(sorted({step.model for step in measured}))
        source = f"calibrated by packs bench of {max(s.date for s in measured)} ({names})"
        return StepTime(factor * by_rates, source, max(error, _LEAST_ERROR))

    if runtime.on_cpu() or (chip := chips.chip()) is None:
        return None
    return StepTime(by_rates, f"predicted by rates of the {chip.name}, not measured")


def slow_in_place(headers: Headers, train: TrainConfig) -> str:
    """Return why the quantized path is far slower here than the others, by rates; else nothing."""
    if runtime.on_cpu():
        return "CPUs multiply by quantized weights slowly"

    chip = chips.known_chip()
    mode = _precision(headers, train)[0][2]
    if chip is None or chip.quantized_share(mode) > _SLOW:
        return ""
    return f"gradients through {mode} do not use the matrix units of {chip.name}"


def measured_steps() -> list[MeasuredStep]:
    """The steps that `packs bench` has measured on this device, if any."""
    record = recall(_KIND, {}) or {}
    try:
        steps = record["steps"]
        return [MeasuredStep(**{**step, "shape": tuple(step["shape"])}) for step in steps]
    except (KeyError, TypeError):
        return []


def remember_steps(steps: Sequence[tuple[Headers, LoRAConfig, TrainConfig, str, float]]) -> int:
    """Keep measured steps for `predict`; return how many have a formula.

    Of each: what was trained and how, the model's name and the seconds. Earlier ones of the same
    model and shape are replaced.
    """
    new = {}
    today = time.strftime("%Y-%m-%d")
    for headers, lora, train, model, seconds in steps:
        if (needed := work(headers, lora, train)) is None:
            continue
        if (by_rates := _by_rates(needed, headers, train)) is None:
            continue

        shape = train.sequences, sequence_inputs(train.max_seq_length)
        step = MeasuredStep(model, shape, by_rates, seconds, today)
        new[model, shape] = vars(step)

    if new:
        before = {(step.model, step.shape): vars(step) for step in measured_steps()}
        remember(_KIND, {}, {"steps": list((before | new).values())})
    return len(new)


def _fit(steps: Sequence[MeasuredStep]) -> tuple[float, float]:
    """Return the factor of least squared relative errors, and the largest of them."""
    shares = [step.by_rates_s / step.measured_s for step in steps]
    factor = sum(shares) / sum(share * share for share in shares)
    return factor, max(abs(factor * share - 1) for share in shares)


def _by_rates(needed: Work, headers: Headers, train: TrainConfig) -> float | None:
    """Return the seconds of a step's work by this device's rates; None if they are not known."""
    chip = chips.known_chip()
    if chip is None:
        return None

    nominal = 1e12 * (chip.vector_tflops if runtime.on_cpu() else chip.matrix_tflops)
    if not headers.is_quantized and train.quantize == "none":
        products = 2 * needed.tokens * needed.used / (nominal * MATMUL_REACHED)
    else:
        path = "quantized" if train.matmul_path == "auto" else train.matmul_path
        precision = _precision(headers, train)
        products = nominal_seconds(needed.used, needed.tokens, path, precision)

    launches = _LAUNCHES * chip.launch_us * 1e-6 * needed.blocks
    return products + needed.dense / nominal + needed.bytes / chip.bytes_per_s + launches


def _precision(headers: Headers, train: TrainConfig) -> Precision:
    written = headers.custom_format(train.quantize)
    if written is None and not headers.is_quantized:
        written = named_format(train.quantize)

    if written is not None:
        quantization = written.bits, written.group_size, written.mode
    else:
        stored = headers.config.get("quantization") or quantization_in_mlx(headers.config)
        quantization = (
            stored.get("bits", 4),
            stored.get("group_size", 64),
            stored.get("mode", "affine"),
        )

    return quantization, choose_compute_dtype(headers.config, train.compute_dtype).name
