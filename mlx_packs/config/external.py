"""Recipes of other tools, as our keys with the meaning unchanged.

The tools are mlx-lm (``lora_config.yaml`` and flags), QLoRA projects (``bnb_4bit`` and ``lora`` in
YAML), PEFT's ``LoraConfig`` and transformers' ``BitsAndBytesConfig`` as JSON. What would mean
something else here is an error.
"""

import typing
from collections.abc import Mapping
from typing import Any

from ..errors import PackError
from .choices import METHODS
from .fields import unknown_setting
from .lora import LoRAConfig
from .optimizer import uncorrected
from .other_names import DTYPES, value_for, value_hint
from .values import bytes_of, setting_error, typed_value

# Our settings by the keys of others: of mlx-lm, of QLoRA projects and of PEFT.
_LORA_PARAMETERS = {
    **{name: name for name in ("rank", "scale", "dropout", "alpha")},
    "keys": "target_modules",
}
_LORA = {"r": "rank", **{name: name for name in ("alpha", "dropout", "target_modules")}}
_PEFT = {
    "r": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "use_rslora": "rslora",
    "base_model_name_or_path": "model",
    **{name: name for name in ("rank_pattern", "alpha_pattern", "modules_to_save")},
}
# Keys that a recipe has only in mlx-lm's form; so is a schedule that is a mapping.
_FORM = (
    "adapter_path fine_tune_type lora_parameters mask_prompt optimizer_config test train".split()
)


def with_its_optimizer(values: dict) -> dict:
    """Return a recipe that trains without bias correction, as in mlx-lm, if it has mlx-lm's form.

    What the recipe says about it itself is kept.
    """
    is_mapping = isinstance(values.get("lr_schedule"), Mapping)
    if "bias_correction" in values or not (is_mapping or set(_FORM) & set(values)):
        return values
    return {**values, "optimizer_config": uncorrected(values.get("optimizer_config"))}


def from_mlx_lm(values: Mapping, where: str) -> dict:
    """Return ``values`` with our keys for mlx-lm's; other keys stay, and None is left out.

    ``scale`` stays, because alpha = scale x rank needs the rank that is valid in the end.

    Raises:
        PackError: a value of mlx-lm has no counterpart here, or two keys contradict each other.
    """
    if "phases" in values and not values["phases"]:
        text = "must have at least one phase. Leave it out for a run without phases."
        raise setting_error(text, "phases", where)

    flat = {str(key): value for key, value in values.items() if value is not None}
    _take_method(flat, where)
    _take_lora_parameters(flat, where)

    if "mask_prompt" in flat:
        masked = typed_value(flat.pop("mask_prompt"), bool, "mask_prompt", where)
        _set_by(flat, "mask_prompt", "loss_on", "completion" if masked else "all", where)
    for name in ("cache_frozen", "offload_base", "share_prefix"):
        if isinstance(flat.get(name), bool):  # on and off, as YAML reads them
            flat[name] = "on" if flat[name] else "off"

    flat.pop("config", None)
    if "adapter_path" in flat:
        flat.setdefault("out", flat.pop("adapter_path"))
    if isinstance(size := flat.get("clear_cache_threshold"), str):
        count = bytes_of(size)
        if count is None:
            text = f"must be a size such as 500M or 2GB, but is '{size}'."
            raise setting_error(text, "clear_cache_threshold", where)
        flat["clear_cache_threshold"] = count

    return flat


def _set_by(flat: dict, key: str, setting: str, value: str, where: str) -> None:
    """Apply a key of mlx-lm; the setting itself may have the same value, and no other."""
    if flat.setdefault(setting, value) != value:
        text = f"means {setting} {value}, but that is {flat[setting]}. Give one of them."
        raise setting_error(text, key, where, "conflict")


def _take_method(flat: dict, where: str) -> None:
    kind = typed_value(flat.pop("fine_tune_type", None), str | None, "fine_tune_type", where)
    if kind is None:
        return
    if kind not in METHODS:
        text = f"must be one of {', '.join(METHODS)}, but is {kind}."
        text += value_hint("method", kind)
        raise setting_error(text, "fine_tune_type", where, "unknown")
    _set_by(flat, "fine_tune_type", "method", kind, where)


