"""PEFT's folders: ``adapter_config.json`` and ``adapter_model.safetensors``, read and written.

PEFT keeps A as [r, in] and B as [out, r] under the names that transformers has for modules; the
scale is alpha / r of each module, or alpha / sqrt(r) with rsLoRA. Anything that changes the model
in a way that a pack cannot store is rejected by name.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

from mlx.utils import tree_flatten

from ..adapters.attach import match_pattern
from ..adapters.spec import SCORE_WEIGHT, Specs, leaf_names
from ..bases.families import VISION_FAMILIES, path_from, path_in
from ..bases.geometry import is_router
from ..bases.model import BaseModel
from ..bases.readers import is_local_model
from ..config.choices import ARCHITECTURES, architecture_of
from ..data.labels import ORDINAL, Classes
from ..packs.manifest import has_score_head, head_tables_of, replaced_of
from ..packs.pack import Pack
from ..runtime import mx
from .external import (
    SIDECAR,
    Delta,
    ExternalAdapter,
    StoredAdapter,
    Tensors,
    check_complete,
    common_scale,
    folded,
    is_positive,
    low_rank_delta,
    unreadable,
    unsupported,
)

_PREFIX = "base_model.model."
# Options of a config that are no low-rank product on a weight, and why they are not supported.
_UNSUPPORTED = {
    "trainable_token_indices": "trains single rows of the embedding",
    "layer_replication": "builds a model of repeated layers",
    "target_parameters": "adapts parameters of no linear (stacked experts), in another layout",
    "alora_invocation_tokens": "is switched on by tokens of the prompt (aLoRA)",
    "use_qalora": "pools its input (QALoRA)",
    "use_bdlora": "has block-diagonal factors (BD-LoRA)",
    "arrow_config": "routes between adapters",
    "megatron_config": "is split over devices by Megatron",
    "lora_bias": "trains a bias in addition to B",
    "ensure_weight_tying": "changes one table that is both embedding and head",
}
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Families whose modules mlx-lm calls as transformers does; of GPT-2 the one difference is known.
_SAME_NAMES = (
    "bert modernbert cohere gemma gemma2 gemma3_text glm4 gpt2 granite helium llama mistral "
    "mixtral olmo2 olmoe phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe smollm3 stablelm starcoder2"
).split()
_LEAVES = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
_PART = re.compile(
    r"(?P<path>.+)\.lora_(embedding_)?(?P<part>A|B|magnitude_vector)(\.default)?(\.weight)?"
)


def path_here(theirs: str, model_type: str) -> str:
    """Return a module's path in mlx-lm, or in `bases.encoder`."""
    prefix = ARCHITECTURES[architecture_of(model_type)].prefix
    return path_from(theirs.removeprefix(prefix), model_type, "transformers")


def path_there(ours: str, model_type: str) -> str:
    """Return a module's path in transformers."""
    return path_in(ours, model_type, "transformers")


