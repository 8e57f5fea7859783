"""Recomputation: what is cheap to make again is not kept for the backward.

``none`` keeps all. ``selective`` keeps what frozen products made and computes again what lies
between them: norms and RoPE of q and k, attention, SwiGLU (https://arxiv.org/abs/2205.05198).
``block`` keeps the input of each block and computes the block again
(https://arxiv.org/abs/1604.06174).
"""

from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from .lora import GroupedLoRA
from .wrapped import WrappedBlock


def recomputed(function: Callable, modules: Sequence[nn.Module], *args, **kwargs):
    """``function(*args, **kwargs)``; the backward calls it again instead of keeping its inside.

    The second call waits for the gradient of the result, and what it passes on waits for the
    gradients of the parameters: so one inside is in memory at a time. (`mx.checkpoint` lets both
    drift, and then the insides of several blocks are held until the end of the step.)

    Args:
        modules: whose trainable parameters ``function`` uses; other arrays that it closes over
            get no gradient.
        args, kwargs: gradients reach every floating array among them.
    """
    names = [[name for name, _ in tree_flatten(m.trainable_parameters())] for m in modules]
    own = [a for m in modules for _, a in tree_flatten(m.trainable_parameters())]
    given: list[mx.array] = []
    tree_map(lambda leaf: given.append(leaf) if _is_differentiable(leaf) else None, (args, kwargs))
    dropouts = [
        lora.dropout
        for m in modules
        for lora in m.modules()
        if isinstance(lora, GroupedLoRA) and lora.training and lora.dropout.p
    ]
    # drawn here, once: both calls must drop the same inputs; within another such call, its keys
    keys = [_fresh_key() if d.key is None else d.key for d in dropouts]

    def set_parameters(values: Sequence[mx.array]) -> None:
        remaining = iter(values)
        for module, of_module in zip(modules, names, strict=True):
            if of_module:
                module.update(tree_unflatten([(name, next(remaining)) for name in of_module]))

    def call(*arrays):
        remaining = iter(arrays[len(own) :])
        placed = tree_map(
            lambda leaf: next(remaining) if _is_differentiable(leaf) else leaf, (args, kwargs)
        )
        set_parameters(arrays[: len(own)])
        before = [dropout.key for dropout in dropouts]
        for dropout, key in zip(dropouts, keys, strict=True):
            dropout.key = key
        try:
            return function(*placed[0], **placed[1])
        finally:
            set_parameters(own)
            for dropout, key in zip(dropouts, before, strict=True):
                dropout.key = key

    kept = mx.custom_function(call)

    @kept.vjp
    def backward(primals, cotangents, _):
        primals = [primals] if isinstance(primals, mx.array) else list(primals)
        cotangents = [cotangents] if isinstance(cotangents, mx.array) else list(cotangents)
        _, gradients = mx.vjp(call, mx.depends(primals, cotangents), cotangents)
        of_own, of_given = gradients[: len(own)], gradients[len(own) :]
        if of_own and of_given:
            of_given = mx.depends(of_given, of_own)
        return [*of_own, *of_given]

    return kept(*own, *given)


def _is_differentiable(leaf: object) -> bool:
    return isinstance(leaf, mx.array) and mx.issubdtype(leaf.dtype, mx.floating)


def _fresh_key() -> mx.array:
    """A random key, drawn from MLX's own random state (which follows the seed of the run)."""
    return mx.random.randint(0, 2**31 - 1, (2,)).astype(mx.uint32)


class RecomputedBlock(WrappedBlock):
    """A block that the backward computes again."""

    def __call__(self, *args, **kwargs):
        block = self["block"]
        if not self.training:
            return block(*args, **kwargs)
        return recomputed(block, [block], *args, **kwargs)
