"""Keep work on a Mac's GPU short.

macOS ends the process whose GPU work keeps the display waiting (ml-explore/mlx#3267). MLX commits
operations to the GPU in command buffers and divides none between two. So whatever would take the
slowest chip, an M1, more than about a second is computed in several calls: attention by rows and
KV heads, feed-forwards by tokens. Faster chips take as many, which are still long. No Mac was
measured. `limit_operations` keeps the calls apart.
"""

import math
import os

import mlx.core as mx

from .. import runtime

VARIABLE = "MLX_MAX_OPS_PER_BUFFER"
# Of an M1 in a second: 60 % of its 2.6 TFLOPS, and a third in products with 4-bit weights, since it
# emulates bfloat16 (ml-explore/mlx#4216).
ATTENTION_OPERATIONS = 1.5e12
PRODUCT_OPERATIONS = 0.9e12
_BACKWARD = 2.5  # times the operations of attention's forward pass has its gradient
# The gradient of a layer's attention over 8,192 tokens takes about a second on an M1.
_LONG_ROW = 8192


def is_watched() -> bool:
    """Return whether a GPU computes that macOS watches."""
    return not runtime.on_cpu() and mx.metal.is_available()


def attention_calls(
    rows: int, heads: int, kv_heads: int, length: int, width: int
) -> tuple[int, int]:
    """Return in how many parts rows, and heads, are computed, so that no call is too long.

    Parts have as many heads each, of whole groups or of one. A call has one head of one row at
    least, however long that is.
    """
    needed = _BACKWARD * 2 * rows * heads * length**2 * width / ATTENTION_OPERATIONS
    divisors = (n for n in range(1, rows + 1) if rows % n == 0)
    row_parts = next((n for n in divisors if n >= needed), rows)
    head_parts = [
        n
        for n in range(1, heads + 1)
        if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)
    ]
    return row_parts, next((n for n in head_parts if n >= needed / row_parts), heads)


def product_calls(tokens: int, out: int, width: int) -> int:
    """Return in how many calls the tokens of a product are computed, so that none is too long."""
    return max(1, math.ceil(2 * tokens * out * width / PRODUCT_OPERATIONS))


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
