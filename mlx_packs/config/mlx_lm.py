"""Keys of mlx-lm's ``lora_config.yaml`` and flags, translated to ours with the same meaning."""

from collections.abc import Mapping

from .choices import METHODS
from .optimizer import uncorrected
from .parse import setting_error, typed_value, unknown_setting
from .sizes import bytes_of

_LORA_PARAMETERS = {  # ours by theirs; alpha is ours alone
    "rank": "rank",
    "scale": "scale",
    "dropout": "dropout",
    "alpha": "alpha",
    "keys": "target_modules",
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
    if isinstance(flat.get("cache_frozen"), bool):  # on and off, as YAML reads them
        flat["cache_frozen"] = "on" if flat["cache_frozen"] else "off"

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
        raise setting_error(text, "fine_tune_type", where, "unknown")
    _set_by(flat, "fine_tune_type", "method", kind, where)


def _take_lora_parameters(flat: dict, where: str) -> None:
    if "scale" in flat:
        text = "is not a setting. Write alpha (scale x rank)."
        raise setting_error(text, "scale", where, "unknown")

    nested = typed_value(flat.pop("lora_parameters", {}), dict, "lora_parameters", where)
    for key, value in nested.items():
        if key not in _LORA_PARAMETERS:
            raise unknown_setting(key, _LORA_PARAMETERS, where, "lora_parameters.")
        if value is not None and value != []:
            flat.setdefault(_LORA_PARAMETERS[key], value)

    for key, kind in (("scale", float), ("rank", int)):
        if key in flat:
            flat[key] = typed_value(flat[key], kind, key, where)

    if "scale" in flat and "alpha" in flat:
        if where:
            text = "is scale x rank. Give either alpha or lora_parameters.scale."
            raise setting_error(text, "alpha", where, "conflict")
        del flat["scale"]  # the nested form occurs in files only, and flags override them
