"""What training an encoder takes, and why it is not quantized for that.

The count follows a step as `plan` does: all columns of a batch go forward before the loss, and what
their backward needs is there then. What is in flight was read off `mx.get_peak_memory` on a CPU
(benchmarks/LOG.md).
"""

import math
from collections.abc import Mapping, Set
from dataclasses import replace
from pathlib import Path

from ..adapters.targets import plan_specs
from ..bases.encoder import tensor_name
from ..bases.geometry import Geometry, Group
from ..bases.sentence_config import read_sentence_config
from ..config.schema import LoRAConfig, TrainConfig
from ..display import size
from ..errors import PackError, did_you_mean
from .plan import Checkpoint, MemoryPlan, Tensors, optimizer_bytes, policies, state_bytes

BATCH_SIZE = 32  # of pairs, where nobody says another: in-batch negatives want more than 4
_PROJECTIONS = (
    "attention.self.query attention.self.key attention.self.value attention.output.dense "
    "intermediate.dense output.dense"
).split()
_PACKED_BITS = 4.5  # a 4-bit weight with its scales


def for_encoder(checkpoint: Checkpoint, train: TrainConfig, asked: Set[str]) -> TrainConfig:
    """Settings as `packs train` would take them for an encoder: texts as long as it reads them.

    Args:
        asked: those that somebody named. Raises: PackError if they ask for quantization.
    """
    if train.quantize != "none":
        raise PackError(
            f"--quantize {train.quantize}: an encoder is trained in float32; without it"
            " the plan says why."
        )
    batch_size = train.batch_size if "batch_size" in asked else BATCH_SIZE
    folder = Path(checkpoint.name).expanduser()
    longest = read_sentence_config(folder).max_seq_length if folder.is_dir() else None
    limits = train.max_seq_length, longest, checkpoint.config.get("max_position_embeddings")
    return replace(
        train,
        task="embedding",
        batch_size=batch_size,
        max_seq_length=min(limit for limit in limits if limit),
    )


def _widths(config: Mapping) -> dict[str, tuple[int, int]]:
    """(in, out) of the projections of a block."""
    d, f = config["hidden_size"], config["intermediate_size"]
    return {name: (d, d) for name in _PROJECTIONS[:4]} | {
        "intermediate.dense": (d, f),
        "output.dense": (f, d),
    }


def _groups(config: Mapping, lora: LoRAConfig) -> list[Group]:
    """Projections that carry adapters, by the rules of `geometry.select_targets`."""
    blocks = config["num_hidden_layers"]
    if lora.num_layers > blocks:
        raise PackError(f"--num-layers {lora.num_layers}: the base has only {blocks} blocks.")
    first = blocks - lora.num_layers if lora.num_layers > 0 else 0
    widths = _widths(config)
    paths = {
        f"encoder.layer.{i}.{name}": widths[name] for i in range(first, blocks) for name in widths
    }
    chosen = set() if lora.target_modules else set(paths)
    for target in lora.target_modules:
        matched = {p for p in paths if p == target or p.endswith("." + target)}
        if not matched:
            names = sorted({name.rpartition(".")[2] for name in widths})
            hint = did_you_mean(target, names)
            raise PackError(f"--target-modules {target}: no such projection in a plan. {hint}")
        chosen |= matched
    return [
        Group(
            None, (Geometry(p, d, out, None, None, None, d, True, ((p.rpartition(".")[2], out),)),)
        )
        for p, (d, out) in paths.items()
        if p in chosen
    ]


