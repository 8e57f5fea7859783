"""Cached frozen activations: the input of the first adapted block, computed once per example.

Below the adapters all is frozen, so these states are a function of the base and the example. Each
example is computed in the batch that has it in the first epoch, which costs what a run without a
cache costs; whenever its states are computed again, as in a resumed run, the batch and so the bits
are the same. The states of all examples must fit into memory.
"""

from collections.abc import Callable

import mlx.nn as nn
import numpy as np

from .. import runtime
from ..adapters.lora import Attached
from ..adapters.saved_modules import WithSavedModules
from ..bases.geometry import is_embedding
from ..config.schema import TrainConfig
from ..data.batches import token_collate
from ..data.dataset import Batch
from ..data.encoding import Examples
from ..data.sampler import Sampler
from ..data.shapes import sequence_inputs
from ..display import VERBOSE, Display, size
from ..errors import Code, PackError
from ..nn.surgery import block_prefixes, replace_modules
from ..nn.wrapped import FrozenBlock, Injection, frozen_output, trained_module
from ..runtime import mx
from .causal_lm import Head, Preparation, forward, segments_of
from .exactness import TOLERANCE, relative_error
from .objective import arrays_of

_WORTHWHILE = 0.1  # least share of a step's time to save, counting blocks
_MEMORY_SHARE = 0.5  # of what the plan leaves
_PROBE = (2, 16)
_PROBE_PADDING = 8
_PROBE_STD = 0.02  # of the adapters' B

StandIns = list[tuple[str, FrozenBlock]]


class FrozenActivations(Preparation):
    """States of the examples of a run.

    ``part`` is the model or its hidden states, ``sampler`` that of a run of one phase, in whose
    first epoch each example is computed.
    """

    def __init__(
        self,
        attached: Attached | WithSavedModules,
        part: Callable[..., mx.array],
        examples: Examples,
        sampler: Sampler,
        example_states: mx.array,
    ) -> None:
        self.rows_computed = 0
        self._states: dict[int, np.ndarray] = {}  # uint8 [inputs, bytes] of each computed row

        self._blocks = frozen_blocks(attached)
        self._model = attached.model
        self._part = part
        self._examples = examples
        self._collate = token_collate(sampler)

        self._dtype = example_states.dtype
        self._token_bytes = example_states.shape[-1] * example_states.dtype.size
        self._inputs = examples.lengths - 1

        self._batches = sampler.epoch(0)
        self._batch_of = np.empty(len(examples), np.int64)
        for number, rows in enumerate(self._batches):
            self._batch_of[rows.examples if sampler.packing else rows] = number

    def ahead(self, batch: Batch) -> Batch:
        """Add the states of a batch as bytes, where all of them are computed already."""
        if not all(row in self._states for row in batch.examples):
            return batch
        return batch.having(states=self._lay_out(batch))

    def prepare(self, batch: Batch) -> Batch:
        """Add the states [B, T, D] of a batch.

        Missing ones are computed with the batch that has them in the first epoch: stored and
        computed states are equal.
        """
        laid_out = batch.inputs.get("states")
        if laid_out is None:
            missing = [row for row in batch.examples if row not in self._states]
            for number in sorted({int(self._batch_of[row]) for row in missing}):
                for row, states in self.compute(number).items():
                    self._states.setdefault(row, states)
            laid_out = self._lay_out(batch)
        return batch.having(states=mx.array(laid_out).view(self._dtype))

    def compute(self, number: int) -> dict[int, np.ndarray]:
        """Return the states [inputs, bytes] of each example in a batch of the first epoch."""
        batch = self._collate(self._examples, self._batches[number])
        inputs = arrays_of(batch)
        segments = segments_of(inputs, batch.layout)
        states = frozen_output(
            self._model, lambda: forward(self._model, self._part, inputs["tokens"], segments)
        )
        flat = np.array(states.view(mx.uint8)).reshape(-1, self._token_bytes)

        self.rows_computed += len(batch.examples)
        return {
            row: flat[start : start + self._inputs[row]].copy()  # without the padding
            for row, start in zip(batch.examples, batch.starts, strict=True)
        }

    def to_json(self) -> dict:
        return {
            "blocks": self._blocks,
            "gb": self.total_bytes / 1e9,
            "rows_computed": self.rows_computed,
        }

    def summary(self) -> str:
        return (
            f"{self._blocks} of {len(self._model.layers)} blocks are below the adapters: computed "
            f"once for each example · {size(self.total_bytes)} in memory"
        )

    def check_fits(self, memory: int) -> None:
        """Raise `_Impossible` if the states of all examples take more than ``memory`` bytes."""
        if self.total_bytes > memory:
            raise _Impossible(
                f"the states of all examples take {size(self.total_bytes)}, but there is room for "
                f"{size(memory)} in memory",
                "memory",
            )

    def close(self) -> None:
        self._states.clear()

    @property
    def total_bytes(self) -> int:
        """Bytes of the states of all examples."""
        return int(self._inputs.sum()) * self._token_bytes

    def _lay_out(self, batch: Batch) -> np.ndarray:
        """uint8 [B, T, bytes] of a batch; zero where it has no example."""
        tokens = batch.inputs["tokens"]
        laid_out = np.zeros((tokens.size, self._token_bytes), np.uint8)
        for row, start in zip(batch.examples, batch.starts, strict=True):
            place = slice(start, start + self._inputs[row])
            laid_out[place] = self._states[row]
        return laid_out.reshape(*tokens.shape, -1)


