"""PEFT's folders: ``adapter_config.json`` and ``adapter_model.safetensors``, read and written.

PEFT keeps A as [r, in] and B as [out, r] under the names that transformers has for modules; the
scale is alpha / r of each module, or alpha / sqrt(r) with rsLoRA. Anything that changes the model
in a way that a pack cannot carry is refused by name.
"""

import math
import re
from collections.abc import Collection
from pathlib import Path

import numpy as np
from mlx.utils import tree_flatten

from ..adapters.spec import Specs
from ..bases.geometry import chooses
from ..bases.loading import BaseModel
from ..config.choices import ENCODERS
from ..errors import PackError
from ..packs.manifest import replaced_of
from ..packs.pack import Pack
from ..runtime import mx
from .external import Foreign, Tensors, folded, hold_magnitudes, is_positive, scale_of

TENSORS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
# What a config may ask for that is no low-rank product on a weight, and why it has no place here.
_REFUSED = {
    "trainable_token_indices": "trains single rows of the embedding",
    "layer_replication": "builds a model of repeated layers",
    "target_parameters": "adapts parameters of no linear (stacked experts), in another layout",
    "alora_invocation_tokens": "is switched on by tokens of the prompt (aLoRA)",
    "use_qalora": "pools its input (QALoRA)",
    "use_bdlora": "has block-diagonal factors (BD-LoRA)",
    "arrow_config": "routes between adapters",
    "megatron_config": "is split over devices by Megatron",
    "lora_bias": "trains a bias beside B",
}
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Families whose modules mlx-lm calls as transformers does; of GPT-2 the one difference is known.
_SAME_NAMES = (
    "bert cohere gemma gemma2 gemma3_text glm4 gpt2 granite helium llama mistral mixtral olmo2 "
    "olmoe phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe smollm3 stablelm starcoder2"
).split()
_LEAVES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PART = re.compile(
    r"(?P<path>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(\.default)?(\.weight)?"
)


def path_here(theirs: str, model_type: str) -> str:
    """A module's path in mlx-lm, or in `models.encoder`."""
    if model_type in ENCODERS:
        return re.sub(r"^bert\.", "", theirs)
    if model_type == "gpt2":
        return re.sub(r"^transformer\.", "model.", theirs)
    return theirs


def path_there(ours: str, model_type: str) -> str:
    """A module's path in transformers."""
    if model_type == "gpt2":
        return re.sub(r"^model\.", "transformer.", ours)
    return ours


def check_config(config: dict, where: Path) -> None:
    """Raises: PackError naming the first thing that a pack cannot carry."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise PackError(
            f"{where}: peft_type is {kind!r}, whose tensors are no low-rank factors of a weight; "
            "only LORA (with rsLoRA and DoRA) can be converted."
        )
    for key, reason in _REFUSED.items():
        if config.get(key):
            raise PackError(f"{where}: {key}: the adapter {reason}; a pack cannot carry that.")
    if config.get("bias", "none") != "none":
        raise PackError(
            f"{where}: bias is {config['bias']!r}: the adapter trains biases of the "
            "base; a pack cannot carry that."
        )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_CHANGED_BASE):
        raise PackError(
            f"{where}: init_lora_weights is {start!r}: the adapter belongs to weights that PEFT "
            "changed when it started; save it with path_initial_model_for_weight_conversion."
        )
    for key in ("lora_alpha", "r"):
        value = config.get(key)
        if not is_positive(value):
            raise PackError(f"{where}: {key} must be a number above 0, but is {value!r}.")
    for key in ("rank_pattern", "alpha_pattern"):
        _check_pattern(config.get(key) or {}, key, where)


def _check_pattern(pattern, key: str, where: Path) -> None:
    if not isinstance(pattern, dict):
        raise PackError(f"{where}: {key} must be a mapping, but is {pattern!r}.")
    for expression, value in pattern.items():
        try:
            re.compile(expression)
        except (re.error, RecursionError, OverflowError) as error:
            raise PackError(f"{where}: {key}: {expression!r} is no expression: {error}.") from None
        if not is_positive(value):
            raise PackError(
                f"{where}: {key}: {expression!r} must be a number above 0, but is {value!r}."
            )


def _turned(name: str, tensor: mx.array, model_type: str) -> mx.array:
    """A whole tensor as it lies on the other side: GPT-2's Conv1D has its weights as [in, out]."""
    of_conv = model_type == "gpt2" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name)
    return mx.contiguous(tensor.T) if of_conv and tensor.ndim == 2 else tensor


