"""What fits into a memory: the peak of a training run, from `config.json` and tensor headers alone.

A step of training is followed by hand: what the forward keeps for the backward, and what is in
flight at the four moments that can be the worst. MLX allocates ahead of what it computes, so "in
flight" is about one block's worth of temporaries, not one; the counts below are those of MLX's CPU
backend, read off measured peaks and checked by `benchmarks/plan_accuracy.py`.

On a GPU the same formula is used with the dtype of the checkpoint. It was **not measured there**.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import mlx.nn as nn
from mlx.utils import tree_flatten

from .. import runtime
from ..adapters.targets import plan_specs
from ..bases.encoder import Encoder, check_config
from ..bases.files import (
    TINY,
    check_files,
    missing_shards,
    resolve_checkpoint,
    weight_files,
)
from ..bases.geometry import BLOCK_PROJECTIONS, Geometry, Group, Heads
from ..bases.nf4 import check_stored_nf4, stored_as_asked
from ..bases.quantization import QuantizeOptions, format_for
from ..bases.sentence_config import SentenceConfig
from ..bases.weight_formats import named_format
from ..config.choices import ENCODERS, POLICIES
from ..config.schema import LoRAConfig, TrainConfig
from ..data.batches import padded_length, padded_targets
from ..errors import PackError, did_you_mean
from ..files import read_header
from ..ops.attention import SCORE_BYTES
from ..ops.exponential import ELEMENTS as SWIGLU_ELEMENTS
from ..ops.lanes import lanes
from ..ops.linear_cross_entropy import columns as loss_columns
from ..ops.matmul import SLICE_WEIGHTS, device
from ..optim import make_optimizer
from ..runtime import mx

ERROR = 0.15  # largest error seen in benchmarks/plan_accuracy.py is below this
PARTS = "base adapters gradients optimizer activations logits working".split()
_WHOLE_LOGITS = 15  # pieces of the size of all logits, where the head learns
_UPDATED_AT_ONCE = 3  # of the largest weight that learns
_HELPS = 0.98  # a remedy takes less than this share
SHORTEST, LEAST_RANK = 256, 4  # a plan proposes nothing smaller
FAMILIES = ("qwen3", "qwen2", "llama", "mistral")

Tensors = Mapping[str, Mapping]  # name -> {"dtype": as safetensors spells it, "shape": [...]}

_ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2}
_HALF = ("F16", "BF16")


@dataclass(frozen=True)
class MemoryPlan:
    """What a run holds at the moments that can be its worst, in bytes by part.

    base: frozen weights, packed and dense.   adapters: weights that learn.   optimizer: its state.
    moments: what comes and goes, at ``loss``, ``mlp``, ``attention`` and ``update``: gradients;
    activations kept for the backward; logits in slices; working, temporaries in flight with
    dequantized weights among them.   adapter_weights, base_weights: how many there are.

    The buffers that MLX has freed and caches are no part of it: neither `mx.get_peak_memory` nor
    the need of a run counts them, since MLX takes them first when memory is short.
    """

    base: int
    adapters: int
    optimizer: int
    moments: Mapping[str, Mapping[str, int]]
    matmul_path: str
    recompute: str
    adapter_weights: int
    base_weights: int

    @property
    def moment(self) -> str:
        """The worst one."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def peak_bytes(self) -> int:
        return sum(self.parts().values())

    @property
    def peak_gb(self) -> float:
        """What `mx.get_peak_memory` should report, in GB of 10^9 bytes."""
        return self.peak_bytes / 1e9

    def parts(self) -> dict[str, int]:
        """Bytes by part at the worst moment; they add up to the peak."""
        return self._parts(self.moments[self.moment])

    def most(self) -> dict[str, int]:
        """Each part when it is largest; they are not all so at once."""
        names = next(iter(self.moments.values()))
        return self._parts({n: max(held[n] for held in self.moments.values()) for n in names})

    def _parts(self, held: Mapping[str, int]) -> dict[str, int]:
        stays = {"base": self.base, "adapters": self.adapters, "optimizer": self.optimizer}
        return {name: (stays | held)[name] for name in PARTS}