def _take_lora_parameters(flat: dict, where: str) -> None:
    if "scale" in flat:
        text = "is not a setting. Write alpha (scale x rank)."
        raise setting_error(text, "scale", where, "unknown")

    nested = typed_value(flat.pop("lora_parameters", {}), dict, "lora_parameters", where)
    for name, value in _renamed(nested, _LORA_PARAMETERS, where, "lora_parameters.").items():
        if value is not None and value != []:
            flat.setdefault(name, value)

    for key, kind in (("scale", float), ("rank", int)):
        if key in flat:
            flat[key] = typed_value(flat[key], kind, key, where)

    if "scale" in flat and "alpha" in flat:
        if where:
            text = "is scale x rank. Give either alpha or lora_parameters.scale."
            raise setting_error(text, "alpha", where, "conflict")
        del flat["scale"]  # the nested form occurs in files only, and flags override them


# transformers quantizes linear layers only, and not the head
_DENSE_IN_TRANSFORMERS = ("lm_head", "embed_tokens")

_ANY = object()
_BITS_AND_BYTES = {  # BitsAndBytesConfig: the one value that is understood
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_compute_dtype": _ANY,
    "bnb_4bit_use_double_quant": _ANY,
    "bnb_4bit_quant_storage": _ANY,  # changes no value
    "quant_method": "bitsandbytes",
    "llm_int8_enable_fp32_cpu_offload": False,
    "llm_int8_has_fp16_weight": False,
    "llm_int8_threshold": _ANY,
    "llm_int8_skip_modules": _ANY,
    "_load_in_4bit": True,
    "_load_in_8bit": False,
}
_PEFT_METHODS = ("pissa", "olora", "loftq")  # of init_lora_weights, by the same names here
_PEFT_READ_APART = "peft_type target_modules use_dora bias init_lora_weights".split()
_PEFT_WITHOUT_EFFECT = (
    "task_type inference_mode auto_mapping revision fan_in_fan_out peft_version peft_config "
    "ensure_weight_tying"
).split()
# PEFT writes these into every file; without their feature they have no effect
_PEFT_DEFAULTS = {"megatron_core": "megatron.core", "qalora_group_size": 16}


def translate(values: dict, where: str) -> dict:
    """Return a recipe file's ``values`` with the keys of other tools replaced by ours; others stay.

    Raises:
        PackError: naming the file, the key, and what to write instead.
    """
    if "peft_type" in values:
        return _peft(values, where)

    kinds = ("load_in_4bit", "load_in_8bit")
    if any(k in values for k in kinds) or values.get("quant_method") == "bitsandbytes":
        return _bits_and_bytes(values, where)

    ours = dict(values)
    for key, read in (("bnb_4bit", _bnb_4bit), ("lora", _lora)):
        if key in ours:
            part = typed_value(ours.pop(key), dict, key, where)
            for name, value in read(part, where).items():
                if name in ours:
                    text = f"is specified twice, by itself and in '{key}'."
                    raise setting_error(text, name, where, "conflict")
                ours[name] = value

    return with_its_optimizer(ours)


def _bnb_4bit(part: Mapping, where: str) -> dict:
    """Settings of ``{quant_type, compute_dtype, use_double_quant}``."""
    keys = ("quant_type", "compute_dtype", "use_double_quant", "quant_storage")
    values = _renamed(part, {key: f"bnb_4bit_{key}" for key in keys}, where, "bnb_4bit.")
    return _bits_and_bytes({"load_in_4bit": True, **values}, where)


def _renamed(part: Mapping, names: Mapping[str, str], where: str, parent: str) -> dict:
    """Return the values of a part of a file by our names."""
    for key in part:
        if key not in names:
            raise unknown_setting(key, names, where, parent)
    return {names[key]: value for key, value in part.items()}


