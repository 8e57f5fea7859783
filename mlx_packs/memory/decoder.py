"""Estimate the peak memory of training a decoder: of the Llama family, a hybrid or a mixture.

`memory.step` follows a step by hand. On a GPU the same formula is used with the dtype of the
checkpoint. It was **not measured there**.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from .. import runtime
from ..bases.precision import activation_bytes, stored_dtype
from ..bases.quantization import QuantizeOptions, format_for
from ..bases.weight_formats import named_format
from ..config.choices import MATMUL_PATHS, OPTIMIZERS, POLICIES, TASKS
from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from ..data.shapes import (
    PairShape,
    TreeShape,
    padded_length,
    padded_targets,
    sequence_inputs,
    widths_of,
)
from ..distributed.group import group
from ..errors import PackError
from ..offload.sizes import BlocksOnDisk
from ..ops.profile import profile
from ..tensors import DTYPES
from .decoder_sizes import (
    Sizes,
    feature_bytes,
    has_images,
    language_model,
    plan_of,
    sizes_of,
    text_config,
)
from .headers import Headers, Tensors, dense_tensors, tensor_bytes
from .hybrid import HybridSizes, HybridStep, adapted_sizes, hybrid_sizes
from .plan import (
    MemoryPlan,
    Shape,
    accumulates,
    embedding_loss,
    has_logits,
    has_score_head,
    recompute_policies,
    unquantized,
)
from .planned_adapters import UPDATED_AT_ONCE, optimizer_bytes, plan_adapters
from .step import WHOLE_LOGITS, Level, Pass, Step, passes_of


def describe(config: Mapping) -> Tensors:
    text = text_config(config)
    _sizes(text, {})  # none is missing
    return dense_tensors(text)


def _sizes(config: Mapping, tensors: Tensors) -> Sizes:
    if plan_of(config) == "hybrid":
        return hybrid_sizes(config, tensors)
    return sizes_of(config, tensors)


def run_settings(headers: Headers, train: TrainConfig) -> TrainConfig:
    return train


def base_bytes(
    sizes: Sizes, headers: Headers, train: TrainConfig, itemsize: int, with_tables: bool = False
) -> int:
    """Bytes of the frozen weights: stored or quantized on loading, and dense copies.

    An embedding beside a head has a dense copy only ``with_tables``.
    """
    skipped = ("quant_map", "bitsandbytes__nf4", "bitsandbytes__fp4")
    widen = itemsize == 4
    total = sum(
        tensor_bytes(tensor, widen)
        for name, tensor in headers.tensors.items()
        if not name.endswith(skipped)
    )

    quantized = set(headers.weight_modes)
    if train.quantize != "none" and not quantized:
        quantized_format = named_format(train.quantize, train.double_quant)
        options = QuantizeOptions(quantized_format, tuple(train.keep))
        for path, shape in sizes.modules.items():
            stored = headers.tensors.get(f"{path}.weight")
            weight_format = format_for(path, shape, options)
            if stored is None or isinstance(weight_format, str):
                continue
            quantized.add(path)
            total -= tensor_bytes(stored, widen)
            total += weight_format.nbytes(shape, itemsize)
        # experts by their shapes: they are stored one by one, or under other names
        for path, shape in sizes.stacks.items():
            weight_format = format_for(path, shape, options, "other")
            if isinstance(weight_format, str):
                continue
            dense = {"dtype": DTYPES[stored_dtype(headers.config)], "shape": shape}
            total += weight_format.nbytes(shape, itemsize) - tensor_bytes(dense, widen)

    if MATMUL_PATHS[_path_of(train)].keeps_dense:
        if "lm_head" in sizes.modules and not with_tables:
            quantized.discard("model.embed_tokens")
        dense = (shape for path, shape in sizes.modules.items() if path in quantized)
        total += sum(math.prod(shape) * itemsize for shape in dense)
    return total


def estimate(
    headers: Headers, lora: LoRAConfig, train: TrainConfig, shape: Shape | None = None
) -> MemoryPlan:
    """Return the peak memory; by default for full rows in which every position is a target.

    Raises a PackError for a family or an objective that the formula does not know.
    """
    if train.objective != "transformer" and not train.trains_base:
        raise PackError(
            f"no plan for the objective {train.objective}. Known is transformer.",
            "unsupported",
            "objective",
        )

    text = language_model(headers)
    takes_images = has_images(headers.config)
    text.check_formats()

    if plan_of(text.config) == "hybrid":
        sizes: Sizes = adapted_sizes(text, lora, train)
    else:
        sizes = sizes_of(text.config, text.tensors)
    plan = _plan_step(text, lora, train, shape, sizes)
    if not takes_images:
        return plan

    features = feature_bytes(text, headers, train.sequences * (shape or largest_shape(train))[0])
    moments = {
        name: {**parts, "activations": parts["activations"] + features}
        for name, parts in plan.moments.items()
    }
    return replace(plan, moments=moments)


def _plan_step(
    headers: Headers, lora: LoRAConfig, train: TrainConfig, shape: Shape | None, sizes: Sizes
) -> MemoryPlan:
    """Return the peak memory of training a language model of these sizes."""
    if train.trains_base:
        return _plan_full(headers, lora, train, shape, sizes)

    itemsize = activation_bytes(headers.config, train.compute_dtype)
    adapters = plan_adapters(sizes.modules, sizes.blocks, lora, train.method, headers.tensors)
    if has_score_head(train):
        adapters = adapters.beside((headers.outputs, sizes.hidden))

    shape = shape or largest_shape(train)
    quantized = headers.is_quantized or train.quantize != "none"
    custom = headers.custom_format(train.quantize) is not None
    path_facts = MATMUL_PATHS[_path_of(train)]
    # a format that MLX lacks has no kernel on a CPU that multiplies quantized weights
    no_kernel = custom and runtime.on_cpu() and not path_facts.keeps_dense

    sequences = _sequences(train, shape)
    evaluated = Level(train.batch_size, shape[0]) if _by_parts(train) else None

    is_tree = isinstance(shape, TreeShape)
    step_class = HybridStep if isinstance(sizes, HybridSizes) else Step
    at_once = step_class.trees_at_once
    if is_tree and shape.computed(sequences) > profile().tree_inputs:
        at_once = False

    passes = passes_of(shape, sequences, at_once)
    if TASKS[train.task].in_batch and not _by_parts(train):
        passes = tuple(Pass((Level(train.batch_size, width),)) for width in widths_of(shape))

    step = step_class(
        sizes,
        passes=passes,
        kept=adapters.kept,
        policy=POLICIES[recompute_policies(train)[0]],
        waiting=adapters.waiting(train),
        waiting_at_loss=adapters.waiting_at_loss(train),
        unpacks=quantized and (no_kernel or path_facts.dequantizes),
        custom=custom,
        head=adapters.head,
        logits=has_logits(train),
        evaluated=evaluated,
        **_read_by_loss(headers, train, shape, sizes),
    )

    base = base_bytes(sizes, headers, train, itemsize)
    offload = None
    if train.offloads:
        offload = BlocksOnDisk.of(
            (name, tensor_bytes(tensor, itemsize == 4), tensor_bytes(tensor, False))
            for name, tensor in headers.tensors.items()
        )
        offload = replace(
            offload,
            in_flight=1 if runtime.on_cpu() else 2,
            micro_batches=train.grad_accumulation_steps,
            together_bytes=_together_bytes(train, step, itemsize),
            accumulated_bytes=adapters.accumulated(train),
        )
        base -= offload.saved_bytes

    plan = adapters.plan(
        train,
        base=base,
        base_weights=sizes.weights,
        moments=step.moments(itemsize),
        matmul_path=_path_of(train) if quantized else "dense",
    )
    return replace(plan, offload=offload)


def _together_bytes(train: TrainConfig, step: Step, itemsize: int) -> int | None:
    """Return the bytes that batches of an update add if they pass blocks together; None if not."""
    # ranks share them, or the loss computes the model in parts
    if group().batch_shares > 1 or any(TASKS[task].in_batch for task in train.tasks):
        return None
    # and of the last block the output and its gradient, for the loss
    states = 2 * step.sizes.hidden
    numbers = sum(step.block_inputs(own) + states * own.tokens for own in step.passes)
    return (train.grad_accumulation_steps - 1) * itemsize * numbers


def _read_by_loss(
    headers: Headers, train: TrainConfig, shape: Shape, sizes: Sizes
) -> dict[str, int]:
    """Return the targets of a batch, and the whole logits and teacher's tokens of each."""
    facts = [TASKS[task] for task in train.tasks]
    read = {"targets": shape[1]}

    if has_score_head(train):
        read["outputs"] = headers.outputs
    if TASKS[train.task].by_text:  # one token of each
        read["targets"] = _sequences(train, shape)
        if train.head_of(train.task) == "lm":
            read["outputs"] = sizes.vocab
    if any(each.teacher for each in facts):
        read["teacher_tokens"] = headers.teacher_tokens

    return read