def scale_in(config: dict, theirs: str, rank: int) -> float:
    """PEFT's scaling of one module of this rank."""
    patterns = config.get("alpha_pattern") or {}
    key = next((k for k in patterns if re.match(rf"(.*\.)?({k})$", theirs)), None)
    alpha = patterns[key] if key is not None else config["lora_alpha"]
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def read(tensors: Tensors, config: dict, model_type: str, where: Path) -> Foreign:
    """An adapter under our names.

    Args:
        tensors: as PEFT's file has them.   where: the file, for errors.
    Raises: PackError naming what cannot be converted, and why.
    """
    found = Foreign(head=False)
    for name, tensor in tensors.items():
        bare = name.removeprefix(_PREFIX)
        if match := _PART.fullmatch(bare):
            path = path_here(match["path"], model_type)
            if ".experts." in f"{path}.":
                raise PackError(
                    f"{where}: {name}: adapts an expert by itself, and mlx-lm stacks the experts of"
                    " a layer; expert adapters of PEFT cannot be converted."
                )
            part = match["part"]
            if part == "lora_magnitude_vector":
                found.tensors[f"{path}.m"] = tensor.flatten()
                continue
            if tensor.ndim != 2:
                raise PackError(
                    f"{where}: {name} has {tensor.ndim} axes, must have 2 (an adapter of a linear)."
                )
            ours = "lora_a" if part.endswith("A") else "lora_b"
            found.tensors[f"{path}.{ours}"] = mx.contiguous(tensor.T)
            if ours == "lora_a":
                found.scales[path] = scale_in(config, match["path"], tensor.shape[0])
        elif re.search(r"\.(lora|ia3|hada|lokr|oft|boft|vera|token_adapter|trainable)_?", bare):
            raise PackError(
                f"{where}: {name}: is of a kind that cannot be converted; a LORA "
                "adapter has lora_A and lora_B."
            )
        else:
            bare = re.sub(r"\.(modules_to_save(\.default)?|base_layer)\.", ".", bare)
            found.whole[path_here(bare, model_type)] = _turned(bare, tensor, model_type)
    if lonely := next((n for n in found.tensors if n.rpartition(".")[0] not in found.scales), None):
        raise PackError(f"{where}: {lonely.rpartition('.')[0]}: has no lora_A.")
    if not found.scales:
        raise PackError(f"{where}: holds no adapter (no lora_A).")
    if config.get("use_dora"):
        hold_magnitudes(found, where)
    return found


def without_copies(found: Foreign, base: BaseModel) -> Foreign:
    """Without whole tensors that are the base's own: PEFT saves embeddings that it left alone."""
    own = dict(tree_flatten(base.model.parameters()))
    for name, tensor in list(found.whole.items()):
        tied = "lm_head.weight" not in own and name == "lm_head.weight"
        ours = own.get(_table_of(own) if tied else name)
        if ours is not None and ours.shape == tensor.shape and ours.dtype == tensor.dtype:
            if mx.array_equal(ours, tensor).item():
                del found.whole[name]
    return found


def _table_of(names: Collection[str]) -> str | None:
    """The embedding's tensor."""
    return next((n for n in names if n.endswith(("embed_tokens.weight", "wte.weight"))), None)


def without_tied_head(found: Foreign, base: BaseModel, where: Path) -> Foreign:
    """Whole embeddings of a base that ties its head: one table stands for both, or neither.

    Raises: PackError if PEFT has the input and the head part ways.
    """
    if "lm_head" in dict(base.model.named_modules()) or not found.whole:
        return found
    table = next(
        (n for n in found.whole if n.endswith(("embed_tokens.weight", "wte.weight"))), None
    )
    head = found.whole.get("lm_head.weight")
    if table is None and head is None:
        return found
    if table is None or head is None or not mx.array_equal(head, found.whole[table]).item():
        only = "lm_head" if table is None else "the embedding"
        reason = f"it brings {only} alone" if table is None or head is None else "the two differ"
        raise PackError(
            f"{where}: {base.name} ties its head to the embedding, but {reason}; one "
            "table cannot be both."
        )
    del found.whole["lm_head.weight"]
    return found


def formulas(tensors: Tensors, config: dict, model_type: str) -> dict:
    """What PEFT adds at each module, by our path: scaling * B (A x), from its own tensors."""
    parts: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in tensors.items():
        if match := _PART.fullmatch(name.removeprefix(_PREFIX)):
            numbers = np.array(tensor.astype(mx.float32), dtype=np.float64)
            parts.setdefault(match["path"], {})[match["part"]] = numbers

    def formula(path: str, p: dict[str, np.ndarray]):
        if "lora_embedding_A" in p:
            a, b = p["lora_embedding_A"], p["lora_embedding_B"]
            scale = scale_in(config, path, a.shape[0])
            return lambda ids: scale * (a.T[ids] @ b.T)
        a, b = p["lora_A"], p["lora_B"]
        scale = scale_in(config, path, a.shape[0])
        return lambda x: scale * ((x @ a.T) @ b.T)

    return {path_here(path, model_type): formula(path, p) for path, p in parts.items()}


