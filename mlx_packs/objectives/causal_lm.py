"""The training loss: only rows with a target reach the head.

A model is split into the part that makes hidden states and the head. The split is accepted only if
both together give logits bit-identical to the model's own; any other model keeps its full forward
pass.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mlx.nn as nn
from mlx.utils import tree_flatten

from ..data.dataset import Batch, Dataset, Layout, Tree
from ..errors import PackError
from ..nn.frozen_weight import frozen_weight
from ..nn.images import tree_of_images
from ..nn.prefix import tree_states
from ..nn.quantized import QUANTIZED, DenseLinear, HalfLinear, bare_module
from ..nn.segments import segment_caches
from ..nn.tables_on_disk import kind_of
from ..nn.wrapped import injected
from ..ops.linear_cross_entropy import FrozenHead, HeadSlice, cross_entropy, linear_cross_entropy
from ..runtime import mx
from .objective import Inputs, Objective
from .score import Score


@dataclass(frozen=True)
class Head:
    """``hidden``: tokens [B, T] to states [B, T, D].   ``logits``: states [n, D] to [n, V].

    frozen: the same head by slices of its rows; None if it is trainable, or cannot be sliced.
    """

    hidden: Callable[..., mx.array]
    logits: Callable[[mx.array], mx.array]
    frozen: FrozenHead | None


def split_head(model: nn.Module, probe: mx.array | None = None) -> Head | None:
    """Return the model as hidden states and head; None if they change its logits of ``probe``."""
    number = head_number(model, probe)
    return None if number is None else list(possible_heads(model))[number]


def head_number(model: nn.Module, probe: mx.array | None = None) -> int | None:
    """Return which of the `possible_heads` leaves the model's logits of ``probe`` as they are.

    Logit scaling or capping makes the check fail, and then the full forward pass is used.
    """
    if probe is None:
        probe = mx.array([[1, 2, 3, 1]])

    try:
        expected = forward(model, model, probe)
        for number, head in enumerate(possible_heads(model)):
            states = forward(model, head.hidden, probe)
            if mx.array_equal(head.logits(states), expected).item():
                return number
    except (TypeError, ValueError, AttributeError):
        return None
    return None


def part_of(model: nn.Module, head: Head | None) -> Callable[..., mx.array]:
    """Return what makes the states that a loss reads: without a head, the logits."""
    return model if head is None else head.hidden


def possible_heads(model: nn.Module) -> Iterator[Head]:
    """Yield the splits that the names of a model's modules suggest; `head_number` checks them."""
    if isinstance(of_text := model.get("language_model"), nn.Module):
        yield from possible_heads(of_text)
        return

    inner = model.get("model", model.get("transformer"))
    if not isinstance(inner, nn.Module):
        return
    heads = []
    if "lm_head" in model:
        heads.append((model["lm_head"], model["lm_head"]))
    tables = [inner[name] for name in ("embed_tokens", "wte") if name in inner]
    heads += [(table, table.as_linear) for table in tables if hasattr(table, "as_linear")]

    for module, logits in heads:
        trainable = bool(tree_flatten(module.trainable_parameters()))
        frozen = None if trainable else frozen_head(module)
        yield Head(inner, logits, frozen)


def frozen_head(module: nn.Module) -> FrozenHead | None:
    """Return a linear or embedding as a head that is read by slices of rows; None if it is neither.

    By the transient path, and from a `CustomWeight`, a slice is dense while it is used.
    """
    bare = bare_module(module)
    if isinstance(bare, QUANTIZED):
        return _head(bare, keeps_quantized=bare is module)
    if kind_of(module) in (nn.Linear, DenseLinear, nn.Embedding, HalfLinear):
        return _head(module, keeps_quantized=False)
    return None


def _head(module: nn.Module, keeps_quantized: bool) -> FrozenHead:
    """Return a head whose slices are multiplied as they are stored, or dense."""
    weight = frozen_weight(module)
    products = weight.slice_products if keeps_quantized else weight.dense_slice_products

    def part(start: int, stop: int) -> HeadSlice:
        forward, backward = products(start, stop)
        if "bias" not in module:
            return HeadSlice(forward, backward)

        bias = module.bias[start:stop]

        def biased(h: mx.array) -> mx.array:
            y = forward(h)
            return y + bias.astype(y.dtype)

        return HeadSlice(biased, backward)

    return FrozenHead(*weight.shape, part, weight.rows, module.get("bias"))


def segments_of(inputs: Inputs, layout: Layout) -> mx.array | Layout | None:
    """Return the segments of packed rows: an array [B, T], or the inputs of each; else None."""
    if isinstance(layout, Tree):
        return None
    return inputs.get("segments", layout or None)


def prefixes_in(inputs: Inputs) -> Inputs:
    """Return those inputs of a batch that `forward` takes for prefixes."""
    return {name: inputs[name] for name in ("root", "prefix") if name in inputs}