def open_frozen_activations(
    attached: Attached | WithSavedModules,
    head: Head | None,
    train: TrainConfig,
    examples: Examples,
    plan_bytes: int | None,
    display: Display,
) -> FrozenActivations | None:
    """Return the cache for ``train.cache_frozen``; None if there is none.

    ``plan_bytes`` is the peak of the memory plan. Raises a PackError if the cache is requested and
    impossible.
    """
    if train.cache_frozen == "off" or train.trains_base or train.offloads:
        return None

    model = attached.model
    frozen = frozen_blocks(attached)
    part = model if head is None else head.hidden
    inputs = sequence_inputs(train.max_seq_length)
    sampler = Sampler(examples.lengths, train.batch_size, inputs, train.seed, train.packing)

    try:
        _check_worthwhile(frozen, len(model.layers), train, sampler)
        stand_ins = _stand_ins(model, frozen)
        states = _example_states(attached, part, stand_ins)
        cache = FrozenActivations(attached, part, examples, sampler, states)
        cache.check_fits(memory_budget(plan_bytes))
    except _Impossible as reason:
        if train.cache_frozen == "on":
            raise PackError(
                f"--cache-frozen on: {reason}. Leave it out, or pass off.", reason.code
            ) from None
        display.line("cache", f"frozen activations are not cached: {reason}", VERBOSE)
        return None

    attached.swap(stand_ins)
    model.train(model.training)  # new modules join the mode of the rest
    display.line("cache", cache.summary())
    return cache


def frozen_blocks(attached: Attached | WithSavedModules) -> int:
    """Return how many blocks are below the first one with trainable parameters.

    0 if an embedding is trained. What else is outside of the blocks comes after them; the probe of
    the cache checks it.
    """
    modules = dict(attached.model.named_modules())
    saved = {name.rpartition(".")[0] for name in attached.replaced}

    if any(spec.kind == "embedding" for spec in attached.specs.values()):
        return 0
    if any(is_embedding(trained_module(modules[path])) for path in saved):
        return 0

    prefixes = block_prefixes(attached.model)
    for i, prefix in enumerate(prefixes):
        if any(path.startswith(prefix + ".") for path in (*attached.specs, *saved)):
            return i
    return len(prefixes)


def memory_budget(plan_bytes: int | None) -> int:
    """Return the bytes of activations that fit into the process with a run of this peak."""
    total = runtime.host_memory()
    used = total // 2 if plan_bytes is None else plan_bytes
    return max(0, int(_MEMORY_SHARE * (total - used)))


class _Impossible(Exception):
    """Why nothing is cached."""

    def __init__(self, reason: str, code: Code = "unsupported") -> None:
        super().__init__(reason)
        self.code: Code = code


def _check_worthwhile(frozen: int, blocks: int, train: TrainConfig, sampler: Sampler) -> None:
    if not frozen:
        raise _Impossible(
            "the first block or the embedding is trained: nothing below is frozen",
            "conflict",
        )
    if train.neftune_noise_alpha:
        raise _Impossible(
            "with --neftune-noise-alpha other activations enter them at every step", "conflict"
        )
    if train.cache_frozen != "auto":
        return

    # a forward costs one, a forward with its backward three
    if frozen < _WORTHWHILE * (3 * blocks - 2 * frozen):
        raise _Impossible(f"only {frozen} of {blocks} blocks are below the adapters")
    if train.iters <= (batches := len(sampler.epoch(0))):
        raise _Impossible(f"{train.iters} batches take no example twice (an epoch has {batches})")


def _stand_ins(model: nn.Module, frozen: int) -> StandIns:
    injection = Injection()
    paths = block_prefixes(model)[:frozen]
    return [
        (path, FrozenBlock(block, injection, path == paths[-1]))
        for path, block in zip(paths, model.layers, strict=False)
    ]


def _example_states(
    attached: Attached | WithSavedModules, part: Callable[..., mx.array], stand_ins: StandIns
) -> mx.array:
    """Return the states of some tokens, if the model takes states."""
    model = attached.model
    training = model.training

    blocks = [(path, stand_in["block"]) for path, stand_in in stand_ins]
    replace_modules(model, stand_ins)
    model.eval()
    try:
        return _probe(attached, part)
    except (PackError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise _Impossible(f"its blocks do not take states: {reason}") from None
    finally:
        replace_modules(model, blocks)
        model.train(training)


def _probe(attached: Attached | WithSavedModules, part: Callable[..., mx.array]) -> mx.array:
    """Return the states of two rows, which must come out as they do without a cache."""
    model = attached.model
    tokens = mx.array(np.random.default_rng(0).integers(0, attached.base.vocab_size, _PROBE))
    padded = mx.pad(tokens, ((0, 0), (0, _PROBE_PADDING)))
    states = frozen_output(model, lambda: forward(model, part, padded))
    if not isinstance(states, mx.array) or states.ndim != 3 or states.shape[:2] != padded.shape:
        raise _Impossible("its blocks return more than the states of each token")

    states = states[:, : tokens.shape[1]]

    def noisy(i: int, b: mx.array) -> mx.array:
        return b + _PROBE_STD * mx.random.normal(b.shape, key=mx.random.key(i))

    with attached.altered_b(noisy):  # with B at zero, adapters that reach the states do not show
        error = relative_error(forward(model, part, states), forward(model, part, tokens))
    if not error <= TOLERANCE[states.dtype]:
        raise _Impossible(
            f"with these states injected, the model computes something else (off by {error:.1e})"
        )
    return states
