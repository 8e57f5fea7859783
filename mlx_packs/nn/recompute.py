"""Activation checkpointing: the backward pass recomputes what is cheap.

``none`` stores all activations. ``selective`` stores the outputs of frozen products, and recomputes
norms and RoPE of q and k, attention and SwiGLU between them (https://arxiv.org/abs/2205.05198).
``block`` stores the input of each block, and recomputes it (https://arxiv.org/abs/1604.06174).
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from ..config.choices import POLICIES
from .lora import GroupedLoRA
from .prefix import Arrays, PrefixCache, prefix_caches_in
from .segments import SegmentCache
from .surgery import GroupedBlock, block_prefixes
from .wrapped import WrappedBlock


def recomputed(
    function: Callable[..., Any], modules: Sequence[nn.Module], *args: Any, **kwargs: Any
) -> Any:
    """Return ``function(*args, **kwargs)``; the backward calls it again for its activations.

    The second call waits for the gradient of the result, and what it passes on waits for the
    gradients of the parameters, so that the activations of one call are in memory at a time.
    (`mx.checkpoint` enforces neither order, and then those of several blocks stay in memory until
    the end of the step.)

    Gradients reach every floating array among the arguments, what a `PrefixCache` among them keeps
    or gets from the call, and the trainable parameters of ``modules``; other arrays that
    ``function`` closes over get none.
    """
    caches = prefix_caches_in((args, kwargs))
    leaves_arrays = not all(cache.is_last for cache in caches)
    places: list[tuple[str, int]] = []  # where arrays are in the tree of results
    others: list[tuple[str, Any]] = []

    def call(kept: list[Arrays | None], args: tuple, kwargs: dict[str, Any]) -> list[mx.array]:
        own = [cache.keeping(arrays) for cache, arrays in zip(caches, kept, strict=True)]
        unused = iter(own)
        args, kwargs = tree_map(
            lambda leaf: next(unused) if isinstance(leaf, PrefixCache) else leaf, (args, kwargs)
        )
        result = function(*args, **kwargs)

        left = [cache.left() if leaves_arrays else None for cache in own]
        leaves = tree_flatten([result, *left])
        arrays = [(name, leaf) for name, leaf in leaves if isinstance(leaf, mx.array)]

        # once each: of an array that is a result twice, MLX takes one gradient only
        distinct = {id(leaf): leaf for _, leaf in arrays}
        order = list(distinct)
        places[:] = [(name, order.index(id(leaf))) for name, leaf in arrays]
        others[:] = [(name, leaf) for name, leaf in leaves if not isinstance(leaf, mx.array)]
        return list(distinct.values())

    kept = [cache.kept for cache in caches]  # in a cache, no gradient would find them
    arrays = _recomputed(call, modules, kept, args, kwargs)
    result, *left = tree_unflatten([*((name, arrays[i]) for name, i in places), *others])

    if leaves_arrays:
        for cache, own in zip(caches, left, strict=True):
            cache.take(own)
    return result


def _recomputed(
    function: Callable[..., list[mx.array]], modules: Sequence[nn.Module], *args: Any
) -> list[mx.array]:
    names = [[name for name, _ in tree_flatten(m.trainable_parameters())] for m in modules]
    parameters = [a for m in modules for _, a in tree_flatten(m.trainable_parameters())]
    inputs = [leaf for _, leaf in tree_flatten(args) if _is_differentiable(leaf)]
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

    def call(*arrays: mx.array) -> list[mx.array]:
        remaining = iter(arrays[len(parameters) :])
        placed = tree_map(lambda leaf: next(remaining) if _is_differentiable(leaf) else leaf, args)
        set_parameters(arrays[: len(parameters)])

        before = [dropout.key for dropout in dropouts]
        for dropout, key in zip(dropouts, keys, strict=True):
            dropout.key = key

        try:
            return function(*placed)
        finally:
            set_parameters(parameters)
            for dropout, key in zip(dropouts, before, strict=True):
                dropout.key = key

    checkpointed = mx.custom_function(call)

    @checkpointed.vjp
    def backward(primals: Any, cotangents: Any, _: Any) -> list[mx.array]:
        primals = [primals] if isinstance(primals, mx.array) else list(primals)
        cotangents = [cotangents] if isinstance(cotangents, mx.array) else list(cotangents)
        # the gradients of products read frozen weights too, which a block on disk has until then
        with ExitStack() as read:
            for module in modules:
                if (weights_to_read := getattr(module, "weights_to_read", None)) is not None:
                    read.enter_context(weights_to_read())
            _, gradients = mx.vjp(call, mx.depends(primals, cotangents), cotangents)

        of_parameters = gradients[: len(parameters)]
        of_inputs = gradients[len(parameters) :]
        if of_parameters and of_inputs:
            of_inputs = mx.depends(of_inputs, of_parameters)
        return [*of_parameters, *of_inputs]

    return checkpointed(*parameters, *inputs)


def _is_differentiable(leaf: object) -> bool:
    return isinstance(leaf, mx.array) and mx.issubdtype(leaf.dtype, mx.floating)


def _fresh_key() -> mx.array:
    # of MLX's own random state, which follows the seed of the run
    return mx.random.randint(0, 2**31 - 1, (2,)).astype(mx.uint32)


class RecomputedBlock(WrappedBlock):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self["block"]
        # in training mlx-lm passes a cache only if later blocks read it; a gradient must reach it
        is_read = any(
            hasattr(leaf, "update_and_fetch") and not isinstance(leaf, PrefixCache | SegmentCache)
            for _, leaf in tree_flatten((args, kwargs))
        )

        if is_read or not self.training:
            return block(*args, **kwargs)
        return recomputed(block, [block], *args, **kwargs)


def recomputing(model: nn.Module, policy: str) -> list[tuple[str, nn.Module]]:
    """Set the policy of a model's grouped blocks; return what replaces its blocks, by their paths.

    Operations are computed again in blocks with grouped projections; other families keep all.
    """
    facts = POLICIES[policy]
    for module in model.modules():
        if isinstance(module, GroupedBlock):
            module.recompute = facts.operations

    if not facts.blocks:
        return []
    paths = zip(block_prefixes(model), model.layers, strict=True)
    return [(path, RecomputedBlock(block)) for path, block in paths]
