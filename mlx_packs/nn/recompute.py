"""Activation checkpointing: the backward pass recomputes what is cheap.

``none`` stores all activations. ``selective`` stores the outputs of frozen products, and recomputes
norms and RoPE of q and k, attention and SwiGLU between them (https://arxiv.org/abs/2205.05198).
``block`` stores the input of each block, and recomputes it (https://arxiv.org/abs/1604.06174).
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from greenlet import getcurrent, greenlet
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

    Gradients reach every floating array among the arguments, the arrays of a `PrefixCache` among
    them before and after the call, and the trainable parameters of ``modules``; other arrays that
    ``function`` closes over get none.
    """
    return _Checkpoint(modules, [_Call(function, args, kwargs)]).results()[0]


class _Call:
    """A call of a function that is computed again, with the prefix caches among its arguments."""

    def __init__(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> None:
        self._function = function
        self._caches = prefix_caches_in((args, kwargs))
        self._has_next = not all(cache.is_last for cache in self._caches)
        self._places: list[tuple[str, int]] = []  # where arrays are in the tree of results
        self._others: list[tuple[str, Any]] = []

        # what is in a cache is an argument as well: there, no gradient would find it
        self.arguments = [cache.earlier for cache in self._caches], args, kwargs

    def arrays(self, earlier: list[Arrays | None], args: tuple, kwargs: dict) -> list[mx.array]:
        """Return the arrays of the result for `arguments` with other arrays."""
        pairs = zip(self._caches, earlier, strict=True)
        caches = [cache.following(arrays) for cache, arrays in pairs]
        unused = iter(caches)
        args, kwargs = tree_map(
            lambda leaf: next(unused) if isinstance(leaf, PrefixCache) else leaf, (args, kwargs)
        )
        result = self._function(*args, **kwargs)

        of_caches = [cache.arrays() if self._has_next else None for cache in caches]
        leaves = tree_flatten([result, *of_caches])
        arrays = [(name, leaf) for name, leaf in leaves if isinstance(leaf, mx.array)]

        # once each: of an array that is a result twice, MLX takes one gradient only
        distinct = {id(leaf): leaf for _, leaf in arrays}
        order = list(distinct)
        self._places = [(name, order.index(id(leaf))) for name, leaf in arrays]
        self._others = [(name, leaf) for name, leaf in leaves if not isinstance(leaf, mx.array)]
        return list(distinct.values())

    def result(self, arrays: Sequence[mx.array]) -> Any:
        """Return the result that has these arrays."""
        placed = ((name, arrays[i]) for name, i in self._places)
        result, *of_caches = tree_unflatten([*placed, *self._others])

        if self._has_next:
            for cache, of_cache in zip(self._caches, of_caches, strict=True):
                cache.set_arrays(of_cache)
        return result


class _Checkpoint:
    """Some calls, computed one after another, with one read of blocks on disk in each direction."""

    def __init__(self, modules: Sequence[nn.Module], calls: Sequence[_Call]) -> None:
        self._modules = modules
        self._calls = calls
        self._names = [
            [name for name, _ in tree_flatten(m.trainable_parameters())] for m in modules
        ]
        self._parameters = [a for m in modules for _, a in tree_flatten(m.trainable_parameters())]
        self._inputs = [
            [leaf for _, leaf in tree_flatten(call.arguments) if _is_differentiable(leaf)]
            for call in calls
        ]

        self._input_counts = [len(self._parameters), *map(len, self._inputs)]
        self._output_counts: list[int] = []
        self._dropouts = [
            lora.dropout
            for m in modules
            for lora in m.modules()
            if isinstance(lora, GroupedLoRA) and lora.training and lora.dropout.p
        ]

        # drawn once: both passes must drop the same inputs; within another such call, its keys
        self._keys = [
            [_fresh_key() if d.key is None else d.key for d in self._dropouts] for _ in calls
        ]

    def results(self) -> list[Any]:
        checkpointed = mx.custom_function(self._forward)
        checkpointed.vjp(self._backward)
        arrays = checkpointed(*self._parameters, *itertools.chain(*self._inputs))
        outputs = zip(self._calls, _split(arrays, self._output_counts), strict=True)
        return [call.result(arrays) for call, arrays in outputs]

    def _forward(self, *arrays: mx.array) -> list[mx.array]:
        parameters, *inputs = _split(arrays, self._input_counts)
        outputs: list[list[mx.array]] = []
        with _weights_to_read(self._modules):
            for number, leaves in enumerate(inputs):
                if outputs:
                    leaves = mx.depends(leaves, outputs[-1])
                outputs.append(self._compute(number, *parameters, *leaves))

        self._output_counts = [len(of_call) for of_call in outputs]
        return [array for of_call in outputs for array in of_call]

    def _backward(self, primals: Any, cotangents: Any, _: Any) -> list[mx.array]:
        primals = [primals] if isinstance(primals, mx.array) else primals
        cotangents = [cotangents] if isinstance(cotangents, mx.array) else list(cotangents)
        parameters, *inputs = _split(primals, self._input_counts)
        of_outputs = _split(cotangents, self._output_counts)
        of_parameters: list[mx.array] = []
        of_inputs: list[mx.array] = []
        earlier = cotangents

        # the gradients of products read frozen weights too, which a block on disk has until then
        with _weights_to_read(self._modules):
            for number, leaves in enumerate(inputs):
                arrays = mx.depends([*parameters, *leaves], earlier)
                _, gradients = mx.vjp(partial(self._compute, number), arrays, of_outputs[number])
                added, passed_on = _split(gradients, [len(parameters), len(leaves)])

                # summed in the order of the calls, as gradients of batches are
                of_parameters = list(map(mx.add, of_parameters, added)) or added
                if of_parameters and passed_on:
                    passed_on = mx.depends(passed_on, of_parameters)
                of_inputs += passed_on
                earlier = [*of_parameters, *passed_on]

        return [*of_parameters, *of_inputs]

    def _compute(self, number: int, *arrays: mx.array) -> list[mx.array]:
        """Return the arrays of a call, given the parameters and its inputs."""
        call = self._calls[number]
        count = len(self._parameters)
        inputs = iter(arrays[count:])
        placed = tree_map(
            lambda leaf: next(inputs) if _is_differentiable(leaf) else leaf, call.arguments
        )
        self._set_parameters(arrays[:count])

        before = [dropout.key for dropout in self._dropouts]
        for dropout, key in zip(self._dropouts, self._keys[number], strict=True):
            dropout.key = key

        try:
            return call.arrays(*placed)
        finally:
            self._set_parameters(self._parameters)
            for dropout, key in zip(self._dropouts, before, strict=True):
                dropout.key = key

    def _set_parameters(self, values: Sequence[mx.array]) -> None:
        remaining = iter(values)
        for module, names in zip(self._modules, self._names, strict=True):
            if names:
                module.update(tree_unflatten([(name, next(remaining)) for name in names]))


def blocks_together(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return the results of functions that call a model, whose inputs pass each block together.

    A block on disk is read once for all. No other transformation of MLX may be around their calls.
    """
    return lockstep(functions, lambda block, calls: _Checkpoint([block], calls).results())


# a thread would not do: MLX computes an array only in the thread of its stream
class _Waiting(greenlet):
    """A function that `lockstep` runs."""


def meet(place: Any, request: Any) -> Any:
    """Return the result of a request, once the other functions have come to a place too."""
    return getcurrent().parent.switch((place, request))


def lockstep(
    functions: Sequence[Callable[[], Any]], join: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """Return the results, trees of arrays, of functions that `meet`; ``join`` answers requests.

    What one computes after its last meeting waits for the function before it, so that their
    temporaries are not in memory at the same time.
    """
    tasks = [_Waiting(function) for function in functions]
    states = [task.switch() for task in tasks]  # place and request, of one that ended its result
    while waiting := [number for number, task in enumerate(tasks) if not task.dead]:
        # one may come to a place that others do not: the first decides where to go on
        place, _ = states[waiting[0]]
        met = [number for number in waiting if states[number][0] is place]
        results = join(place, [states[number][1] for number in met])

        ended: Any = []
        for number, result in zip(met, results, strict=True):
            states[number] = tasks[number].switch(_after(ended, result))
            if tasks[number].dead:
                ended = states[number]
    return states


def _after(earlier: Any, result: Any) -> Any:
    """Return a result whose arrays are computed after the arrays of an earlier one."""
    arrays = [mx.stop_gradient(array) for _, array in tree_flatten(earlier)]
    if not arrays:
        return result
    return tree_map(
        lambda leaf: mx.depends([leaf], arrays)[0] if isinstance(leaf, mx.array) else leaf, result
    )


def _split(arrays: Sequence[mx.array], counts: Sequence[int]) -> list[list[mx.array]]:
    remaining = iter(arrays)
    return [list(itertools.islice(remaining, count)) for count in counts]


@contextmanager
def _weights_to_read(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Return a context in which blocks on disk among modules have their weights."""
    with ExitStack() as read:
        for module in modules:
            if (weights_to_read := getattr(module, "weights_to_read", None)) is not None:
                read.enter_context(weights_to_read())
        yield


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
        if isinstance(getcurrent(), _Waiting):
            return meet(block, _Call(block, args, kwargs))
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