def _path_of(train: TrainConfig) -> str:
    """Return the matmul path of a run; ``auto`` counts as quantized."""
    return "quantized" if train.matmul_path == "auto" else train.matmul_path


def _sequences(train: TrainConfig, shape: Shape) -> int:
    """Return the rows of a batch that are computed at once."""
    if not TASKS[train.task].by_text:
        return train.sequences

    if _by_parts(train):
        return min(train.batch_size, train.mini_batch_size)
    return train.batch_size * shape[1]


def _by_parts(train: TrainConfig) -> bool:
    return TASKS[train.task].in_batch and embedding_loss(train).by_parts


def _texts(train: TrainConfig) -> int:
    """Return the texts of a row of a task `by_text`."""
    facts = TASKS[train.task]
    if facts.in_batch:
        return embedding_loss(train).texts
    return facts.sequences


def largest_shape(train: TrainConfig) -> Shape:
    length = sequence_inputs(train.max_seq_length)
    if TASKS[train.task].by_text:
        return length, _texts(train)
    if not has_logits(train):  # packed ones may hold many completions
        if not train.packing:
            return length, train.sequences
    return length, train.sequences * length


def smallest_shape(train: TrainConfig) -> Shape:
    length = padded_length(1, sequence_inputs(train.max_seq_length))
    if TASKS[train.task].by_text:
        return length, _texts(train)
    return length, padded_targets(1, train.sequences * length)