def fit(plan: MemoryPlan, memory: int) -> str:
    """``fits`` with the error of the estimate to spare, ``tight`` by the estimate alone, ``no``.

    One rule for `packs plan`, which recommends what fits, and for `packs train`, which warns of
    what is tight and refuses the rest.
    """
    if plan.peak_bytes * (1 + ERROR) <= memory:
        return "fits"
    return "tight" if plan.peak_bytes <= memory else "no"


def remedies(
    peak: Callable[[LoRAConfig, TrainConfig], int],
    lora: LoRAConfig,
    train: TrainConfig,
    dense: bool,
) -> list[str]:
    """What would take less memory, the mildest first.

    Full fine-tuning, which has no rank and no packed weights, could be of fewer blocks.

    Args:
        peak: bytes with these settings, on ``train.matmul_path``.
        dense: whether the base is stored dense, so that it could be quantized.
    """
    if train.method == "full":
        return [*_helpful(peak, _less_than_full(lora, train, dense), lora, train), "a smaller base"]
    packed = replace(train, matmul_path="transient")
    ways = {
        "--quantize nf4": (lora, replace(packed, quantize="nf4")),
        "--matmul-path transient": (lora, packed),
        "a smaller --batch-size": (lora, replace(train, batch_size=-(-train.batch_size // 2))),
        "--recompute block": (lora, replace(train, recompute="block")),
        "a smaller --max-seq-length": (
            lora,
            replace(train, max_seq_length=max(train.max_seq_length // 2, SHORTEST)),
        ),
        "a smaller --rank": (replace(lora, rank=max(lora.rank // 2, LEAST_RANK)), train),
    }
    if not dense or train.quantize != "none":
        del ways["--quantize nf4"]
    if train.matmul_path != "dense" or dense and train.quantize == "none":
        del ways["--matmul-path transient"]
    return [*_helpful(peak, ways, lora, train), "a smaller base"]


_Settings = tuple[LoRAConfig, TrainConfig]


def _helpful(
    peak: Callable[[LoRAConfig, TrainConfig], int], ways: Mapping[str, _Settings], *now: object
) -> list[str]:
    """The ways that take clearly less than the settings ``now``."""
    before = peak(*now)
    return [way for way, less in ways.items() if peak(*less) < _HELPS * before]


def _less_than_full(lora: LoRAConfig, train: TrainConfig, dense: bool) -> dict[str, _Settings]:
    """Settings that take less than full fine-tuning with these."""
    adapters = replace(train, method="lora", matmul_path="dense" if dense else "quantized")
    few = replace(lora, num_layers=1)
    return {
        "--method lora": (lora, adapters),
        "a smaller --batch-size": (lora, replace(train, batch_size=-(-train.batch_size // 2))),
        "--recompute block": (lora, replace(train, recompute="block", grad_checkpoint=False)),
        "a smaller --max-seq-length": (
            lora,
            replace(train, max_seq_length=max(train.max_seq_length // 2, SHORTEST)),
        ),
        "--optimizer adamw_8bit": (lora, replace(train, optimizer="adamw_8bit")),
        "a smaller --num-layers": (few, train),
    }


@dataclass(frozen=True)
class Checkpoint:
    """What is known of a base without its weights."""

    name: str
    config: dict
    tensors: Tensors


def read_checkpoint(name: str | Path) -> Checkpoint:
    """Config and tensor headers of a folder, ``tiny`` or a hub id (cached first, else by range).

    A folder with ``config.json`` alone is planned as the dense checkpoint that this describes.

    Raises: PackError, one line, when there is none or the Hub cannot be reached.
    """
    is_id = str(name) != TINY and "/" in str(name) and not os.path.exists(Path(name).expanduser())
    path = _cached(str(name)) if is_id else resolve_checkpoint(name)
    if path is None:
        return Checkpoint(str(name), *_from_hub(str(name)))
    if not weight_files(path):
        return Checkpoint(str(name), *_from_config(path / "config.json"))
    check_files(path)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    tensors: dict[str, Mapping] = {}
    for file in weight_files(path):
        tensors |= read_header(file)[0]
    return Checkpoint(str(name), config, tensors)


def _from_config(file: Path) -> tuple[dict, Tensors]:
    """Config, and the headers of the dense checkpoint that it describes, where there is no more.

    Raises: PackError if the config is of no family known here, or of a quantized checkpoint.
    """
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PackError(f"{file}: is not valid JSON: {error}.") from None
    if not isinstance(config, dict) or config.get(
        "quantization_config", config.get("quantization")
    ):
        raise PackError(
            f"{file}: stands alone and does not say how each weight is packed; a plan "
            "needs the headers of model*.safetensors too."
        )
    return config, described(config)


def described(config: Mapping) -> Tensors:
    """Headers of the dense checkpoint that a config describes."""
    if config.get("model_type") in ENCODERS:
        return tensors_of(Encoder(check_config(config, Path("config.json")), SentenceConfig()))
    names = {"float32": "F32", "float16": "F16"}
    dtype = names.get(config.get("torch_dtype") or config.get("dtype"), "BF16")
    head = {} if config.get("tie_word_embeddings") else {"lm_head.weight": {}}
    shapes = {f"{path}.weight": list(s) for path, s in _sizes(config, head).modules.items()}
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


def _cached(repo: str) -> Path | None:
    """The folder of a hub id if the cache has all of it."""
    from huggingface_hub import snapshot_download

    try:
        path = Path(snapshot_download(repo, local_files_only=True))
    except (OSError, ValueError):  # not there, or no name of the Hub's
        return None
    whole = (path / "config.json").is_file() and weight_files(path) and not missing_shards(path)
    return path if whole else None


def _from_hub(repo: str) -> tuple[dict, Tensors]:
    """Config and headers of a hub id: the config is downloaded, the headers by range requests."""
    import huggingface_hub
    from huggingface_hub import errors

    unreachable = (OSError, ValueError, errors.HTTPError, errors.SafetensorsParsingError)
    try:
        headers = huggingface_hub.get_safetensors_metadata(repo)
        file = huggingface_hub.hf_hub_download(repo, "config.json")
        config = json.loads(Path(file).read_text(encoding="utf-8"))
    except errors.RepositoryNotFoundError:
        raise PackError(
            f"--model {repo}: no folder of that name, and the Hub has no such model (or it is "
            "private: hf auth login)."
        ) from None
    except unreachable as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:120].rstrip(".")
        raise PackError(
            f"--model {repo}: not a folder here, not in the Hugging Face cache, and its headers "
            f"cannot be had from the Hub ({reason})."
        ) from None
    tensors = {
        name: {"dtype": str(getattr(t.dtype, "value", t.dtype)), "shape": list(t.shape)}
        for file in headers.files_metadata.values()
        for name, t in file.tensors.items()
    }
    return config, tensors


def tensors_of(model: nn.Module) -> Tensors:
    """The same of a loaded model, before adapters are attached."""
    spelled = {mx.float32: "F32", mx.bfloat16: "BF16", mx.float16: "F16", mx.uint32: "U32"}
    return {
        name: {
            "dtype": spelled.get(a.dtype, "U8" if a.dtype.size == 1 else "F64"),
            "shape": list(a.shape),
        }
        for name, a in tree_flatten(model.parameters())
    }


@dataclass(frozen=True)
class _Sizes:
    """Widths of a base of the Llama family, and where its modules are."""

    hidden: int
    ffn: int
    blocks: int
    heads: int
    queries: int  # heads x head_dim
    keys: int  # KV heads x head_dim
    vocab: int
    head_norms: bool
    modules: dict[str, tuple[int, int]]  # path -> (out, in) of linears and embeddings

    @property
    def weights(self) -> int:
        return sum(out * width for out, width in self.modules.values())

    def widths(self, name: str) -> tuple[int, int]:
        """(out, in) of a projection of a block."""
        return self.modules[_projection_path(0, name)]


def _projection_path(block: int, name: str) -> str:
    parent = "self_attn" if name in BLOCK_PROJECTIONS["attention"] else "mlp"
    return f"model.layers.{block}.{parent}.{name}"


def _sizes(config: Mapping, tensors: Tensors) -> _Sizes:
    """Raises: PackError for a family or a config that the formula does not know."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise PackError(
            f"no plan for model_type '{family}'; known are {', '.join((*FAMILIES, *ENCODERS))}."
        )
    heads = Heads.of(dict(config))
    blocks, vocab = config.get("num_hidden_layers"), config.get("vocab_size")
    numbers = (*asdict(heads).values(), blocks, vocab)
    if not all(isinstance(n, int) and n > 0 for n in numbers):
        raise PackError("no plan: config.json lacks a size (hidden, FFN, heads, blocks or vocab).")
    hidden, ffn = heads.hidden, heads.ffn
    queries, keys = heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim
    shapes = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (ffn, hidden),
        "up_proj": (ffn, hidden),
        "down_proj": (hidden, ffn),
    }
    modules = {"model.embed_tokens": (vocab, hidden)}
    for i in range(blocks):
        modules |= {_projection_path(i, name): shape for name, shape in shapes.items()}
    if "lm_head.weight" in tensors and not config.get("tie_word_embeddings"):
        modules["lm_head"] = (vocab, hidden)
    norms = any(name.endswith("self_attn.q_norm.weight") for name in tensors)
    return _Sizes(hidden, ffn, blocks, heads.heads, queries, keys, vocab, norms, modules)


def _groups(sizes: _Sizes, lora: LoRAConfig) -> list[Group]:
    """Projections that carry adapters, by the rules of `geometry.select_targets`."""
    if lora.num_layers > sizes.blocks:
        raise PackError(f"--num-layers {lora.num_layers}: the base has only {sizes.blocks} blocks.")
    first = sizes.blocks - lora.num_layers if lora.num_layers > 0 else 0
    paths = [
        _projection_path(i, name)
        for i in range(first, sizes.blocks)
        for names in BLOCK_PROJECTIONS.values()
        for name in names
    ]
    chosen = set() if lora.target_modules else set(paths)
    for target in lora.target_modules:
        matched = {p for p in paths if p == target or p.endswith("." + target)}
        matched |= {p for p in sizes.modules if p == target and "layers" in p}
        if not matched:
            names = [name for names in BLOCK_PROJECTIONS.values() for name in names]
            hint = did_you_mean(target, names)
            raise PackError(f"--target-modules {target}: no such projection in a plan. {hint}")
        chosen |= matched
    members = []
    for path in sizes.modules:
        if path in chosen:
            out, width = sizes.modules[path]
            name = path.rpartition(".")[2]
            members.append(
                Geometry(path, width, out, None, None, None, width, False, ((name, out),))
            )
    return [Group(None, (geometry,)) for geometry in members]


def activation_bytes(config: Mapping, train: TrainConfig) -> int:
    """Bytes of an activation: 4 on a CPU, on a GPU as asked for or as the base is stored."""
    if runtime.on_cpu():
        return 4
    if train.compute_dtype != "auto":
        return 4 if train.compute_dtype == "float32" else 2
    return 4 if (config.get("torch_dtype") or config.get("dtype")) == "float32" else 2


def check_stored(checkpoint: Checkpoint, train: TrainConfig) -> None:
    """Raises: PackError, as `load_base` does, if a base that is quantized is to be otherwise."""
    if not stored_as_asked(checkpoint.config, train.quantize):
        return
    tails = (".weight.absmax", ".absmax")
    packed = []
    for name in checkpoint.tensors:
        if tail := next((tail for tail in tails if name.endswith(tail)), None):
            path = name.removesuffix(tail)
            packed.append(
                (path, f"{path}{tail.replace('absmax', 'nested_absmax')}" in checkpoint.tensors)
            )
    check_stored_nf4(packed, checkpoint.name, train.double_quant, train.keep)


_PACKED_TAILS = (".scales", ".weight.absmax", ".absmax")


def _packed_paths(tensors: Tensors) -> set[str]:
    """Modules whose weight is packed: affine and its kin, NF4, bitsandbytes."""
    return {n.removesuffix(tail) for tail in _PACKED_TAILS for n in tensors if n.endswith(tail)}


def is_packed(tensors: Tensors) -> bool:
    """Whether any weight is quantized."""
    return any(name.endswith(_PACKED_TAILS) for name in tensors)


def dense_tensors(tensors: Tensors) -> Tensors:
    """The same names, as if no weight were quantized."""
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(_PACKED_TAILS)}


def _tensor_bytes(tensor: Mapping, widen: bool) -> int:
    """Bytes in memory; ``widen``: half precision is taken to float32, as on CPUs."""
    each = _ITEM_BYTES.get(tensor["dtype"], 1)
    if widen and tensor["dtype"] in _HALF:
        each = 4
    return each * math.prod(tensor["shape"])


def _base_bytes(
    sizes: _Sizes, tensors: Tensors, train: TrainConfig, matmul_path: str, itemsize: int
) -> int:
    """Frozen weights: as stored or packed while loading, and their dense copies."""
    skipped = ("quant_map", "bitsandbytes__nf4", "bitsandbytes__fp4")
    widen = itemsize == 4
    total = sum(_tensor_bytes(t, widen) for n, t in tensors.items() if not n.endswith(skipped))
    packed = _packed_paths(tensors)
    if train.quantize != "none" and not packed:
        wanted = named_format(train.quantize, train.double_quant)
        options = QuantizeOptions(wanted, tuple(train.keep))
        for path, shape in sizes.modules.items():
            stored = tensors.get(f"{path}.weight")
            weight_format = format_for(path, shape, options)
            if stored is None or weight_format is None:
                continue
            packed.add(path)
            total -= _tensor_bytes(stored, widen)
            total += weight_format.nbytes(shape, itemsize)
    if matmul_path == "dense":
        total += sum(math.prod(s) * itemsize for p, s in sizes.modules.items() if p in packed)
    return total


def optimizer_bytes(specs: Mapping, train: TrainConfig) -> int:
    """The state of the optimizer for all adapters; its arrays are described, never made."""
    return state_bytes(
        (
            shape
            for spec in specs.values()
            for s in spec.slices
            for shape in ((spec.in_features, s.rank), (s.rank, s.width))
        ),
        train,
    )


def state_bytes(learned: Iterable[tuple[int, int]], train: TrainConfig) -> int:
    """The state of the optimizer for weights of these shapes."""
    shapes = Counter(learned)
    optimizer = make_optimizer(train)
    optimizer.init({str(shape): mx.zeros(shape) for shape in shapes})
    return sum(
        count * sum(a.nbytes for _, a in tree_flatten(optimizer.state[str(shape)]))
        for shape, count in shapes.items()
    )


def _kept(sizes: _Sizes, adapted: Mapping[str, int], scores: float, recompute: str) -> float:
    """Numbers per token that one adapted block holds from forward to backward.

    Args:
        adapted: rank of each adapted projection of the block.
        scores: attention probabilities, heads x T, if they are one piece; else 0.
    """
    d, f, q, k = sizes.hidden, sizes.ffn, sizes.queries, sizes.keys
    qkv = any(name in adapted for name in ("q_proj", "k_proj", "v_proj"))
    gate_up = any(name in adapted for name in ("gate_proj", "up_proj"))
    # two residual streams, and what the gradients of A are made of
    kept = d * (2 + qkv + gate_up) + q * ("o_proj" in adapted) + sum(adapted.values())
    if recompute != "none":
        return kept + q + 2 * k + 2 * f  # outputs of the frozen products
    # q and k after RoPE, v, attended; gate, up, on GPUs silu(gate); the input of down
    kept += 2 * q + 2 * k + scores + (3 - runtime.on_cpu()) * f + f * ("down_proj" in adapted)
    return kept + (q + k) * sizes.head_norms  # what q_norm and k_norm read


def _moments(
    sizes: _Sizes,
    adapted: list[dict[str, int]],
    scores: float,
    recompute: str,
    sliced: bool,
) -> dict[str, tuple[float, float]]:
    """(kept, in flight) in numbers per token at the moments that can be the worst.

    The loss comes when all blocks have run. In the feed-forward of a block its temporaries and
    those of the attention beside it are in flight. Recomputed blocks hold their inputs, and one of
    them what it holds anyway.

    Args:
        adapted: rank by projection of each block from the first adapted one.
        sliced: whether weights are dense by slices, which wait for each other.
    """
    d, f, q = sizes.hidden, sizes.ffn, sizes.queries
    blocks = [_kept(sizes, ranks, scores, recompute) for ranks in adapted]
    kept = sum(blocks)
    before = len(blocks) * d if recompute == "block" else kept
    if recompute == "block":
        kept = before + max(blocks)
    if runtime.on_cpu():  # SwiGLU by pieces, which `estimate` adds
        mlp = 4 * d + (4 * f + 2 * q if recompute == "none" else 5 * f)
    elif recompute == "none":
        mlp = 4 * d + (4 if sliced else 6) * f + 2 * q
    else:
        mlp = 4 * d + (15.5 if sliced else 18) * f
    attention = 2 * (q + sizes.keys)
    return {"loss": (before + 2 * d, 0), "mlp": (kept, mlp), "attention": (kept - f, attention)}


def _loss_numbers(sizes: _Sizes, targets: int, unpacks: bool) -> float:
    """Numbers in flight in the loss: slices of logits, states [M, D] and slices of the head."""
    columns = min(lanes() * loss_columns(targets, sizes.hidden), sizes.vocab)
    head = 1.25 * columns * sizes.hidden if unpacks else 0
    return 12.5 * targets * columns + 3 * targets * sizes.hidden + head


def _dense_slices(sizes: _Sizes, recompute: str, nf4: bool) -> float:
    """Dense weights in flight while products unpack theirs; recomputed blocks wait for each."""
    if recompute != "none":
        return 0
    block = sum(math.prod(sizes.widths(n)) for names in BLOCK_PROJECTIONS.values() for n in names)
    return min((10 if nf4 else 5) * SLICE_WEIGHTS[device()], block)


def estimate(
    config: Mapping,
    tensors: Tensors,
    lora: LoRAConfig,
    train: TrainConfig,
    matmul_path: str = "quantized",
    *,
    length: int | None = None,
    targets: int | None = None,
) -> MemoryPlan:
    """The peak memory of training with these settings, by part.

    Where the policy of recomputation is left to the plan (`fitted`), this is of keeping all.

    Args:
        config: of the base.   tensors: name -> dtype and shape, as in safetensors headers.
        matmul_path: ``quantized``, ``transient`` or ``dense`` (which a dense base is anyway).
        length: T, inputs of a row; by default all of max_seq_length.
        targets: M, target slots of a batch; by default every position.
    Raises: PackError for a family that the formula does not know.
    """
    if config.get("model_type") in ENCODERS:
        from .encoder import estimate_encoder

        return estimate_encoder(config, tensors, lora, train, length)
    if train.method == "full":
        return _full(config, tensors, lora, train, length, targets)
    if train.objective != "transformer":
        raise PackError(f"no plan for the objective {train.objective}; known is transformer.")
    sizes = _sizes(config, tensors)
    itemsize = activation_bytes(config, train)
    specs = plan_specs(_groups(sizes, lora), lora)
    weights = sum(s.rank * (m.in_features + s.width) for m in specs.values() for s in m.slices)
    packed = is_packed(tensors) or train.quantize != "none"

    time = length or train.max_seq_length - 1
    tokens = train.batch_size * time
    adapted = _adapted(specs, sizes.blocks)
    tracked = adapted[next(i for i, ranks in enumerate(adapted) if ranks) :]
    block = SCORE_BYTES[device()] / 4
    scores = sizes.heads * time  # of a token; kept if they are one block
    nf4 = _is_nf4(tensors, train)
    # NF4 has no kernel on a CPU that multiplies packed weights
    always = nf4 and matmul_path == "quantized" and runtime.on_cpu()
    unpacks = packed and (always or matmul_path == "transient")
    policy = policies(train)[0]
    kept_scores = scores if runtime.on_cpu() and tokens * scores <= lanes() * block else 0
    moments = _moments(sizes, tracked, kept_scores, policy, unpacks)

    targets = tokens if targets is None else targets
    # in recomputed blocks the last one is the worst, and the gradients of all others are there
    pending = 4 * weights * (train.grad_accumulation_steps > 1 or policy == "block")
    logits = {"loss": _loss_numbers(sizes, targets, unpacks)}
    working = {
        "mlp": _dense_slices(sizes, policy, nf4) if unpacks else 0,
        "attention": 9 * min(lanes() * block, tokens * scores),
    }
    if runtime.on_cpu():
        working["mlp"] += 15 * min(lanes() * SWIGLU_ELEMENTS, tokens * sizes.ffn)
    held = {}
    for moment, (kept, flying) in moments.items():
        numbers = tokens * kept, logits.get(moment, 0), tokens * flying + working.get(moment, 0)
        held[moment] = (pending, *(itemsize * n for n in numbers))
    # every gradient is there before the first update, whose temporaries span 1.3 blocks
    gradients = 4 * weights * (1 + (train.grad_accumulation_steps > 1))
    held["update"] = (gradients, 0, 0, 1.3 * 4 * weights / len(tracked))
    names = ("gradients", "activations", "logits", "working")
    return MemoryPlan(
        base=_base_bytes(sizes, tensors, train, matmul_path, itemsize),
        adapters=4 * weights,
        optimizer=optimizer_bytes(specs, train),
        moments={
            moment: dict(zip(names, map(int, each), strict=True)) for moment, each in held.items()
        },
        matmul_path=matmul_path if packed else "dense",
        recompute=policy,
        adapter_weights=weights,
        base_weights=sizes.weights,
    )


def _full(
    config: Mapping,
    tensors: Tensors,
    lora: LoRAConfig,
    train: TrainConfig,
    length: int | None,
    targets: int | None,
) -> MemoryPlan:
    """Full fine-tuning: weights that learn, their gradients and the optimizer in float32, beside
    the base's own weights, which are kept.

    Inputs of linears are kept as for the smallest adapters on all of them. A head that learns has
    whole logits.
    """
    sizes = _sizes(config, tensors)
    few = replace(
        train,
        method="lora",
        quantize="none",
        keep=(),
        double_quant=True,
        matmul_path="dense",
        compute_dtype="float32",
    )
    smallest = LoRAConfig(rank=1, num_layers=lora.num_layers)
    plan = estimate(
        config, dense_tensors(tensors), smallest, few, "dense", length=length, targets=targets
    )
    paths = dict(sizes.modules)
    if lora.num_layers > 0:
        first = sizes.blocks - lora.num_layers
        paths = {p: s for p, s in paths.items() if "layers" in p and int(p.split(".")[2]) >= first}
    learned = sum(math.prod(shape) for shape in paths.values())
    largest = max(math.prod(shape) for shape in paths.values())
    whole_head = lora.num_layers <= 0
    time = length or train.max_seq_length - 1
    slots = train.batch_size * time if targets is None else targets
    several = train.grad_accumulation_steps > 1
    recomputed = plan.recompute == "block"
    moments = {}
    for moment, held in plan.moments.items():
        held = dict(held)
        pending = several + (recomputed and moment in ("mlp", "attention"))
        held["gradients"] = 4 * learned * (1 + several if moment == "update" else pending)
        if moment == "loss" and whole_head:
            held["logits"] = 4 * (_WHOLE_LOGITS * slots * sizes.vocab + 3 * slots * sizes.hidden)
        if moment == "update":
            held["working"] = 4 * _UPDATED_AT_ONCE * largest
            if train.optimizer == "adamw_8bit":  # the moments of all weights are decoded first
                held["working"] = 14 * learned
        moments[moment] = {name: int(count) for name, count in held.items()}
    frozen = _base_bytes(sizes, tensors, few, "dense", activation_bytes(config, train))
    return replace(
        plan,
        base=frozen,
        adapters=4 * learned,
        optimizer=state_bytes(paths.values(), train),
        moments=moments,
        matmul_path="dense",
        adapter_weights=learned,
    )


def _adapted(specs: Mapping, blocks: int) -> list[dict[str, int]]:
    """Rank by projection of each block."""
    adapted: list[dict[str, int]] = [{} for _ in range(blocks)]
    for path, spec in specs.items():
        if spec.rank:  # model.layers.N.….projection
            adapted[int(path.split(".")[2])][path.rpartition(".")[2]] = spec.rank
    return adapted


def _is_nf4(tensors: Tensors, train: TrainConfig) -> bool:
    return train.quantize == "nf4" or any(name.endswith("absmax") for name in tensors)


def matmul_paths(tensors: Tensors, train: TrainConfig) -> list[str]:
    """The matmul paths that a run may take, the cheapest in memory first."""
    if train.method == "full":
        return ["dense"]
    if train.matmul_path != "auto":
        return [train.matmul_path]
    packed = is_packed(tensors) or train.quantize != "none"
    return ["quantized", "transient", "dense"] if packed else ["dense"]


def policies(train: TrainConfig) -> tuple[str, ...]:
    """The policies of recomputation that a run may take, the one that takes least time first."""
    return POLICIES if train.recomputes == "auto" else (train.recomputes,)


def fitted(
    planned: Callable[[TrainConfig], MemoryPlan], train: TrainConfig, memory: int
) -> MemoryPlan:
    """The plan of the first policy of recomputation that fits, or of the one that takes least."""
    plans = []
    for policy in policies(train):
        plans.append(planned(replace(train, recompute=policy)))
        if fit(plans[-1], memory) == "fits":
            return plans[-1]
    return min(plans, key=lambda plan: plan.peak_bytes)


def least(checkpoint: Checkpoint, lora: LoRAConfig, train: TrainConfig) -> MemoryPlan:
    """What a run takes whatever its rows are: its shortest batches, on its cheapest matmul path, with
    the policy of recomputation that takes least."""
    length = padded_length(1, train.max_seq_length - 1)
    targets = padded_targets(1, train.batch_size * length)
    plans = [
        estimate(
            checkpoint.config,
            checkpoint.tensors,
            lora,
            replace(train, recompute=policy),
            path,
            length=length,
            targets=targets,
        )
        for path in matmul_paths(checkpoint.tensors, train)
        for policy in policies(train)
    ]
    return min(plans, key=lambda plan: plan.peak_bytes)


def estimate_batches(
    config: Mapping,
    tensors: Tensors,
    lora: LoRAConfig,
    train: TrainConfig,
    matmul_path: str,
    shapes: Iterable[tuple[int, int]],
) -> MemoryPlan:
    """The largest estimate over batches of these shapes, (T, M) each."""
    most = dict(sorted(shapes))  # targets for each length: estimates rise with them, to 2 %
    plans = [
        estimate(config, tensors, lora, train, matmul_path, length=length, targets=targets)
        for length, targets in most.items()
    ]
    return max(plans, key=lambda plan: plan.peak_bytes)