class Peft:
    tensor_file = "adapter_model.safetensors"
    convention = "pt"

    def recognises(self, config: dict) -> bool:
        return "peft_type" in config

    def check_config(self, config: dict, where: Path) -> None:
        kind = config.get("peft_type")
        if kind != "LORA":
            raise unsupported(
                where,
                f"peft_type is {kind!r}, whose tensors are no low-rank factors of a "
                "weight. Only LORA (with rsLoRA and DoRA) can be converted.",
            )

        for key, reason in _UNSUPPORTED.items():
            if config.get(key):
                raise unsupported(where, f"{key}: the adapter {reason}. A pack cannot store that.")

        if config.get("bias", "none") != "none":
            raise unsupported(
                where,
                f"bias is {config['bias']!r}: the adapter trains biases of the "
                "base. A pack cannot store that.",
            )

        start = config.get("init_lora_weights")
        if isinstance(start, str) and start.startswith(_CHANGED_BASE):
            raise unsupported(
                where,
                f"init_lora_weights is {start!r}: the adapter belongs to weights that PEFT changed "
                "when it started. Save it with path_initial_model_for_weight_conversion.",
            )

        for key in ("lora_alpha", "r"):
            value = config.get(key)
            if not is_positive(value):
                raise unreadable(where, f"{key} must be a number above 0, but is {value!r}.")
        for key in ("rank_pattern", "alpha_pattern"):
            _check_pattern(config.get(key) or {}, key, where)

    def read(self, stored: StoredAdapter, model_type: str) -> ExternalAdapter:
        where = stored.file
        adapter = ExternalAdapter(head=False)
        for name, tensor in stored.tensors.items():
            bare = name.removeprefix(_PREFIX)
            if match := _PART.fullmatch(bare):
                _read_part(adapter, stored, name, match, model_type)
            elif re.search(r"\.(lora|ia3|hada|lokr|oft|boft|vera|token_adapter|trainable)_?", bare):
                raise unsupported(
                    where,
                    f"{name}: is of a kind that cannot be converted. A LORA "
                    "adapter has lora_A and lora_B.",
                )
            else:
                bare = re.sub(r"\.(modules_to_save(\.default)?|base_layer)\.", ".", bare)
                path = path_here(bare, model_type)
                adapter.full_tensors[path] = _transposed(bare, tensor, model_type)

        check_complete(adapter, bool(stored.config.get("use_dora")), where)
        return adapter

    def drop_copies(self, adapter: ExternalAdapter, base: BaseModel, where: Path) -> None:
        """Drop full tensors that are the base's own: PEFT saves embeddings that it left alone."""
        parameters = dict(tree_flatten(base.model.parameters()))
        is_tied = "lm_head.weight" not in parameters
        for name, tensor in list(adapter.full_tensors.items()):
            is_head = name == "lm_head.weight"
            ours = parameters.get(_table_of(parameters) if is_tied and is_head else name)
            if ours is not None and ours.shape == tensor.shape and ours.dtype == tensor.dtype:
                if mx.array_equal(ours, tensor).item():
                    del adapter.full_tensors[name]

        table = _table_of(adapter.full_tensors)
        if is_tied and (table or "lm_head.weight" in adapter.full_tensors):
            raise unsupported(
                where,
                f"{base.name} ties its head to the embedding, and the adapter stores "
                f"{table or 'lm_head.weight'} in full. That cannot be converted.",
            )

    def convert(self, pack: Pack, file: Path) -> StoredAdapter:
        model_type = pack.manifest["base"]["model_type"]
        specs = pack.specs
        if not specs:
            raise unsupported(
                pack.name, "is of a full fine-tuning, and PEFT stores adapters. Merge it instead."
            )
        _check_specs(pack, model_type, specs)

        ours = pack.load_tensors()
        tensors: Tensors = {}
        for path, spec in specs.items():
            name = _PREFIX + path_there(path, model_type)
            name_a = f"{name}.lora_A.weight"
            name_b = f"{name}.lora_B.weight"
            if spec.kind == "embedding":
                name_a = f"{name}.lora_embedding_A"
                name_b = f"{name}.lora_embedding_B"

            b = folded(spec, ours[f"{path}.lora_b"], common_scale([spec]))
            tensors[name_a] = mx.contiguous(ours[f"{path}.lora_a"].T)
            tensors[name_b] = mx.contiguous(b.T)
            if spec.kind == "dora":
                tensors[f"{name}.lora_magnitude_vector"] = ours[f"{path}.m"]

        config = _config(pack, model_type, specs)
        full_modules = set()
        for name in replaced_of(pack.manifest):
            tensor = _transposed(name, ours[name], model_type)
            path, _, parameter = name.rpartition(".")
            there = path_there(path, model_type)
            if path in specs:  # an embedding that has an adapter as well
                there += ".base_layer"
            else:
                full_modules.add(there)
            tensors[f"{_PREFIX}{there}.{parameter}"] = tensor

        config["modules_to_save"] = sorted(full_modules) or None
        notes = _head_notes(pack)
        base = pack.manifest["base"]["id"]
        if base.lower().endswith(".gguf") or is_local_model(base):
            notes = (*notes, "transformers opens the base by gguf_file, dequantized")
        return StoredAdapter(tensors, dict(sorted(config.items())), file, notes)

    def deltas(self, stored: StoredAdapter, model_type: str) -> dict[str, Delta]:
        """Return scaling * B (A x) of each module."""
        factors: dict[str, dict[str, mx.array]] = {}
        for name, tensor in stored.tensors.items():
            if match := _PART.fullmatch(name.removeprefix(_PREFIX)):
                factors.setdefault(match["path"], {})[match["part"]] = tensor

        deltas = {}
        for path, parts in factors.items():
            a = parts["A"]
            b = parts["B"]
            scale = _scale_in(stored.config, path, a.shape[0])
            deltas[path_here(path, model_type)] = low_rank_delta(a.T, b.T, scale)

        return deltas


def _check_pattern(pattern: object, key: str, where: Path) -> None:
    """Raise a PackError unless a pattern maps regular expressions to positive numbers."""
    if not isinstance(pattern, dict):
        raise unreadable(where, f"{key} must be a mapping, but is {pattern!r}.")

    for expression, value in pattern.items():
        try:
            re.compile(expression)
        except (re.error, RecursionError, OverflowError) as error:
            raise unreadable(
                where, f"{key}: {expression!r} is not a regular expression: {error}."
            ) from None

        if not is_positive(value):
            raise unreadable(
                where, f"{key}: {expression!r} must be a number above 0, but is {value!r}."
            )


def _scale_in(config: dict, theirs: str, rank: int) -> float:
    patterns = config.get("alpha_pattern") or {}
    key = match_pattern(patterns, theirs)
    alpha = patterns[key] if key is not None else config["lora_alpha"]
    if config.get("use_rslora"):
        return alpha / math.sqrt(rank)
    return alpha / rank


