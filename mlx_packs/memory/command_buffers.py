"""An estimate of the GPU time of a step's command buffers, and the limit that keeps it short.

macOS ends the process whose command buffers keep the display waiting ("Impacting Interactivity",
"GPU Timeout Error"). MLX hands operations to Metal in command buffers and ends one after so many
operations, or when the arrays that it touches have so many million numbers together. An operation
is never divided between two, so that attention over long rows is computed in several calls
(`ops.attention`); `MLX_MAX_OPS_PER_BUFFER` keeps them apart. It is read when MLX first uses the
GPU.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from .. import runtime
from ..bases.precision import activation_bytes
from ..chips import BANDWIDTH_REACHED, CHIPS, Chip
from ..config.schema import TrainConfig
from ..data.shapes import sequence_inputs
from ..display import Display
from ..errors import PackError
from ..ops.watchdog import (
    LONGEST_S,
    AttentionSizes,
    attention_calls,
    attention_seconds,
    product_calls,
    product_seconds,
)
from ..packs.base import Base
from ..runtime import mx
from .decoder_sizes import Sizes, sizes_of
from .headers import Headers
from .read import read_headers

VARIABLE = "MLX_MAX_OPS_PER_BUFFER"
_LIMITS = (20, 10, 5, 3, 2, 1, 0)  # to try, below MLX's own
_SMALL = 3  # arrays that an elementwise operation reads and writes
_TOO_LONG = 1.25  # times LONGEST_S


@dataclass(frozen=True)
class Operation:
    """An operation of a step: its seconds, and the numbers of the arrays that only it touches."""

    name: str
    seconds: float
    numbers: float


@dataclass(frozen=True)
class CommandBuffers:
    """The longest command buffer of a step, by the model of a chip.

    Attributes:
        limit: Of operations in a buffer, what keeps them short; None where MLX's own does.
        before_s: Seconds with MLX's own limits and undivided operations.
        after_s: Seconds with ``limit`` and divided operations.
        calls: Of attention for one layer, and of a feed-forward.
        longest: The longest operation.
        chip: The chip's name.
    """

    limit: int | None
    before_s: float
    after_s: float
    calls: tuple[int, int]
    longest: Operation
    chip: str

    def line(self) -> str:
        """Return the changes, for one line of output; nothing if none was needed."""
        if self.before_s <= _TOO_LONG * LONGEST_S:
            return ""
        done = []
        if self.limit is not None:
            done.append(f"{VARIABLE}={self.limit}")
        for what, calls in zip(("attention", "feed-forward"), self.calls, strict=True):
            if calls > 1:
                done.append(f"{what} in {calls} calls")
        if self.after_s > _TOO_LONG * LONGEST_S:
            done.append(f"too long for a display is one {self.longest.name}; shorten the examples")

        return (
            f"{self.after_s:.2g} s of work at once, {self.before_s:.2g} s if undivided "
            f"(estimate, {self.chip}) · {' · '.join(done)}"
        )


def default_limits(chip: str) -> tuple[int, float]:
    """Return MLX's own limits for a chip: operations, and numbers of all arrays of a buffer.

    Numbers are what MLX counts, though the variable for them speaks of megabytes.
    """
    if any(part in chip for part in ("Pro", "Max", "Ultra")):  # an M4 Pro has those of a Max
        return 50, 50 << 20
    return 40, 40 << 20


def plan_buffers(
    headers: Headers, train: TrainConfig, chip: Chip, limit: int | None = None
) -> CommandBuffers:
    """Return the longest command buffer of a step on full batches, and what keeps it short.

    A ``limit`` of the user is kept. Raises a PackError for a family without a formula.
    """
    sizes = sizes_of(headers.config, headers.tensors)
    step = _Step(sizes, train, chip, activation_bytes(headers.config, train.compute_dtype))
    own, numbers = default_limits(chip.name)
    before = longest_seconds(list(step.operations(1, 1)), limit or own, numbers)

    operations = list(step.operations(*step.calls))
    tried = [limit]
    if limit is None:
        tried = [own, *(n for n in _LIMITS if n < own)]
    seconds = {n: longest_seconds(operations, n, numbers) for n in tried}
    short = [n for n, longest in seconds.items() if longest <= _TOO_LONG * LONGEST_S]
    chosen = min(tried, key=lambda n: (seconds[n], -n))
    if short:
        chosen = short[0]

    return CommandBuffers(
        limit=None if chosen == tried[0] else chosen,
        before_s=before,
        after_s=seconds[chosen],
        calls=step.calls,
        longest=max(operations, key=lambda operation: operation.seconds),
        chip=chip.name,
    )


def longest_seconds(operations: list[Operation], limit: int, numbers: float) -> float:
    """Return the seconds of the longest buffer of operations that repeat without an end.

    As MLX does: a buffer ends once it has more than ``limit`` operations, or touches more than so
    many numbers.
    """
    longest = seconds = touched = 0.0
    count = 0
    for operation in chain(operations, operations):
        count += 1
        touched += operation.numbers
        seconds += operation.seconds
        if count > limit or touched > numbers:
            longest = max(longest, seconds)
            seconds = touched = 0.0
            count = 0
    return max(longest, seconds)


@dataclass(frozen=True)
class _Step:
    """A training step of a base of the Llama family, both ways through a block."""

    sizes: Sizes
    train: TrainConfig
    chip: Chip
    itemsize: int

    @property
    def _tokens(self) -> int:
        return self.train.sequences * (sequence_inputs(self.train.max_seq_length))

    @property
    def _attention(self) -> AttentionSizes:
        width = self.sizes.queries // self.sizes.heads
        rows = self.train.sequences
        length = sequence_inputs(self.train.max_seq_length)
        return AttentionSizes(rows, self.sizes.heads, self.sizes.keys // width, length, width)

    @property
    def _is_half(self) -> bool:
        return self.train.compute_dtype == "float16"

    @property
    def calls(self) -> tuple[int, int]:
        """How many calls attention and a feed-forward are computed in."""
        rows, heads = attention_calls(self._attention, self.chip)
        tokens = self._tokens
        sizes = self.sizes
        products = product_calls(tokens, sizes.ffn, sizes.hidden, self.chip, self._is_half)
        return rows * heads, products

    def operations(self, attention: int, feed_forward: int) -> Iterator[Operation]:
        """Yield those of a block, forward and backward, in so many calls."""
        block = {path.rpartition(".")[2]: s for path, s in self.sizes.projections.items()}
        seconds = attention_seconds(self._attention, self.chip) / attention
        outputs = self._tokens * self.sizes.queries / attention
        tokens = self._tokens // feed_forward

        yield self._small("norm", self.sizes.hidden)
        for name in ("q_proj", "k_proj", "v_proj"):
            yield from self._product(name, *block[name])
        yield from [Operation("attention", seconds / 2.5, outputs)] * attention
        yield from self._product("o_proj", *block["o_proj"])
        yield self._small("norm", self.sizes.hidden)

        for _ in range(feed_forward):
            yield from self._product("gate_proj", *block["gate_proj"], tokens)
            yield from self._product("up_proj", *block["up_proj"], tokens)
            yield self._small("swiglu", self.sizes.ffn)
            yield from self._product("down_proj", *block["down_proj"], tokens)

        for _ in range(feed_forward):
            for name in ("down_proj", "up_proj", "gate_proj"):
                yield from self._product(name, *reversed(block[name]), tokens)

        yield from self._product("o_proj", *reversed(block["o_proj"]))
        yield from [Operation("gradient of attention", seconds, 3 * outputs)] * attention
        for name in ("q_proj", "k_proj", "v_proj"):
            yield from self._product(name, *reversed(block[name]))

    def _product(
        self, name: str, out: int, width: int, tokens: int | None = None
    ) -> Iterator[Operation]:
        tokens = tokens or self._tokens
        weight = out * width / 6  # words of 4-bit codes, and their scales
        seconds = product_seconds(tokens, out, width, self.chip, self._is_half)
        yield Operation(f"product ({name})", seconds, tokens * out + weight)
        yield self._small("adapter", width, 0)
        yield self._small("adapter", out)

    def _small(self, name: str, width: int, written: int = 1) -> Operation:
        moved = _SMALL * self.itemsize * self._tokens * width
        seconds = moved / (1e9 * self.chip.bandwidth_gb_s * BANDWIDTH_REACHED)
        return Operation(name, seconds, written * self._tokens * width)


def chip_named(brand: str) -> Chip:
    """Return the table's chip of this name, or the slowest one for a chip that it does not know."""
    return CHIPS.get(brand) or CHIPS["Apple M1"]


def limit_command_buffers(base: Base | str | Path, train: TrainConfig, display: Display) -> None:
    """Set MLX's limit of operations where command buffers would be too long, and say so.

    A limit in the environment is kept. MLX reads it once, so that a process that has used the GPU
    keeps what it had.
    """
    if not mx.metal.is_available():
        return

    value = os.environ.get(VARIABLE, "")
    limit = None
    if value.isdecimal():
        limit = int(value)

    try:
        if isinstance(base, Base):
            headers = Headers.of(base)
        else:
            headers = read_headers(base)
        chip = chip_named(runtime.processor_name())
        planned = plan_buffers(headers, train, chip, limit)
    except PackError:  # loading reports what is wrong; a family without a formula has no plan
        return

    line = planned.line()
    if planned.limit is not None:
        os.environ[VARIABLE] = str(planned.limit)
        if isinstance(base, Base) or mx.get_peak_memory():
            line += ", which has to be in the environment when Python starts"
    if line:
        display.line("gpu", line)