def resized(shape: Shape, before: TrainConfig, after: TrainConfig) -> Shape:
    """Return the shape that a batch has after a change of its batch size or maximal length."""
    if isinstance(shape, PairShape):
        return shape.cut(after.max_seq_length)

    length, targets = shape[:2]
    cut = min(length, sequence_inputs(after.max_seq_length))
    if TASKS[after.task].by_text:
        return cut, targets
    share = after.sequences * cut / (before.sequences * length)

    if isinstance(shape, TreeShape) and shape.prefix < cut:
        return shape._replace(inputs=cut, targets=int(targets * share))
    return cut, int(targets * share)


def _plan_full(
    headers: Headers, lora: LoRAConfig, train: TrainConfig, shape: Shape | None, sizes: Sizes
) -> MemoryPlan:
    """Return the peak memory of full fine-tuning.

    Trainable weights, their gradients and the optimizer are in float32, beside the base's own
    weights, which are kept. Inputs of linear layers are kept as for the smallest adapters on all
    of them. A trainable head has full logits.
    """
    of_adapters = unquantized(train, method="lora", matmul_path="dense", compute_dtype="float32")
    smallest = LoRAConfig(rank=1, num_layers=lora.num_layers)
    plan = _plan_step(headers.without_scales(), smallest, of_adapters, shape, sizes)

    paths = dict(sizes.modules)
    if lora.num_layers > 0:
        first = sizes.blocks - lora.num_layers
        paths = {p: s for p, s in sizes.projections.items() if int(p.split(".")[2]) >= first}
    trainable = sum(math.prod(shape) for shape in paths.values())
    largest = max(math.prod(shape) for shape in paths.values())

    targets = (shape or largest_shape(train))[1]
    moments = {}
    for moment, of_plan in plan.moments.items():
        parts = dict(of_plan)
        recomputed = POLICIES[plan.recompute].blocks and moment not in ("loss", "update")
        copies = accumulates(train) + (recomputed or moment == "update")
        parts["gradients"] = 4 * trainable * copies
        if moment == "loss" and lora.num_layers <= 0:
            parts["logits"] = 4 * (
                WHOLE_LOGITS * targets * sizes.vocab + 3 * targets * sizes.hidden
            )
        if moment == "update":
            parts["working"] = 4 * UPDATED_AT_ONCE * largest
            if 0 < OPTIMIZERS[train.optimizer].bytes_per_weight < 4:
                # its moments are decoded to float32 first, all at once
                parts["working"] = 14 * trainable
        moments[moment] = parts

    itemsize = activation_bytes(headers.config, train.compute_dtype)
    return replace(
        plan,
        base=base_bytes(sizes, headers, of_adapters, itemsize, with_tables=True),
        adapters=4 * trainable,
        optimizer=optimizer_bytes(paths.values(), train),
        moments=moments,
        matmul_path="dense",
        adapter_weights=trainable,
        tensors=len(paths),
    )