def estimate_encoder(
    config: Mapping,
    tensors: Tensors,
    lora: LoRAConfig,
    train: TrainConfig,
    length: int | None = None,
    columns: int | None = None,
) -> MemoryPlan:
    """The peak memory of training an encoder, by part.

    Args:
        length: tokens of a text; by default as many as max_seq_length and positions allow.
        columns: texts of a row; by default 2, of triplets 3.
    Raises: PackError for a config that lacks a size.
    """
    keys = "hidden_size intermediate_size num_attention_heads num_hidden_layers".split()
    if not all(isinstance(config.get(key), int) and config[key] > 0 for key in keys):
        raise PackError("no plan: config.json lacks a size (hidden, FFN, heads or blocks).")
    d, f, heads, blocks = (config[key] for key in keys)
    specs = plan_specs(_groups(config, lora), lora)
    weights = sum(s.rank * (m.in_features + s.width) for m in specs.values() for s in m.slices)
    base_weights = sum(
        math.prod(tensor["shape"]) for name, tensor in tensors.items() if tensor_name(name)
    )
    positions = config.get("max_position_embeddings") or train.max_seq_length
    time = min(length or train.max_seq_length, positions)
    columns = columns or (3 if train.loss == "triplet" else 2)
    texts, at_a_time = train.batch_size, columns  # columns of these whose activations are there
    if train.loss == "cached-mnrl":
        texts, at_a_time = min(texts, train.mini_batch_size), _AHEAD
    policy = policies(train)[0]
    adapted = [
        sum(spec.rank for path, spec in specs.items() if path.startswith(f"encoder.layer.{i}."))
        for i in range(blocks)
    ]
    tracked = adapted[next(i for i, ranks in enumerate(adapted) if ranks) :]
    tokens = texts * time
    inside = [_kept(d, f, heads * time) + ranks for ranks in tracked]
    if policy == "block":
        kept = tokens * (at_a_time * d * len(tracked) + _AHEAD * max(inside))
    else:
        # the forward of blocks below the adapters is in flight, one block's worth
        kept = at_a_time * tokens * (sum(inside) + max(inside) * (len(tracked) < blocks))
    pending = 4 * weights * (train.grad_accumulation_steps > 1 or policy == "block")
    logits = 0
    if train.loss in ("auto", "mnrl", "cached-mnrl", "cosent"):
        logits = 6 * train.batch_size**2 * max(1, columns - 1)
    flying = tokens * (_FLYING_FFN * f + _FLYING_SCORES * heads * time)
    moments = {
        "backward": (pending, 4 * kept, 4 * logits, 4 * flying),
        "update": (
            4 * weights * (1 + (train.grad_accumulation_steps > 1)),
            0,
            0,
            1.3 * 4 * weights / len(tracked),
        ),
    }
    names = ("gradients", "activations", "logits", "working")
    plan = MemoryPlan(
        base=4 * base_weights,
        adapters=4 * weights,
        optimizer=optimizer_bytes(specs, train),
        moments={at: dict(zip(names, map(int, held), strict=True)) for at, held in moments.items()},
        matmul_path="dense",
        recompute=policy,
        adapter_weights=weights,
        base_weights=base_weights,
    )
    return _full(plan, tensors, train) if train.method == "full" else plan


def _full(plan: MemoryPlan, tensors: Tensors, train: TrainConfig) -> MemoryPlan:
    """The same where all weights learn: they, their gradients and the optimizer's state are there
    beside the base's own, which are kept; activations are those of adapters."""
    shapes = [tuple(t["shape"]) for name, t in tensors.items() if tensor_name(name)]
    learned = 4 * plan.base_weights
    several = train.grad_accumulation_steps > 1
    pending = learned * (several or plan.recompute == "block")
    gradients = {"backward": pending, "update": learned * (1 + several)}
    moments = {at: {**held, "gradients": gradients[at]} for at, held in plan.moments.items()}
    return replace(
        plan,
        adapters=learned,
        optimizer=state_bytes(shapes, train),
        moments=moments,
        adapter_weights=plan.base_weights,
    )


def _kept(d: int, f: int, scores: int) -> float:
    """Numbers per token that a block holds from forward to backward.

    The input, q, k and v, what attention gave, what both norms read and gave; what went into GELU
    and what came out; and the probabilities.
    """
    return 9 * d + 2 * f + scores


# In flight while a block goes back: what GELU's gradient is made of, and that of the probabilities.
_FLYING_FFN, _FLYING_SCORES = 20, 4
_AHEAD = 2  # recomputed parts that are in memory together: MLX allocates ahead


def why_not_quantized(config: Mapping, plan: MemoryPlan) -> str:
    """Why QLoRA is not for this encoder, with what it would save."""
    packed = config["num_hidden_layers"] * sum(a * b for a, b in _widths(config).values())
    saved = packed * (4 - _PACKED_BITS / 8)
    return (
        f"float32 LoRA, not QLoRA: all {plan.base_weights / 1e6:.1f} M weights are "
        f"{size(plan.base)} in float32. 4 bits would save {size(saved)} of a peak of "
        f"{size(plan.peak_bytes)}, since what takes memory is the activations, and those stay; "
        "every product would have to unpack its weights first; and a model this small has few "
        "weights to make up for what rounding to 4 bits takes away"
    )
