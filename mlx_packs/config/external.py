"""Recipes in the layouts of other tools, as our keys with the meaning unchanged.

Known are the layout of QLoRA projects (``bnb_4bit`` and ``lora`` in YAML), PEFT's ``LoraConfig``
and transformers' ``BitsAndBytesConfig`` as JSON. What would mean something else here is refused.
"""

import math
from collections.abc import Mapping

from ..errors import PackError, did_you_mean

# transformers quantizes linears alone, and not the head
_KEPT_BY_TRANSFORMERS = ("lm_head", "embed_tokens")
# PEFT writes these into every file; they say nothing by themselves
_PEFT_NOISE = {"megatron_core": "megatron.core", "qalora_group_size": 16}
_NO_DEFAULT = object()


def translate(values: dict, where: str) -> dict:
    """``values`` of a recipe file with foreign parts spelled as ours; other keys stay.

    Raises: PackError naming the file, the key, and what to write instead.
    """
    if "peft_type" in values:
        return _peft(values, where)
    kinds = ("load_in_4bit", "load_in_8bit")
    if any(k in values for k in kinds) or values.get("quant_method") == "bitsandbytes":
        return _bits_and_bytes(values, where, "")
    ours = dict(values)
    for key, read in (("bnb_4bit", _bnb_4bit), ("lora", _lora)):
        if key in ours:
            part = ours.pop(key)
            if not isinstance(part, Mapping):
                raise PackError(f"{where}: {key} must be a mapping, but got {part!r}.")
            for name, value in read(part, where).items():
                if name in ours:
                    raise PackError(f"{where}: '{name}' is said twice, by itself and in '{key}'.")
                ours[name] = value
    return ours


def _bnb_4bit(part: Mapping, where: str) -> dict:
    """``{quant_type, compute_dtype, use_double_quant}``; ``quant_storage`` changes no value."""
    known = ("quant_type", "compute_dtype", "use_double_quant", "quant_storage")
    _only(part, known, where, "bnb_4bit.")
    named = {f"bnb_4bit_{key}": value for key, value in part.items()}
    return _bits_and_bytes({"load_in_4bit": True, **named}, where, "bnb_4bit: ")


def _bits_and_bytes(values: Mapping, where: str, at: str) -> dict:
    """The fields of transformers' BitsAndBytesConfig; its defaults are fp4, float32, single."""
    known = {
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": _NO_DEFAULT,
        "bnb_4bit_compute_dtype": _NO_DEFAULT,
        "bnb_4bit_use_double_quant": _NO_DEFAULT,
        "bnb_4bit_quant_storage": _NO_DEFAULT,
        "quant_method": "bitsandbytes",
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_threshold": _NO_DEFAULT,
        "llm_int8_skip_modules": _NO_DEFAULT,
        "_load_in_4bit": True,
        "_load_in_8bit": False,
    }
    _only(values, tuple(known), where, at)
    for key, wanted in known.items():
        if wanted is not _NO_DEFAULT and values.get(key, wanted) != wanted:
            works = " For 8 bits write quantize: affine8." if key == "load_in_8bit" else ""
            raise PackError(
                f"{where}: {at}{key} {values[key]} is not done here, only {wanted}.{works}"
            )
    kind = values.get("bnb_4bit_quant_type", "fp4")
    if kind != "nf4":
        raise PackError(f"{where}: {at}quant_type '{kind}' is not done here; write nf4.")
    skipped = values.get("llm_int8_skip_modules")
    return {
        "quantize": "nf4",
        "double_quant": values.get("bnb_4bit_use_double_quant", False),
        "compute_dtype": _dtype(values.get("bnb_4bit_compute_dtype", "float32"), where, at),
        "keep": tuple(dict.fromkeys([*_KEPT_BY_TRANSFORMERS, *(skipped or ())])),
    }


def _dtype(value, where: str, at: str) -> str:
    name = str(value).removeprefix("torch.")
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    name = names.get(name, name)
    if name not in names.values():
        raise PackError(
            f"{where}: {at}compute_dtype '{value}' must be bfloat16, float16 or float32."
        )
    return name


def _lora(part: Mapping, where: str) -> dict:
    """``{r, alpha, dropout, target_modules}``."""
    known = {
        "r": "rank",
        "alpha": "alpha",
        "dropout": "dropout",
        "target_modules": "target_modules",
    }
    known |= {"bias": None, "task_type": None}
    _only(part, tuple(known), where, "lora.")
    if part.get("bias", "none") != "none":
        raise PackError(f"{where}: lora.bias '{part['bias']}': biases are not trained; write none.")
    return {ours: part[key] for key, ours in known.items() if ours and key in part}


def _peft(values: Mapping, where: str) -> dict:
    """PEFT's LoraConfig. Keys that hold their default say nothing; others must be known."""
    taken = {
        "r": "rank",
        "lora_dropout": "dropout",
        "rank_pattern": "rank_pattern",
        "base_model_name_or_path": "model",
    }
    silent = (
        "peft_type task_type inference_mode auto_mapping revision fan_in_fan_out peft_version "
        "peft_config lora_alpha alpha_pattern target_modules use_rslora bias init_lora_weights"
    ).split()
    if values["peft_type"] != "LORA":
        raise PackError(
            f"{where}: peft_type '{values['peft_type']}' is not trained here, only LORA."
        )
    for key, value in values.items():
        empty = value in (None, False, [], {}, 0, "") or _PEFT_NOISE.get(key) == value
        if key not in taken and key not in silent and not empty:
            raise PackError(f"{where}: {key} = {value!r} has no counterpart here; take it out.")
    if (bias := values.get("bias") or "none") != "none":
        raise PackError(f"{where}: bias '{bias}': biases are not trained; write none.")
    if values.get("init_lora_weights", True) is not True:
        raise PackError(
            f"{where}: init_lora_weights {values['init_lora_weights']!r}: A is uniform "
            "and B zero here; write true."
        )
    ours = {name: values[key] for key, name in taken.items() if values.get(key)}
    rank = values.get("r") or 8
    ours["rank"] = rank
    patterns = values.get("rank_pattern") or {}
    alpha = values.get("lora_alpha") or 8
    alphas = dict(values.get("alpha_pattern") or {})
    if values.get("use_rslora"):  # scale = alpha / sqrt(r), ours is alpha / r
        for key in patterns:
            alphas.setdefault(key, alpha)
        alphas = {k: a * math.sqrt(patterns.get(k, rank)) for k, a in alphas.items()}
        alpha = alpha * math.sqrt(rank)
    ours |= {"alpha": float(alpha)} | ({"alpha_pattern": alphas} if alphas else {})
    targets = values.get("target_modules")
    if not targets:
        raise PackError(
            f"{where}: target_modules is empty; PEFT would choose by architecture. "
            "List the modules' names, or write all-linear."
        )
    if isinstance(targets, str) and targets != "all-linear":
        raise PackError(
            f"{where}: target_modules '{targets}' is a pattern; list the modules' names."
        )
    if targets != "all-linear":
        ours["target_modules"] = list(targets)
    return ours


def _only(values: Mapping, known: tuple[str, ...], where: str, at: str) -> None:
    for key in values:
        if key not in known:
            raise PackError(f"{where}: unknown key '{at}{key}'. {did_you_mean(str(key), known)}")
