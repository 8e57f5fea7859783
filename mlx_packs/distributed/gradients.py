"""The gradients of all ranks, added up in parts while the backward pass of others lasts."""

from mlx.utils import tree_flatten, tree_unflatten

from ..runtime import mx
from .group import group

_PART = 1 << 20  # numbers that are sent together


def summed_over_ranks(
    gradients: dict, count: mx.array, dtype: mx.Dtype = mx.float32
) -> tuple[dict, mx.array]:
    """Return the sum of gradients and counts over the ranks. With one rank they are unchanged.

    Each part is given to MLX by itself, the last layers first: its exchange begins when the
    backward pass has come so far, and lasts while it continues. In half precision gradients are
    sent as means over all targets, since sums can be out of range.

    ``gradients`` are a tree, of sums over targets; ``count`` of these is a scalar. They are sent
    and added in ``dtype``, and returned in their own.
    """
    ranks = group()
    if ranks.shares == 1:
        return gradients, count

    count = ranks.sum(count.astype(mx.float32))
    scale = 1.0
    if dtype != mx.float32:
        scale = mx.maximum(count, 1)

    named = tree_flatten(gradients)
    parts: list[list[tuple[str, mx.array]]] = [[]]
    for name, array in reversed(named):  # the last layers have theirs first
        if parts[-1] and sum(a.size for _, a in parts[-1]) + array.size > _PART:
            parts.append([])
        parts[-1].append((name, array))

    summed = {}
    for part in filter(None, parts):
        flat = mx.concatenate([(a / scale).astype(dtype).reshape(-1) for _, a in part])
        total = ranks.sum(flat)
        mx.async_eval(total)
        start = 0
        for name, array in part:
            values = total[start : start + array.size].reshape(array.shape).astype(array.dtype)
            summed[name] = values * scale
            start += array.size

    return tree_unflatten([(name, summed[name]) for name, _ in named]), count
