"""Recipes of other tools, as our keys with the meaning unchanged.

The tools are mlx-lm (``lora_config.yaml`` and flags) and QLoRA projects (``bnb_4bit`` and ``lora``
in YAML). What would mean something else here is an error.
"""

from collections.abc import Mapping
from typing import Any

from ..errors import PackError
from .choices import METHODS, OPTIMIZERS
from .fields import unknown_setting
from .optimizer import OptimizerConfig, with_arguments
from .other_names import DTYPES, value_for, value_hint
from .values import bytes_of, setting_error, typed_value

# Our settings by the keys of others: of mlx-lm, and of QLoRA projects.
_LORA_PARAMETERS = {
    **{name: name for name in ("rank", "scale", "dropout", "alpha")},
    "keys": "target_modules",
}
_LORA = {"r": "rank", **{name: name for name in ("alpha", "dropout", "target_modules")}}
# Keys that a recipe has only in mlx-lm's form; so is a schedule that is a mapping.
_FORM = (
    "adapter_path fine_tune_type lora_parameters mask_prompt optimizer_config test train".split()
)


def with_its_optimizer(values: dict) -> dict:
    """Return a recipe that trains without bias correction, as in mlx-lm, if it has mlx-lm's form.

    What the recipe says about it itself is kept.
    """
    optimizer = OPTIMIZERS.get(str(values.get("optimizer", OptimizerConfig.optimizer)))
    is_theirs = isinstance(values.get("lr_schedule"), Mapping) or set(_FORM) & set(values)
    if optimizer is None or not (is_theirs and optimizer.corrects_bias):
        return values
    return {"bias_correction": False, **with_arguments(values)}


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
_BNB_4BIT = ("quant_type", "compute_dtype", "use_double_quant", "quant_storage")


def translate(values: dict, where: str) -> dict:
    """Return a recipe file's ``values`` with the keys of other tools replaced by ours; others stay.

    Raises:
        PackError: naming the file, the key, and what to write instead.
    """
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


def _renamed(part: Mapping, names: Mapping[str, str], where: str, parent: str) -> dict:
    """Return the values of a part of a file by our names."""
    for key in part:
        if key not in names:
            raise unknown_setting(key, names, where, parent)
    return {names[key]: value for key, value in part.items()}


def _bnb_4bit(part: Mapping, where: str) -> dict:
    """Settings of ``{quant_type, compute_dtype, use_double_quant}``, by transformers' defaults."""
    values = _renamed(part, {key: key for key in _BNB_4BIT}, where, "bnb_4bit.")
    kind = values.get("quant_type", "fp4")
    if kind != "nf4":
        raise _unsupported(where, "bnb_4bit.quant_type", kind, "Only nf4 is.")

    stated = values.get("compute_dtype", "float32")
    name = str(stated).removeprefix("torch.")
    dtype = value_for("compute_dtype", name) or name
    if dtype not in DTYPES:
        instead = f"Write one of {', '.join(DTYPES)}."
        raise _unsupported(where, "bnb_4bit.compute_dtype", stated, instead)

    return {
        "quantize": "nf4",
        "double_quant": values.get("use_double_quant", False),
        "compute_dtype": dtype,
        "keep": _DENSE_IN_TRANSFORMERS,
    }


def _lora(part: Mapping, where: str) -> dict:
    if (bias := part.get("bias") or "none") != "none":
        raise _unsupported(where, "bias", bias, "Biases are not trained. Write none.")
    read = {key: value for key, value in part.items() if key not in ("bias", "task_type")}
    return _renamed(read, _LORA, where, "lora.")


def _unsupported(where: str, key: str, value: Any, instead: str) -> PackError:
    return setting_error(f"{value!r} is not supported. {instead}", key, where, "unsupported")
