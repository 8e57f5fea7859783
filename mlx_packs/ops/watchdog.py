"""Keep work on a Mac's GPU short.

macOS ends the process whose GPU work keeps the display waiting (ml-explore/mlx#3267). MLX commits
operations to the GPU in command buffers and divides none between two. So whatever is estimated to
take longer than `LONGEST_S` is computed in several calls: attention by rows and KV heads,
feed-forwards by tokens. `limit_operations` keeps the calls apart.
"""

import functools
import math
import os
from collections.abc import Iterable
from typing import NamedTuple

import mlx.core as mx

from .. import runtime
from ..chips import Chip, known_chip

VARIABLE = "MLX_MAX_OPS_PER_BUFFER"
LONGEST_S = 1.0  # that an operation should take
# The gradient of a layer's attention over 8,192 tokens takes about a second on an M1.
_LONG_ROW = 8192
_EMULATED_BF16 = 1.8  # times as long take 4-bit products on an M1 Max (ml-explore/mlx#4216)
_BACKWARD = 2.5  # times the operations of attention's forward pass has its gradient


class AttentionSizes(NamedTuple):
    """The sizes of a call of causal attention."""

    rows: int
    heads: int
    kv_heads: int
    length: int
    width: int


def attention_seconds(sizes: AttentionSizes, chip: Chip) -> float:
    """Return the seconds of the gradient of MLX's causal attention; the forward pass takes less."""
    operations = 2 * sizes.rows * sizes.heads * sizes.length**2 * sizes.width
    return _BACKWARD * operations / chip.attention_per_s


def attention_calls(sizes: AttentionSizes, chip: Chip) -> tuple[int, int]:
    """Return in how many parts rows, and heads, are computed, so that no call is too long.

    Parts have as many heads each, of whole groups or of one. A call has one head of one row at
    least, however long that is.
    """
    needed = attention_seconds(sizes, chip) / LONGEST_S
    rows = _enough((n for n in range(1, sizes.rows + 1) if sizes.rows % n == 0), needed)

    of_heads = (
        n
        for n in range(1, sizes.heads + 1)
        if sizes.heads % n == 0 and (sizes.kv_heads % n == 0 or n % sizes.kv_heads == 0)
    )
    return rows, _enough(of_heads, needed / rows)


def product_seconds(tokens: int, out: int, width: int, chip: Chip, half: bool = False) -> float:
    """Return the seconds of a product with a quantized weight; ``half`` is in float16."""
    slower = 1.0 if half or chip.native_bf16 else _EMULATED_BF16
    rate = chip.products_per_s * chip.quantized_share("affine")
    return slower * 2 * tokens * out * width / rate


def product_calls(tokens: int, out: int, width: int, chip: Chip, half: bool = False) -> int:
    """Return in how many calls the tokens of a product are computed, so that none is too long."""
    return max(1, math.ceil(product_seconds(tokens, out, width, chip, half) / LONGEST_S))


def _enough(counts: Iterable[int], needed: float) -> int:
    """Return the first of rising numbers that is enough, or the largest."""
    options = list(counts)
    return next((n for n in options if n >= needed), options[-1])


def watched_chip() -> Chip | None:
    """Return the chip whose GPU computes, if macOS watches it and its rates are known."""
    if runtime.on_cpu() or not mx.metal.is_available():
        return None
    return _chip_of_process()


_chip_of_process = functools.cache(known_chip)


def limit_operations(max_seq_length: int) -> str:
    """Make MLX commit every operation on long rows of its own; return a line that says so.

    Rows of more than `_LONG_ROW` tokens are long; their operations are so large that a command
    buffer for each costs nothing. A limit in the environment stays. MLX reads the variable once,
    when it first uses the GPU.
    """
    if not mx.metal.is_available() or VARIABLE in os.environ or max_seq_length <= _LONG_ROW:
        return ""

    os.environ[VARIABLE] = "0"
    line = f"{VARIABLE}=0, since rows have more than {_LONG_ROW:,} tokens"
    if mx.get_peak_memory():
        line += "; it has to be in the environment when Python starts"
    return line