def forward(
    model: nn.Module,
    part: Callable[..., mx.array],
    tokens: mx.array,
    segments: mx.array | None = None,
    offset: int = 0,
    prefixes: Inputs | None = None,
    unread: mx.array | None = None,
) -> mx.array:
    """Return the output of a part of the model for tokens [B, T].

    Args:
        model: the model.
        part: the model, or its hidden states.
        tokens: or float [B, T, D], what enters the first adapted block in their place
            (nn/wrapped.py).
        segments: [B, T], where examples are packed; an input sees its own segment alone.
        offset: position of the first input of packed examples.
        prefixes: what B / G rows of tokens in turn follow, as `prefixes_in` has it: ``prefix``
            [G, P], and maybe ``root`` [1, Q] before all of them. The output is
            [Q + G P + B T, D], in this order (nn/prefix.py).
        unread: the tokens [B, T] of states, which are not embedded, but may be images.
    """
    if prefixes:
        with tree_of_images(model, tokens, prefixes):
            return tree_states(model, part, tokens, **prefixes)

    if tokens.ndim == 3:
        if unread is None:
            unread = mx.zeros(tokens.shape[:2], mx.int32)
        with injected(model, tokens):
            return forward(model, part, unread, segments, offset)

    if segments is None:
        return part(tokens)
    return part(tokens, cache=segment_caches(model, segments, offset))


TargetLoss = Callable[[mx.array, mx.array], mx.array]  # logits [M, V], targets [M] to losses [M]


@dataclass(frozen=True)
class LossOptions:
    """Terms of a target's loss, besides its negative log-likelihood or in its place."""

    z_loss: float = 0.0  # weight of logsumexp^2
    label_smoothing: float = 0.0  # share of each target that is spread over the vocabulary
    gradient: bool = True  # whether one will be computed
    custom: TargetLoss | None = None  # in place of the negative log-likelihood, of float32 logits


_PLAIN = LossOptions()


def target_loss(
    model: nn.Module,
    head: Head | None,
    inputs: Inputs,
    layout: Layout = (),
    options: LossOptions = _PLAIN,
) -> tuple[mx.array, mx.array | None]:
    """Return the loss [M] float32 of each target, and whether it ranks first [M].

    ``inputs`` and ``layout`` are of a batch of tokens (data/batches.py); ``states`` replace tokens
    (`forward`), and ``target_states`` the whole pass. A frozen head does not return which token
    ranks first where a gradient will be computed.
    """
    z_loss = options.z_loss
    smoothing = options.label_smoothing
    targets = inputs["targets"]
    states = target_states(model, head, inputs, layout)

    if options.custom is None and head is not None and head.frozen is not None:
        return linear_cross_entropy(
            states, targets, head.frozen, z_loss, smoothing, options.gradient
        )

    logits = states if head is None else head.logits(states)
    if options.custom is not None:
        loss = options.custom(logits.astype(mx.float32), targets)
        _check_losses(loss, targets)
    else:
        loss = cross_entropy(logits, targets, z_loss, smoothing)
    return loss, mx.argmax(logits, axis=-1) == targets


def target_states(
    model: nn.Module, head: Head | None, inputs: Inputs, layout: Layout = ()
) -> mx.array:
    """Return the states [M, D] that the head reads for each target; without one logits [M, V]."""
    if "target_states" in inputs:
        return inputs["target_states"]

    tokens = inputs["tokens"]
    entering = inputs.get("states", tokens)
    segments = segments_of(inputs, layout)
    prefixes = prefixes_in(inputs)
    part = part_of(model, head)
    states = forward(model, part, entering, segments, prefixes=prefixes, unread=tokens)
    return states.reshape(-1, states.shape[-1])[inputs["positions"]]


def _check_losses(loss: object, targets: mx.array) -> None:
    """Raise a PackError if a custom loss returns no array with one loss per target."""
    shape = list(loss.shape) if isinstance(loss, mx.array) else type(loss).__name__
    if shape != list(targets.shape):
        raise PackError(
            f"loss: must return the loss of each target, an array {list(targets.shape)}, but "
            f"returned {shape}.",
            flag="loss",
        )


class Preparation:
    """What adds arrays to the batches of an objective."""

    def ahead(self, batch: Batch) -> Batch:
        return batch

    def prepare(self, batch: Batch) -> Batch:
        return batch

    def close(self) -> None:
        """As `Objective.close`."""


class CausalLM(Objective):
    """The next token of each input.

    ``score`` scores batches, and ``validate`` validation batches, by default as ``score``; an
    objective that only trains needs neither.
    """

    unit = "tokens"

    def __init__(
        self,
        model: nn.Module,
        head: Head | None,
        preparation: Preparation | None = None,
        score: Callable[..., Score] | None = None,
        options: LossOptions = _PLAIN,
        validate: Callable[..., Score] | None = None,
    ) -> None:
        self.model = model
        self.head = head
        self._preparation = preparation or Preparation()
        self._score = score
        self._validate = validate
        self._options = options

    def ahead(self, batch: Batch) -> Batch:
        return self._preparation.ahead(batch)

    def prepare(self, batch: Batch) -> Batch:
        return self._preparation.prepare(batch)

    def close(self) -> None:
        self._preparation.close()

    def loss(self, inputs: Inputs, layout: Layout = ()) -> tuple[mx.array, mx.array]:
        loss, _ = target_loss(self.model, self.head, inputs, layout, self._options)
        is_target = (inputs["owners"] >= 0).astype(mx.float32)
        return (loss * is_target).sum(), is_target.sum()

    def validate(self, data: Dataset) -> Score:
        return (self._validate or self._score)(data.once())

    def score(self, data: Dataset, advance: Callable[[], None] | None = None) -> Score:
        return self._score(data.once(), advance)

    def score_trained(self, batch: Batch) -> Score:
        return self._score([batch])
