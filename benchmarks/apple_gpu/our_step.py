"""The step and the batches of mlx_packs, laid out and never evaluated.

They are called in a process where MLX builds the graph of its Metal build (`capture`), and use the
code that trains: the same adapters, objective and compiled step.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlx_packs import runtime
from mlx_packs.adapters.attach import attach, install
from mlx_packs.adapters.dora import DoRAAttached
from mlx_packs.adapters.lora import Attached
from mlx_packs.config.schema import LoRAConfig, TrainConfig
from mlx_packs.data.batches import few_shapes, most_targets, token_collate
from mlx_packs.data.dataset import Layout, Tree
from mlx_packs.data.encoding import Example, Examples
from mlx_packs.data.sampler import Sampler, aligned_batches
from mlx_packs.data.shapes import sequence_inputs
from mlx_packs.extras.initial_factors import ResidualLoRA
from mlx_packs.nn.blocks import attends_by_spans
from mlx_packs.nn.dora import GroupedDoRA
from mlx_packs.nn.images import ImageInputs, ImageRules, ShownImages
from mlx_packs.objectives.causal_lm import CausalLM, possible_heads
from mlx_packs.ops import _check
from mlx_packs.ops.span_attention import Spans
from mlx_packs.optim import make_optimizer
from mlx_packs.packs.base import Base
from mlx_packs.runtime import mx
from mlx_packs.training.step import Stepper

_TYPICAL = math.log(300) - 0.7**2 / 2, 0.7  # of the logarithms of tokens: mean 300
_EXAMPLES = 4000
_WITH_IMAGES = ("images", "images-with-axes")


def lazy_step(  # noqa: PLR0913 (one argument for each thing that a step depends on)
    model: nn.Module,
    args: dict,
    *,
    batch: int,
    length: int,
    targets: int,
    rank: int,
    path: str,
    recompute: str,
    packed: bool,
    method: str = "lora",
    groups: int = 0,
    prefix: int = 0,
    root: int = 0,
    compiled: bool = True,
) -> tuple[list[mx.array], list[mx.array]]:
    """Call one training step on a model whose arrays are not evaluated.

    Args:
        model: a 4-bit model of mlx-lm, frozen.
        args: its config.json.
        batch: sequences.
        length: inputs of each.
        targets: target slots of the batch.
        rank: of the adapters on every projection of every block.
        path: matmul path: quantized, transient or dense.
        recompute: activation checkpointing: none, selective or block.
        packed: whether sequences hold several examples, of lengths as `_TYPICAL` draws them: what
            attention costs depends on the sum of their squares.
        method: of training: lora, dora, or pissa, which stands for olora too; or lora on rows of
            which three quarters are images: images, or images-with-axes, as Qwen3-VL takes them.
        groups: of sequences that begin alike, as many in each; 0: the batch is no tree.
        prefix: inputs that the sequences of a group begin with, which are computed once.
        root: of these, inputs that all sequences begin with, which are computed before the others.
        compiled: whether the step is, as it is unless blocks are on disk.

    Returns:
        What the step computes: loss, gradient norm, the updated adapters and the optimizer's
        state; and every array that exists before it and is read.
    """
    base = Base("captured", Path("."), model, None, args, "")
    shown = _show_images(model, args, batch * length, method)
    attached = attach(base, LoRAConfig(rank=rank), matmul_path=path)
    known = _made_of(attached, method)
    attached.recompute(recompute)
    model.train()
    settings = TrainConfig()
    optimizer = make_optimizer(settings)
    optimizer.init(model.trainable_parameters())
    head = next(possible_heads(model))
    if not compiled:
        model.blocks_on_disk = None
    stepper = Stepper(model, CausalLM(model, head).loss, optimizer, settings.max_grad_norm)
    inputs = {"tokens": mx.zeros((batch, length), mx.int32)}
    inputs |= {n: mx.zeros((targets,), mx.int32) for n in ("positions", "targets", "owners")}
    layout: Layout = ()
    if packed:
        segments = _typical_segments(model, batch, length)
        if isinstance(segments, mx.array):
            inputs["segments"] = segments
        else:
            layout = segments
    elif groups:
        inputs["tokens"] = mx.zeros((batch, length - prefix), mx.int32)
        inputs["prefix"] = mx.zeros((groups, prefix - root), mx.int32)
        if root:
            inputs["root"] = mx.zeros((1, root), mx.int32)
        layout = Tree(groups, prefix, root=root)
    state = [model.parameters(), shown, known, optimizer.state, mx.random.state[0]]
    leaves = [array for _, array in tree_flatten([state, inputs])]
    with _unchecked_kernels():
        results = stepper.whole(inputs, layout)
    updated = [model.trainable_parameters(), optimizer.state, results]
    return [array for _, array in tree_flatten(updated)], leaves


def _show_images(model: nn.Module, args: dict, inputs: int, method: str) -> list[mx.array]:
    """Let a model take images in three of four inputs; return the arrays that it then reads."""
    if method not in _WITH_IMAGES:
        return []

    count = 3 * inputs // 4
    width = args["hidden_size"]
    arrays = [mx.zeros((count, width), mx.bfloat16), mx.zeros((count,), mx.bool_)]
    rules = ImageRules()
    if method == "images-with-axes":
        pairs = args.get("head_dim", width // args["num_attention_heads"]) // 2
        others = pairs // 3
        rules = ImageRules(sections=(pairs - 2 * others, others, others), levels=3)
        arrays += [mx.zeros((3, count, width), mx.bfloat16), mx.zeros((count, 4))]

    images = ImageInputs(model, lambda tokens: tokens, rules)
    images.show(ShownImages(*arrays))
    ropes = [block.self_attn.rope for block in model.layers]
    return [*arrays, images.axes, *(rope.frequencies for rope in ropes if rules.sections)]


def _made_of(attached: Attached, method: str) -> list[mx.array]:
    """Install a method's groups; return the arrays that it computes once, when it is attached."""
    if method == "dora":
        DoRAAttached(attached)
    elif method in ("pissa", "olora"):
        install(attached, ResidualLoRA)  # beginning with any factors
    elif method not in ("lora", *_WITH_IMAGES):
        raise ValueError(f"no step of {method}")
    groups = list(attached.model.modules())
    norms = [m.norms for m in groups if isinstance(m, GroupedDoRA)]
    removed = [m.removed for m in groups if isinstance(m, ResidualLoRA)]
    return [norms, removed]