def write(pack: Pack) -> tuple[Tensors, dict, list[str]]:
    """PEFT's tensors and config of a pack, and what its reader should know.

    Raises: PackError naming what PEFT has no place for.
    """
    model_type, specs = pack.manifest["base"]["model_type"], pack.specs
    if not specs:
        raise PackError(
            f"{pack.name}: is of a full fine-tuning, and PEFT holds adapters; merge it instead."
        )
    _check_specs(pack, model_type, specs)
    ours, tensors = pack.load_tensors(), {}
    for path, spec in specs.items():
        name = _PREFIX + path_there(path, model_type)
        a = ours[f"{path}.lora_a"]
        b = folded(spec, ours[f"{path}.lora_b"], scale_of(spec))
        embedding = spec.kind == "embedding"
        for part, tensor in (("A", a), ("B", b)):
            key = f"lora_embedding_{part}" if embedding else f"lora_{part}.weight"
            tensors[f"{name}.{key}"] = mx.contiguous(tensor.T)
        if spec.kind == "dora":
            tensors[f"{name}.lora_magnitude_vector"] = ours[f"{path}.m"]
    config, whole = _config(pack, model_type, specs), []
    for name in replaced_of(pack.manifest):
        path, _, parameter = name.rpartition(".")
        there, tensor = path_there(path, model_type), _turned(name, ours[name], model_type)
        if path in specs:  # an embedding that has an adapter as well
            tensors[f"{_PREFIX}{there}.base_layer.{parameter}"] = tensor
        else:
            tensors[f"{_PREFIX}{there}.{parameter}"] = tensor
            whole.append(there)
    config["modules_to_save"] = sorted(set(whole)) or None
    return tensors, dict(sorted(config.items())), _notes(specs, config, whole)


def _check_specs(pack: Pack, model_type: str, specs: Specs) -> None:
    where = pack.path or "this pack"
    if model_type not in _SAME_NAMES:
        raise PackError(
            f"{where}: what transformers calls the modules of {model_type} is not known"
            f" here; PEFT export knows {', '.join(_SAME_NAMES)}."
        )
    for path, spec in specs.items():
        if spec.experts is not None:
            raise PackError(
                f"{where}: {path}: adapts the experts of a mixture, which transformers keeps as one"
                " parameter of another layout and PEFT adapts by target_parameters; export it to "
                "mlx-lm, or merge it."
            )
        if chooses(path):
            raise PackError(
                f"{where}: {path}: adapts a router, no linear in transformers; "
                "export it to mlx-lm, or merge it."
            )
        if spec.head:
            raise PackError(
                f"{where}: {path}: this adapter acts on the tied head too, and PEFT's on the input "
                "alone; merge it instead."
            )
    if len({spec.kind == "dora" for spec in specs.values()}) > 1:
        raise PackError(
            f"{where}: is DoRA on some modules and LoRA on others; PEFT has one use_dora for all."
        )


def _config(pack: Pack, model_type: str, specs: Specs) -> dict:
    """adapter_config.json; the commonest rank and alpha are said once, the others by pattern."""
    ranks = {path: spec.rank for path, spec in specs.items()}
    alphas = {path: _number(scale_of(spec) * spec.rank) for path, spec in specs.items()}
    rank, alpha = _commonest(ranks), _commonest(alphas)
    targets, layers = _targets(pack, model_type, specs)

    def pattern(found: dict, common) -> dict:
        return {
            "^" + re.escape(path_there(path, model_type)): value
            for path, value in found.items()
            if value != common
        }

    return {
        "peft_type": "LORA",
        "task_type": "FEATURE_EXTRACTION" if model_type in ENCODERS else "CAUSAL_LM",
        "base_model_name_or_path": pack.manifest["base"]["id"],
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": model_type == "gpt2",
        "use_rslora": False,
        "use_dora": any(spec.kind == "dora" for spec in specs.values()),
        "rank_pattern": pattern(ranks, rank),
        "alpha_pattern": pattern(alphas, alpha),
        "layers_to_transform": layers,
        "layers_pattern": None if layers is None else ("h" if model_type == "gpt2" else "layers"),
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _targets(pack: Pack, model_type: str, specs: Specs) -> tuple[list[str], list[int] | None]:
    """target_modules and layers_to_transform: short where all layers, or the last N, are alike."""
    full = [path_there(path, model_type) for path in specs]
    split = [re.fullmatch(r"(.+)\.(?:layers|h)\.(\d+)\.(.+)", path) for path in full]
    if not all(split):
        return sorted(full), None
    rests: dict[str, set[int]] = {}
    for match in split:
        rests.setdefault(match[3], set()).add(int(match[2]))
    count = pack.manifest["base"]["num_layers"]
    layers = set.union(*rests.values())
    last = set(range(count - len(layers), count))
    if layers != last or any(found != layers for found in rests.values()):
        return sorted(full), None
    short = {rest.rpartition(".")[2] for rest in rests}
    names = short if short <= set(_LEAVES) else rests
    return sorted(names), None if len(layers) == count else sorted(layers)


def _commonest(found: dict[str, float]) -> float:
    values = list(found.values())
    return max(dict.fromkeys(values), key=values.count)


def _number(value: float) -> float | int:
    return int(value) if value == int(value) else value


def _notes(specs: Specs, config: dict, whole: list[str]) -> list[str]:
    """What other readers of the folder cannot take."""
    notes = []
    if config["alpha_pattern"]:
        notes.append("llama.cpp's converter knows one lora_alpha, and this folder has several")
    kinds = {spec.kind for spec in specs.values()} - {"lora"}
    if kinds or whole:
        names = [*sorted(kinds), *(["modules_to_save"] if whole else [])]
        notes.append(f"llama.cpp's converter does not read {', '.join(names)}")
    return notes