def _read_part(
    adapter: ExternalAdapter, stored: StoredAdapter, name: str, match: re.Match, model_type: str
) -> None:
    tensor = stored.tensors[name]
    path = path_here(match["path"], model_type)
    part = match["part"]
    if ".experts." in f"{path}.":
        raise unsupported(
            stored.file,
            f"{name}: adapts one expert, and mlx-lm stacks the experts of a layer. "
            "Expert adapters of PEFT cannot be converted.",
        )

    if part == "magnitude_vector":
        adapter.tensors[f"{path}.m"] = tensor.flatten()
        return

    if tensor.ndim != 2:
        raise unsupported(
            stored.file, f"{name} has {tensor.ndim} axes, but must have 2 (an adapter of a linear)."
        )

    if part == "A":
        adapter.tensors[f"{path}.lora_a"] = mx.contiguous(tensor.T)
        adapter.scales[path] = _scale_in(stored.config, match["path"], tensor.shape[0])
    else:
        adapter.tensors[f"{path}.lora_b"] = mx.contiguous(tensor.T)


def _table_of(names: Collection[str]) -> str | None:
    return next((n for n in names if n.endswith(("embed_tokens.weight", "wte.weight"))), None)


def _transposed(name: str, tensor: mx.array, model_type: str) -> mx.array:
    """Transpose a weight of GPT-2's Conv1D, which transformers stores as [in, out]."""
    is_conv = model_type == "gpt2" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name)
    if is_conv and tensor.ndim == 2:
        return mx.contiguous(tensor.T)
    return tensor


def _check_specs(pack: Pack, model_type: str, specs: Specs) -> None:
    """Raise a PackError for what PEFT has no place for."""
    if model_type not in (*_SAME_NAMES, *VISION_FAMILIES):
        raise unsupported(
            pack.name,
            f"transformers' names of the modules of {model_type} are not known. PEFT export "
            f"knows {', '.join((*_SAME_NAMES, *VISION_FAMILIES))}.",
        )

    if head_tables_of(pack.manifest) or any(spec.head for spec in specs.values()):
        raise unsupported(
            pack.name,
            "changes an embedding that is also the head, and PEFT's adapters act on the input "
            "only. Merge it, or train it without embed_tokens.",
        )

    for path, spec in specs.items():
        if spec.experts is not None:
            raise unsupported(
                pack.name,
                f"{path}: adapts the experts of a mixture, which transformers keeps as one "
                "parameter of another layout and PEFT adapts by target_parameters. Export it to "
                "mlx-lm, or merge it.",
            )
        if is_router(path):
            raise unsupported(
                pack.name,
                f"{path}: adapts a router, which is not a linear in transformers. Export it to "
                "mlx-lm, or merge it.",
            )


def _config(pack: Pack, model_type: str, specs: Specs) -> dict:
    """Return adapter_config.json: the commonest rank and alpha, and patterns for the others."""
    ranks = {path: spec.rank for path, spec in specs.items()}
    alphas = {}
    for path, spec in specs.items():
        value = common_scale([spec]) * spec.rank
        alphas[path] = int(value) if value == int(value) else value
    rank = _commonest(ranks)
    alpha = _commonest(alphas)

    task = ARCHITECTURES[architecture_of(model_type)].peft_task
    if has_score_head(pack.manifest):
        task = "SEQ_CLS"

    def pattern(values: dict[str, float], common: float) -> dict[str, float]:
        return {
            "^" + re.escape(path_there(path, model_type)): value
            for path, value in values.items()
            if value != common
        }

    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": pack.manifest["base"]["id"],
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": _targets(pack, model_type, specs),
        "bias": "none",
        "fan_in_fan_out": model_type == "gpt2",
        "use_rslora": False,
        "use_dora": any(spec.kind == "dora" for spec in specs.values()),
        "rank_pattern": pattern(ranks, rank),
        "alpha_pattern": pattern(alphas, alpha),
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _targets(pack: Pack, model_type: str, specs: Specs) -> list[str]:
    """Return target_modules: the last names of projections if all layers have them, else paths."""
    names = leaf_names(specs)
    everywhere = len(specs) == len(names) * pack.manifest["base"]["num_layers"]
    # a tower has modules of the same names
    if everywhere and set(names) <= _LEAVES and model_type not in VISION_FAMILIES:
        return names
    return sorted(path_there(path, model_type) for path in specs)


def _commonest(values: Mapping[str, float]) -> float:
    return Counter(values.values()).most_common(1)[0][0]


def _head_notes(pack: Pack) -> tuple[str, ...]:
    """Return notes on the head of a pack that has one of its own, for transformers."""
    shape = replaced_of(pack.manifest).get(SCORE_WEIGHT)
    if shape is None:
        return ()

    opens = f"AutoModelForSequenceClassification with num_labels={shape[0]} opens it"
    classes = Classes.of(pack.manifest)
    if classes is None:
        return (f"{opens}; set pad_token_id",)

    notes = [f"{opens}; set problem_type={classes.problem!r} and pad_token_id"]
    if classes.problem == ORDINAL:
        notes = [f"{opens}; the sigmoid of output k is P(label above k, if it is not below)"]
    elif classes.labels:
        notes.append(f"{SIDECAR} has the names of the labels in the order of the outputs")
    if classes.temperature != 1:
        notes.append(f"PEFT does not divide logits by the temperature, {classes.temperature:.4g}")
    return tuple(notes)