def _bits_and_bytes(values: Mapping, where: str) -> dict:
    """Settings of transformers' BitsAndBytesConfig; its defaults are fp4, float32, single."""
    kind = values.get("bnb_4bit_quant_type", "fp4")
    for key, value in {**values, "bnb_4bit_quant_type": kind}.items():
        if key not in _BITS_AND_BYTES:
            raise unknown_setting(key, _BITS_AND_BYTES, where)
        valid = _BITS_AND_BYTES[key]
        if valid is not _ANY and value != valid:
            hint = " For 8 bits write quantize: affine8." if key == "load_in_8bit" else ""
            raise _unsupported(where, key, value, f"Only {valid} is.{hint}")

    stated = values.get("bnb_4bit_compute_dtype", "float32")
    name = str(stated).removeprefix("torch.")
    dtype = value_for("compute_dtype", name) or name
    if dtype not in DTYPES:
        instead = f"Write one of {', '.join(DTYPES)}."
        raise _unsupported(where, "bnb_4bit_compute_dtype", stated, instead)

    skipped = values.get("llm_int8_skip_modules") or ()
    skipped = typed_value(skipped, tuple[str, ...], "llm_int8_skip_modules", where)
    return {
        "quantize": "nf4",
        "double_quant": values.get("bnb_4bit_use_double_quant", False),
        "compute_dtype": dtype,
        "keep": tuple(dict.fromkeys((*_DENSE_IN_TRANSFORMERS, *skipped))),
    }


def _lora(part: Mapping, where: str) -> dict:
    _check_bias(part, where)
    read = {key: value for key, value in part.items() if key not in ("bias", "task_type")}
    return _renamed(read, _LORA, where, "lora.")


def _peft(values: Mapping, where: str) -> dict:
    """Settings of PEFT's LoraConfig; a key at its default has no effect, others must be known."""
    if values["peft_type"] != "LORA":
        raise _unsupported(where, "peft_type", values["peft_type"], "Only LORA is.")
    for key, value in values.items():
        has_no_effect = value in (None, False, [], {}, 0, "") or _PEFT_DEFAULTS.get(key) == value
        if not has_no_effect and key not in (*_PEFT, *_PEFT_READ_APART, *_PEFT_WITHOUT_EFFECT):
            raise _unsupported(where, key, value, "Take it out.")

    _check_bias(values, where)
    kinds = typing.get_type_hints(LoRAConfig) | {"model": str}
    ours: dict[str, Any] = {"rank": 8, "alpha": 8}  # PEFT's defaults
    for key, name in _PEFT.items():
        if values.get(key):
            ours[name] = typed_value(values[key], kinds[name], key, where)
    return {**_peft_method(values, where), **ours, **_peft_targets(values, where)}


def _peft_method(values: Mapping, where: str) -> dict:
    """The method by the initialization or the magnitudes of adapters; nothing for plain LoRA."""
    begins = values.get("init_lora_weights", True)
    name = begins.partition("_niter_")[0] if isinstance(begins, str) else begins
    if name not in (True, *_PEFT_METHODS):
        known = ", ".join(_PEFT_METHODS)
        raise _unsupported(
            where, "init_lora_weights", begins, f"Write true (A uniform, B zero) or one of {known}."
        )

    if values.get("use_dora"):
        if name is not True:
            raise _unsupported(where, "init_lora_weights", begins, "With use_dora, write true.")
        return {"method": "dora"}
    if name is True:
        return {}
    return {"method": name}


def _peft_targets(values: Mapping, where: str) -> dict:
    targets = values.get("target_modules")
    if targets == "all-linear":
        return {}
    if not targets or isinstance(targets, str):
        problem = f"'{targets}' is a pattern" if targets else "is empty (PEFT has defaults)"
        text = f"{problem}. List the names of the modules, or write all-linear."
        raise setting_error(text, "target_modules", where, "unsupported")
    return {"target_modules": typed_value(targets, tuple[str, ...], "target_modules", where)}


def _check_bias(values: Mapping, where: str) -> None:
    if (bias := values.get("bias") or "none") != "none":
        raise _unsupported(where, "bias", bias, "Biases are not trained. Write none.")


def _unsupported(where: str, key: str, value: Any, instead: str) -> PackError:
    return setting_error(f"{value!r} is not supported. {instead}", key, where, "unsupported")
