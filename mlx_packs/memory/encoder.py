"""Estimate the peak memory of training an encoder.

The count follows a step as `decoder` does: all columns of a batch go forward before the
loss, and what their backward pass needs is there then. The numbers of arrays were read off
`mx.get_peak_memory` on a CPU (benchmarks/LOG.md).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ..bases.encoder import check_config, encoder_class, tensor_name
from ..bases.sentence_config import SentenceConfig, read_sentence_config
from ..config.choices import POLICIES
from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from ..data.shapes import PairShape, padded_length, widths_of
from ..errors import PackError
from .headers import Headers, Tensors, tensors_of
from .plan import MemoryPlan, Shape, accumulates, embedding_loss, moment_parts, recompute_policies
from .planned_adapters import optimizer_bytes, plan_adapters

_IN_BLOCK = re.compile(r"\blayers?\.\d+\.")
# Arrays that a block keeps for the backward pass, of the hidden and of the feed-forward size.
_KEPT = {
    # its input, q, k, v, what attention gave, what both norms read, what the first one gave, and a
    # copy of some; what went into GELU and what came out
    "bert": (8.5, 2),
    # the same, q and k before their rotation, and what both norms gave; both halves of the first
    # product, what came out of GELU, and its product with the other half
    "modernbert": (12, 4),
}
# The probabilities of attention, of the size of the scores: at the peak not every block has them.
_KEPT_SCORES = 0.6
# In flight while the last block goes back, as MLX allocates some hundred operations ahead: the
# gradient of GELU; or the scores and their gradient, and those of q, k and v.
_FLYING_FFN = 21
_FLYING_SCORES = 6.6
_FLYING_STATES = 3
_AHEAD = 2  # recomputed blocks that are in memory together: MLX allocates ahead


def describe(config: Mapping) -> Tensors:
    checked = check_config(dict(config), Path("config.json"))
    return tensors_of(encoder_class(config)(checked, SentenceConfig()))


def run_settings(headers: Headers, train: TrainConfig) -> TrainConfig:
    """Return the settings with texts as long as the encoder reads them."""
    if train.quantize != "none":
        raise PackError(
            f"--quantize {train.quantize}: an encoder is trained in float32, since most of its "
            "memory is activations. Leave it out.",
            "conflict",
        )

    folder = Path(headers.name).expanduser()
    longest = read_sentence_config(folder).max_seq_length if folder.is_dir() else None
    limits = (train.max_seq_length, longest, headers.config.get("max_position_embeddings"))
    return replace(train, max_seq_length=min(limit for limit in limits if limit))


def _projections(headers: Headers) -> dict[str, tuple[int, int]]:
    """Return (out, in) of the linear layers of all blocks."""
    named = {tensor_name(name): tuple(t["shape"]) for name, t in headers.tensors.items()}
    return {
        name.removesuffix(".weight"): shape
        for name, shape in named.items()
        if name and _IN_BLOCK.search(name) and len(shape) == 2
    }


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
    method = train.method
    if train.trains_base:  # all blocks, with the activations of adapters
        lora = replace(lora, num_layers=-1)
        method = "lora"

    adapters = plan_adapters(_projections(headers), blocks, lora, method)
    loss = embedding_loss(train)
    longest = config.get("max_position_embeddings") or train.max_seq_length
    columns = widths_of(shape or (train.max_seq_length, loss.texts))
    widths = tuple(min(width, longest) for width in columns)
    texts = train.batch_size
    if loss.by_parts:
        texts = min(texts, train.mini_batch_size)
        widths = (max(widths),)

    of_hidden, of_ffn = _KEPT[config.get("model_type", "bert")]
    states = of_hidden * hidden + of_ffn * ffn

    def block_numbers(width: int, of_adapters: int) -> float:
        """Return the numbers that a block keeps of a column for the backward pass."""
        return texts * width * (states + _KEPT_SCORES * heads * width + of_adapters)

    widest = max(widths)
    of_adapters = [sum(kept.values()) for kept in adapters.kept]
    kept = sum(block_numbers(width, own) for width in widths for own in of_adapters)
    if POLICIES[recompute_policies(train)[0]].blocks:
        inputs = texts * sum(widths) * hidden * len(of_adapters)
        kept = inputs + _AHEAD * block_numbers(widest, max(of_adapters))

    # in one column, at the worse of two moments
    attention = _FLYING_SCORES * heads * widest + _FLYING_STATES * hidden
    flying = texts * widest * max(_FLYING_FFN * ffn, attention)
    logits = 6 * train.batch_size**2 * max(1, len(columns) - 1) if loss.compares_all else 0
    backward = moment_parts(adapters.waiting(train), 4 * kept, 4 * logits, 4 * flying)

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
    """Return the plan of full fine-tuning by a plan of adapters, beside the base's own weights."""
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