def kernel_cost(
    name: str, inputs: list[tuple], outputs: list[tuple], template: dict
) -> tuple[int | None, float | None, bool]:
    """Return what a launch of a kernel of ours costs, by its name and shapes.

    Returns:
        Bytes that it moves (None: every operand once), its operations (None: not known), and
        whether simdgroup matrices compute them.
    """
    kind = name.partition("grouped_lora_")[2]
    if kind == "down":  # x @ A of every rank
        return None, 2 * math.prod(inputs[0]) * outputs[0][-1], False
    if kind.startswith("up"):
        factors = sum(map(math.prod, inputs[len(outputs) : -3]))  # B of every slice
        return None, 2 * inputs[0][0] * factors, False
    return None, None, False


def batch_shapes(
    lengths: Sequence[int], supervised: float, batch_size: int, packing: bool, max_length: int
) -> list[tuple[int, int, int]]:
    """Return (sequences, inputs, target slots) of each batch of one epoch.

    Args:
        lengths: tokens of each example.
        supervised: the share of an example's inputs that predict a target.
        batch_size: sequences of a batch.
        packing: whether sequences hold several examples.
        max_length: most tokens of a sequence.
    """
    steps = batch_steps(lengths, supervised, batch_size, packing, max_length)
    return [step[:3] for step in steps]


def batch_steps(
    lengths: Sequence[int], supervised: float, batch_size: int, packing: bool, max_length: int
) -> list[tuple[int, int, int, int]]:
    """Return `batch_shapes`, and with each a number: steps of a shape are compiled once per number.

    Packed batches whose examples have other positions have different numbers.
    """
    items = [_example(tokens, supervised) for tokens in lengths]
    examples = Examples(items, "text", "all tokens")
    sampler = Sampler(
        examples.lengths,
        batch_size,
        sequence_inputs(max_length),
        packing=packing,
        aligned=packing and runtime.COMPILES,
    )
    allowed = few_shapes(examples, sampler) if not packing else None
    if sampler.aligned:
        allowed = most_targets(examples, sampler)
    collate = token_collate(sampler, allowed)
    numbers: dict[Layout, int] = {}
    steps = []
    for order in sampler.epoch(0):
        batch = collate(examples, order)
        inputs = batch.inputs
        number = numbers.setdefault(batch.layout, len(numbers))
        steps.append((*inputs["tokens"].shape, len(inputs["positions"]), number))
    return steps


def _typical_segments(model: nn.Module, batch: int, length: int) -> mx.array | Spans:
    """Return the segments of a packed batch of typical examples, as the model's attention has them.

    Of the batches of an epoch it is the one whose attention costs what it costs on average.
    """
    if not attends_by_spans(model):
        return mx.zeros((batch, length), mx.int32)
    tokens = np.random.default_rng(0).lognormal(*_TYPICAL, _EXAMPLES).round()
    inputs = tokens.clip(2, length).astype(int) - 1
    packed = aligned_batches(inputs, batch, length, np.random.default_rng(0))
    spans = [one.spans for one in packed if len(one.spans) == batch]
    squares = np.array([sum(n * n for row in own for n in row) for own in spans])
    return spans[np.abs(squares - squares.mean()).argmin()]


def _unchecked_kernels() -> AbstractContextManager:
    """Trust kernels without their self-check, which would evaluate them."""
    return mock.patch.object(_check, "examine", lambda check: _check.Finding(0.0, None))


def _example(tokens: int, supervised: float) -> Example:
    target = np.zeros(tokens, bool)
    target[tokens - max(1, round((tokens - 1) * supervised)) :] = True
    return Example(np.zeros(tokens, np.int32), target, "captured")
