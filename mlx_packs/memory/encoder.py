"""Estimate the peak memory of training an encoder, and explain why it is not quantized for that.

The count follows a step as that of `decoder` does: all columns of a batch go forward before the
loss, and what their backward pass needs is there then. What is in flight was read off
`mx.get_peak_memory` on a CPU (benchmarks/LOG.md).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ..bases.encoder import check_config, encoder_class, tensor_name
from ..bases.sentence_config import SentenceConfig, read_sentence_config
from ..config.choices import POLICIES, PolicyFacts
from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from ..data.shapes import PairShape, padded_length, widths_of
from ..display import size
from ..errors import PackError
from .headers import Headers, Tensors, tensors_of
from .plan import (
    MemoryPlan,
    Shape,
    accumulates,
    embedding_loss,
    moment_parts,
    recompute_policies,
)
from .planned_adapters import Places, optimizer_bytes, plan_adapters

ASSUMED = (
    "Every text is taken as long as it may be. Blocks that are recomputed for small batches took "
    "up to twice the estimate."
)
_QUANTIZED_BITS = 4.5  # a 4-bit weight with its scales
# In flight while a block goes back: the inputs of GELU's gradient, and of the gradient of the
# probabilities.
_FLYING_FFN = 20
_FLYING_SCORES = 4
_AHEAD = 2  # recomputed parts that are in memory together: MLX allocates ahead


def describe(config: Mapping) -> Tensors:
    checked = check_config(dict(config), Path("config.json"))
    return tensors_of(encoder_class(config)(checked, SentenceConfig()))


def run_settings(headers: Headers, train: TrainConfig) -> TrainConfig:
    """Return the settings with texts as long as the encoder reads them."""
    if train.quantize != "none":
        raise PackError(
            f"--quantize {train.quantize}: an encoder is trained in float32. Leave it out, and the "
            "plan says why.",
            "conflict",
        )

    folder = Path(headers.name).expanduser()
    longest = None
    if folder.is_dir():
        longest = read_sentence_config(folder).max_seq_length
    limits = (train.max_seq_length, longest, headers.config.get("max_position_embeddings"))
    return replace(train, max_seq_length=min(limit for limit in limits if limit))


def _block_shapes(config: Mapping) -> dict[str, tuple[int, int]]:
    d = config["hidden_size"]
    f = config["intermediate_size"]
    if config.get("model_type") == "modernbert":
        return {
            "attn.Wqkv": (3 * d, d),
            "attn.Wo": (d, d),
            "mlp.Wi": (2 * f, d),
            "mlp.Wo": (d, f),
        }

    return {
        "attention.self.query": (d, d),
        "attention.self.key": (d, d),
        "attention.self.value": (d, d),
        "attention.output.dense": (d, d),
        "intermediate.dense": (f, d),
        "output.dense": (d, f),
    }


@dataclass(frozen=True)
class _Step:
    """A training step of adapters.

    Attributes:
        texts: Of a column that are computed at once.
        widths: Tokens of a text, of each column whose activations are there at once.
        kept: Numbers per token that the adapters of each block keep, from the first adapted one.
        all_blocks: Whether that is the first block of the base.
    """

    hidden: int
    ffn: int
    heads: int
    texts: int
    widths: tuple[int, ...]
    kept: list[int]
    all_blocks: bool
    policy: PolicyFacts

    def saved(self) -> int:
        """Return the numbers that are kept for the backward pass."""
        tokens = self.texts * sum(self.widths)
        if self.policy.blocks:
            inputs = self.hidden * len(self.kept)
            widest = max(self.widths)
            recomputed = self.texts * widest * self._block(widest, max(self.kept))
            return tokens * inputs + _AHEAD * recomputed

        saved = 0
        for width in self.widths:
            blocks = [self._block(width, kept) for kept in self.kept]
            # the forward of blocks below the adapters is in flight, one block's worth
            below = max(blocks) * (not self.all_blocks)
            saved += self.texts * width * (sum(blocks) + below)
        return saved

    def _block(self, width: int, kept: int) -> int:
        """Return the numbers per token that a block keeps, in texts of so many tokens."""
        # The input, q, k and v, what attention gave, what both norms read and gave; what went into
        # GELU and what came out; and the probabilities.
        return 9 * self.hidden + 2 * self.ffn + self.heads * width + kept

    def flying(self) -> int:
        widest = max(self.widths)
        scores = self.heads * widest
        return self.texts * widest * (_FLYING_FFN * self.ffn + _FLYING_SCORES * scores)


def estimate(
    headers: Headers, lora: LoRAConfig, train: TrainConfig, shape: Shape | None = None
) -> MemoryPlan:
    """Return the peak memory, by default of the longest texts that length and positions allow."""
    config = headers.config
    keys = "hidden_size intermediate_size num_attention_heads num_hidden_layers".split()
    if not all(isinstance(config.get(key), int) and config[key] > 0 for key in keys):
        raise PackError(
            "no plan: config.json lacks a size (hidden, FFN, heads or blocks).", "unsupported"
        )

    hidden, ffn, heads, blocks = (config[key] for key in keys)
    projections = {
        f"encoder.layer.{i}.{name}": shape
        for i in range(blocks)
        for name, shape in _block_shapes(config).items()
    }

    method = train.method
    if train.trains_base:  # all blocks, with the activations of adapters
        lora = replace(lora, num_layers=-1)
        method = "lora"

    adapters = plan_adapters(Places(projections, blocks), lora, method)
    loss = embedding_loss(train)
    longest = config.get("max_position_embeddings") or train.max_seq_length
    columns = widths_of(shape or (train.max_seq_length, loss.texts))
    widths = tuple(min(width, longest) for width in columns)
    texts = train.batch_size
    if loss.by_parts:
        texts = min(texts, train.mini_batch_size)
        widths = _AHEAD * (max(widths),)

    step = _Step(
        hidden,
        ffn,
        heads,
        texts,
        widths,
        kept=[sum(kept.values()) for kept in adapters.kept],
        all_blocks=len(adapters.kept) == blocks,
        policy=POLICIES[recompute_policies(train)[0]],
    )

    logits = 0
    if loss.compares_all:
        logits = 6 * train.batch_size**2 * max(1, len(columns) - 1)

    backward = moment_parts(
        adapters.waiting(train), 4 * step.saved(), 4 * logits, 4 * step.flying()
    )

    base_weights = sum(math.prod(shape) for shape in _weight_shapes(headers))
    plan = adapters.plan(train, 4 * base_weights, base_weights, {"backward": backward})
    if train.trains_base:
        return _full(plan, headers, train)
    return plan


def _weight_shapes(headers: Headers) -> list[tuple[int, ...]]:
    return [tuple(t["shape"]) for name, t in headers.tensors.items() if tensor_name(name)]


def smallest_shape(train: TrainConfig) -> Shape:
    return padded_length(1, train.max_seq_length - 1), embedding_loss(train).texts


def resized(shape: Shape, before: TrainConfig, after: TrainConfig) -> Shape:
    """A batch keeps its columns; only the length changes."""
    return PairShape.of(widths_of(shape)).cut(after.max_seq_length)


def _full(plan: MemoryPlan, headers: Headers, train: TrainConfig) -> MemoryPlan:
    """Return the plan of full fine-tuning, made of the plan of adapters and its activations.

    Weights, gradients and the optimizer's state are there in addition to the base's own weights.
    """
    trainable = 4 * plan.base_weights
    waits = accumulates(train) or POLICIES[plan.recompute].blocks
    gradients = {"backward": trainable * waits, "update": trainable * (1 + accumulates(train))}
    moments = {at: {**parts, "gradients": gradients[at]} for at, parts in plan.moments.items()}
    return replace(
        plan,
        adapters=trainable,
        optimizer=optimizer_bytes(_weight_shapes(headers), train),
        moments=moments,
        adapter_weights=plan.base_weights,
        tensors=len(_weight_shapes(headers)),
    )


def why_not_quantized(headers: Headers, plan: MemoryPlan) -> str:
    """Return the reason why QLoRA is not for this encoder, with what it would save."""
    block = sum(out * width for out, width in _block_shapes(headers.config).values())
    quantizable = headers.config["num_hidden_layers"] * block
    saved = quantizable * (4 - _QUANTIZED_BITS / 8)

    return (
        f"float32 LoRA, not QLoRA: all {plan.base_weights / 1e6:.1f} M weights are "
        f"{size(plan.base)} in float32. 4 bits would save {size(saved)} of a peak of "
        f"{size(plan.peak_bytes)}, since activations need most of the memory, and these stay; "
        "every product would have to dequantize its weights first; and a model this small has "
        "little redundancy to compensate for rounding to 4 bits"
    )
