"""Estimate the peak memory of training a decoder of the Llama family.

A step of training is followed by hand: what the forward pass keeps for the backward pass, and what
is in flight at the four moments that can be the worst. MLX allocates ahead of what it computes, so
"in flight" is about one block's worth of temporaries, not one; the counts below are those of MLX's
CPU backend, read off measured peaks and checked by `benchmarks/plan_accuracy.py`.

On a GPU the same formula is used with the dtype of the checkpoint. It was **not measured there**.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from .. import runtime
from ..bases.precision import activation_bytes
from ..bases.quantization import QuantizeOptions, format_for
from ..bases.shapes import Heads
from ..bases.weight_formats import named_format
from ..config.choices import (
    MATMUL_PATHS,
    POLICIES,
    PolicyFacts,
)
from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from ..data.shapes import padded_length, padded_targets, sequence_inputs
from ..errors import PackError
from ..ops.linear_cross_entropy import columns as loss_columns
from ..ops.profile import profile
from .decoder_sizes import Sizes, sizes_of
from .for_merge import requantized_bytes, rounding_bytes
from .headers import Headers, Tensors, tensor_bytes
from .plan import (
    MemoryPlan,
    Shape,
    accumulates,
    has_logits,
    has_score_head,
    moment_parts,
    recompute_policies,
)
from .planned_adapters import UPDATED_AT_ONCE, optimizer_bytes, plan_adapters

# Arrays in flight of the pieces of an operation that both streams of a CPU compute at a time, as
# the peak of the operation alone shows (a slice of logits with its softmax; SwiGLU's gradient).
_LOGITS_CPU, _SWIGLU_CPU = 10.5, 13
_LOGITS_ONE_ROUND = 8.5  # of two slices, one for each stream: no later one is allocated ahead
_WHOLE_LOGITS = 15  # arrays of the size of all logits, where the head is trainable
ASSUMED = "Every token is taken as a target."
_SMALL = "small base: full precision fits, quantizing would cost accuracy for memory not needed"


def describe(config: Mapping) -> Tensors:
    """Return the headers of the dense checkpoint that a config describes."""
    names = {"float32": "F32", "float16": "F16"}
    dtype = names.get(config.get("torch_dtype") or config.get("dtype"), "BF16")
    head = {} if config.get("tie_word_embeddings") else {"lm_head.weight": {}}
    shapes = {f"{path}.weight": list(s) for path, s in sizes_of(config, head).modules.items()}
    hidden, shapes["model.norm.weight"] = config["hidden_size"], [config["hidden_size"]]
    heads = Heads.of(dict(config))
    for i in range(config["num_hidden_layers"]):
        block = f"model.layers.{i}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{block}.{name}.weight"] = [hidden]
        if config["model_type"] == "qwen3":
            for name in ("q_norm", "k_norm"):
                shapes[f"{block}.self_attn.{name}.weight"] = [heads.head_dim]
        if config["model_type"] == "qwen2":
            for name in ("q_proj", "k_proj", "v_proj"):
                path = f"{block}.self_attn.{name}"
                shapes[f"{path}.bias"] = shapes[f"{path}.weight"][:1]
    return {name: {"dtype": dtype, "shape": shape} for name, shape in shapes.items()}


def run_settings(headers: Headers, train: TrainConfig) -> TrainConfig:
    """Return the settings that `packs train` would take for this base: those given."""
    return train


def why_not_quantized(headers: Headers, plan: MemoryPlan) -> str:
    """Return the reason why QLoRA is not the first recommendation for a small base."""
    return _SMALL


def base_bytes(sizes: Sizes, headers: Headers, train: TrainConfig, itemsize: int) -> int:
    """Return the bytes of the frozen weights: stored or quantized on loading, and dense copies."""
    skipped = ("quant_map", "bitsandbytes__nf4", "bitsandbytes__fp4")
    widen = itemsize == 4
    total = sum(
        tensor_bytes(tensor, widen)
        for name, tensor in headers.tensors.items()
        if not name.endswith(skipped)
    )
    quantized = headers.quantized_modules()
    if train.quantize != "none" and not quantized:
        wanted = named_format(train.quantize, train.double_quant)
        options = QuantizeOptions(wanted, tuple(train.keep))
        for path, shape in sizes.modules.items():
            stored = headers.tensors.get(f"{path}.weight")
            weight_format = format_for(path, shape, options)
            if stored is None or isinstance(weight_format, str):
                continue
            quantized.add(path)
            total -= tensor_bytes(stored, widen)
            total += weight_format.nbytes(shape, itemsize)
    if MATMUL_PATHS[_path_of(train)].keeps_dense:
        total += sum(math.prod(s) * itemsize for p, s in sizes.modules.items() if p in quantized)
    return total


@dataclass(frozen=True)
class Step:
    """A training step of adapters on a batch.

    Attributes:
        scores: Attention scores of a token: heads x T.
        kept: As of `PlannedAdapters`.
        waiting: Bytes of gradients that wait for the update.
        unpacks: Whether weights are dequantized by slices, which wait for each other.
        head: Whether the head is trained or adapted, and all logits are made.
        logits: Whether there are any; a reward model reads the states of its targets alone.
    """

    sizes: Sizes
    tokens: int
    targets: int
    scores: int
    kept: list[dict[str, int]]
    policy: PolicyFacts
    waiting: int
    unpacks: bool
    nf4: bool
    rounding: int = 0  # bytes of the weight that is rounded for a merge at a time
    head: bool = False
    logits: bool = True

    def moments(self, itemsize: int) -> dict[str, dict[str, int]]:
        """Return the parts at the moments of the forward and backward pass, in bytes."""
        sizes, tokens = self.sizes, self.tokens
        logits = {"loss": self.loss_numbers()}
        working = {
            "mlp": self.dense_slices() if self.unpacks else 0,
            "attention": 9 * min(profile().streams * _score_block(), tokens * self.scores),
        }
        if runtime.on_cpu():
            working["mlp"] += _SWIGLU_CPU * profile().elements_at_once(tokens * sizes.ffn)
        return {
            moment: moment_parts(
                self.waiting,
                itemsize * (tokens * saved),
                itemsize * logits.get(moment, 0),
                itemsize * (tokens * flying + working.get(moment, 0))
                + self.rounding * (moment in working),
            )
            for moment, (saved, flying) in self._numbers_per_token().items()
        }

    @property
    def _recomputes(self) -> bool:
        return self.policy.operations or self.policy.blocks

    def _numbers_per_token(self) -> dict[str, tuple[float, float]]:
        """Return (saved, in flight) in numbers per token at each moment.

        The loss comes when all blocks have run. In the feed-forward of a block its temporaries and
        those of the attention beside it are in flight. Recomputed blocks store their inputs,
        and one of them all of its activations.
        """
        d, f, q = self.sizes.hidden, self.sizes.ffn, self.sizes.queries
        blocks = [self._saved(kept) for kept in self.kept]
        before = saved = sum(blocks)
        if self.policy.blocks:
            before = len(blocks) * d
            saved = before + max(blocks)
        if runtime.on_cpu():  # SwiGLU by pieces, which `moments` adds
            mlp = 4 * d + (5 * f if self._recomputes else 4 * f + 2 * q)
        else:
            mlp = 4 * d + (4 + self.policy.operations) * f + 2 * q
        attention = 2 * (q + self.sizes.keys)
        return {
            "loss": (before + 2 * d, 0),
            "mlp": (saved, mlp),
            "attention": (saved - f, attention),
        }

    def _saved(self, kept: Mapping[str, int]) -> float:
        """Return the values per token that an adapted block stores from forward to backward."""
        d, f = self.sizes.hidden, self.sizes.ffn
        q, k = self.sizes.queries, self.sizes.keys
        adapted = {path.rpartition(".")[2] for path in kept}
        qkv = bool(adapted & {"q_proj", "k_proj", "v_proj"})
        gate_up = bool(adapted & {"gate_proj", "up_proj"})
        # two residual streams, and what the gradients of A are made of
        saved = d * (2 + qkv + gate_up) + q * ("o_proj" in adapted) + sum(kept.values())
        if self._recomputes and runtime.on_cpu():
            return saved + q + 2 * k + 2 * f  # outputs of the frozen products
        # attention probabilities are saved if they are one piece
        one_piece = self.tokens * self.scores <= profile().streams * _score_block()
        scores = self.scores if runtime.on_cpu() and one_piece else 0
        # q and k after RoPE, v, attended; gate, up; the input of down, unless it is recomputed
        down = "down_proj" in adapted and not self.policy.operations
        saved += 2 * q + 2 * k + scores + 2 * f + f * down
        return saved + (q + k) * self.sizes.head_norms  # what q_norm and k_norm read

    def loss_numbers(self) -> float:
        """Return the numbers in flight in the loss: slices of logits and head, states [M, D]."""
        sizes, targets = self.sizes, self.targets
        if not self.logits:  # hidden states in float32, and their gradients
            return 6 * targets * sizes.hidden
        if self.head:
            return _WHOLE_LOGITS * targets * sizes.vocab + 3 * targets * sizes.hidden
        columns = min(profile().streams * loss_columns(targets, sizes.hidden), sizes.vocab)
        head = 1.25 * columns * sizes.hidden if self.unpacks else 0
        # on a GPU logits and their exponentials, in half precision; hidden states in float32
        of_logits, of_states = (self._logits_cpu(), 3) if runtime.on_cpu() else (3, 6)
        return of_logits * targets * columns + of_states * targets * sizes.hidden + head

    def _logits_cpu(self) -> float:
        """Return how many arrays of the size of the slices that are computed at a time are there."""
        slices = math.ceil(self.sizes.vocab / loss_columns(self.targets, self.sizes.hidden))
        return _LOGITS_ONE_ROUND if slices == profile().streams == 2 else _LOGITS_CPU

    def dense_slices(self) -> float:
        """Return the dense weights in flight while products dequantize theirs."""
        if self._recomputes:  # what is recomputed waits for each
            return 0
        in_blocks = sum(map(math.prod, self.sizes.projections.values()))
        block_weights = in_blocks // self.sizes.blocks
        return min((10 if self.nf4 else 5) * profile().slice_weights, block_weights)


def _score_block() -> float:
    """Return how many attention scores are computed at once."""
    return profile().score_bytes / 4


def estimate(
    headers: Headers, lora: LoRAConfig, train: TrainConfig, shape: Shape | None = None
) -> MemoryPlan:
    """Return the peak memory of training with these settings, by part.

    By default batches have all of max_seq_length, and every position is a target.

    Raises:
        PackError: A family or an objective that the formula does not know.
    """
    check_objective(train)
    return plan_step(headers, lora, train, shape, sizes_of(headers.config, headers.tensors), Step)


def check_objective(train: TrainConfig) -> None:
    """Raise a PackError for an objective that the formula does not know."""
    if train.objective != "transformer" and not train.trains_base:
        raise PackError(
            f"no plan for the objective {train.objective}. Known is transformer.",
            "unsupported",
            "objective",
        )


def plan_step(
    headers: Headers,
    lora: LoRAConfig,
    train: TrainConfig,
    shape: Shape | None,
    sizes: Sizes,
    step_class: type[Step],
) -> MemoryPlan:
    """Return the peak memory of training a base of these sizes; `estimate` has the rest."""
    if train.trains_base:
        return _plan_full(headers, lora, train, shape, sizes, step_class)
    itemsize = activation_bytes(headers.config, train.compute_dtype)
    adapters = plan_adapters(sizes.places(headers.tensors), lora, train.method)
    if has_score_head(train):
        adapters = adapters.beside((1, sizes.hidden))
    length, targets = shape or _largest_shape(train)
    quantized = headers.is_quantized or train.quantize != "none"
    nf4 = train.quantize == "nf4" or headers.is_nf4
    path_facts = MATMUL_PATHS[_path_of(train)]
    # NF4 has no kernel on a CPU that multiplies quantized weights
    no_kernel = nf4 and runtime.on_cpu() and not path_facts.keeps_dense
    step = step_class(
        sizes,
        tokens=train.sequences * length,
        targets=targets,
        scores=sizes.heads * length,
        kept=adapters.kept,
        policy=POLICIES[recompute_policies(train)[0]],
        waiting=adapters.waiting(train),
        unpacks=quantized and (no_kernel or path_facts.dequantizes),
        nf4=nf4,
        rounding=rounding_bytes(sizes.modules, adapters, train, quantized),
        head=adapters.head,
        logits=has_logits(train),
    )
    others = requantized_bytes(sizes.modules, adapters, headers, train, itemsize)
    return adapters.plan(
        train,
        base=base_bytes(sizes, headers, train, itemsize) + others,
        base_weights=sizes.weights,
        moments=step.moments(itemsize),
        matmul_path=_path_of(train) if quantized else "dense",
    )


def _path_of(train: TrainConfig) -> str:
    """Return the matmul path of a run; ``auto`` counts as quantized."""
    return "quantized" if train.matmul_path == "auto" else train.matmul_path


def _largest_shape(train: TrainConfig) -> Shape:
    length = sequence_inputs(train.max_seq_length)
    if not has_logits(train):  # packed ones may hold many completions
        return length, train.sequences * (length if train.packing else 1)
    return length, train.sequences * length


def smallest_shape(train: TrainConfig) -> Shape:
    """Return the shape of the smallest batch that a run has."""
    length = padded_length(1, sequence_inputs(train.max_seq_length))
    return length, padded_targets(1, train.sequences * length)


def resized(shape: Shape, before: TrainConfig, after: TrainConfig) -> Shape:
    """Return the shape that a batch has after a change of its batch size or maximal length."""
    length, targets = shape
    cut = min(length, sequence_inputs(after.max_seq_length))
    share = after.sequences * cut / (before.sequences * length)
    return cut, int(targets * share)


def _plan_full(
    headers: Headers,
    lora: LoRAConfig,
    train: TrainConfig,
    shape: Shape | None,
    sizes: Sizes,
    step_class: type[Step],
) -> MemoryPlan:
    """Return the peak memory of full fine-tuning.

    Trainable weights, their gradients and the optimizer are in float32, beside the base's own
    weights, which are kept. Inputs of linear layers are kept as for the smallest adapters on all
    of them. A trainable head has full logits.
    """
    of_adapters = replace(
        train,
        method="lora",
        quantize="none",
        keep=(),
        double_quant=True,
        matmul_path="dense",
        compute_dtype="float32",
    )
    smallest = LoRAConfig(rank=1, num_layers=lora.num_layers)
    plan = plan_step(headers.without_scales(), smallest, of_adapters, shape, sizes, step_class)
    paths = dict(sizes.modules)
    if lora.num_layers > 0:
        first = sizes.blocks - lora.num_layers
        paths = {p: s for p, s in sizes.projections.items() if int(p.split(".")[2]) >= first}
    trainable = sum(math.prod(shape) for shape in paths.values())
    largest = max(math.prod(shape) for shape in paths.values())
    _, targets = shape or _largest_shape(train)
    moments = {}
    for moment, of_plan in plan.moments.items():
        parts = dict(of_plan)
        recomputed = POLICIES[plan.recompute].blocks and moment not in ("loss", "update")
        copies = accumulates(train) + (recomputed or moment == "update")
        parts["gradients"] = 4 * trainable * copies
        if moment == "loss" and lora.num_layers <= 0:
            parts["logits"] = 4 * (
                _WHOLE_LOGITS * targets * sizes.vocab + 3 * targets * sizes.hidden
            )
        if moment == "update":
            parts["working"] = 4 * UPDATED_AT_ONCE * largest
            if train.optimizer == "adamw_8bit":  # the moments of all weights are decoded first
                parts["working"] = 14 * trainable
        moments[moment] = parts
    itemsize = activation_bytes(headers.config, train.compute_dtype)
    return replace(
        plan,
        base=base_bytes(sizes, headers, of_adapters, itemsize),
        adapters=4 * trainable,
        optimizer=optimizer_bytes(paths.values(), train),
        moments=moments,
        matmul_path="dense",
        adapter_weights=trainable,
        tensors=len(paths),
    )
