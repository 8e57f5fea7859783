"""Keys of mlx-lm's ``lora_config.yaml`` and flags, as ours with the meaning unchanged."""

import re
from collections.abc import Mapping

from ..errors import PackError, did_you_mean
from .choices import METHODS
from .parse import spelled_in, typed_value

_LORA_PARAMETERS = {  # ours by theirs; alpha is ours alone
    "rank": "rank",
    "scale": "scale",
    "dropout": "dropout",
    "alpha": "alpha",
    "keys": "target_modules",
}
_SIZES = {"": 1, "M": 10**6, "MB": 10**6, "G": 10**9, "GB": 10**9}  # as in mlx-lm


def from_mlx_lm(values: Mapping, where: str) -> dict:
    """``values`` with our keys in the place of mlx-lm's; other keys stay, and None is left out.

    ``scale`` stays, because alpha = scale x rank needs the rank that is valid in the end.

    Args:
        values: settings by name.
        where: the file that they stand in; empty for flags and Python.

    Raises:
        PackError: a value of mlx-lm has no counterpart here, or two keys contradict each other.
    """
    if "phases" in values and not values["phases"]:
        raise PackError(
            f"{where and where + ': '}phases: must have at least one phase. Leave it out for a run "
            "without phases.",
            "invalid",
            "phases",
        )
    flat = {str(key): value for key, value in values.items() if value is not None}
    _take_method(flat, where)
    _take_lora_parameters(flat, where)
    _take_mask_prompt(flat, where)
    if isinstance(flat.get("cache_frozen"), bool):  # on and off, as YAML reads them
        flat["cache_frozen"] = "on" if flat["cache_frozen"] else "off"
    flat.pop("config", None)
    if "adapter_path" in flat:
        flat.setdefault("out", flat.pop("adapter_path"))
    if isinstance(size := flat.get("clear_cache_threshold"), str):
        flat["clear_cache_threshold"] = _bytes(size, spelled_in(where, "clear_cache_threshold"))
    return flat


def _take_method(flat: dict, where: str) -> None:
    """``fine_tune_type`` as ``method``."""
    kind = flat.pop("fine_tune_type", None)
    spelled = spelled_in(where, "fine_tune_type")
    if kind not in (None, *METHODS):
        raise PackError(
            f"{spelled}: {kind} is not trained here, only {' and '.join(METHODS)}. Use "
            f"`mlx_lm.lora --fine-tune-type {kind}`.",
            "unsupported",
            "fine_tune_type",
        )
    if kind and flat.setdefault("method", kind) != kind:
        raise PackError(
            f"{spelled}: is {kind}, but the method is {flat['method']}. Give one of them.",
            "conflict",
            "fine_tune_type",
        )


def _take_lora_parameters(flat: dict, where: str) -> None:
    """The keys of ``lora_parameters`` as ours, and ``scale``."""
    if "scale" in flat:
        raise PackError(
            f"{where and where + ': '}scale: is not a setting. Write alpha (scale x rank).",
            "unknown",
            "scale",
        )
    nested = typed_value(
        flat.pop("lora_parameters", {}),
        dict,
        "lora_parameters",
        f"{where and where + ': '}lora_parameters",
    )
    for key, value in nested.items():
        if key not in _LORA_PARAMETERS:
            raise PackError(
                f"{where and where + ': '}lora_parameters.{key}: is not a setting. "
                f"{did_you_mean(str(key), list(_LORA_PARAMETERS))}",
                "unknown",
                "lora_parameters",
            )
        if value is not None and value != []:
            flat.setdefault(_LORA_PARAMETERS[key], value)
    for key, kind in (("scale", float), ("rank", int)):
        if key in flat:
            flat[key] = typed_value(flat[key], kind, key, spelled_in(where, key))
    if "scale" in flat and "alpha" in flat:
        if where:
            raise PackError(
                f"{where}: alpha: is scale x rank. Give either alpha or lora_parameters.scale.",
                "conflict",
                "alpha",
            )
        del flat["scale"]  # the nested form occurs in files only, and flags override them


def _take_mask_prompt(flat: dict, where: str) -> None:
    """``mask_prompt`` as ``loss_on``."""
    if "mask_prompt" not in flat:
        return
    spelled = spelled_in(where, "mask_prompt")
    masked = typed_value(flat.pop("mask_prompt"), bool, "mask_prompt", spelled)
    loss_on = "completion" if masked else "all"
    if flat.setdefault("loss_on", loss_on) != loss_on:
        raise PackError(
            f"{spelled}: means loss_on {loss_on}, but that is {flat['loss_on']}. Give one of them.",
            "conflict",
            "mask_prompt",
        )


def _bytes(size: str, spelled: str) -> int:
    number, unit = re.fullmatch(r"([\d.]*)\s*(.*)", size.strip(), re.DOTALL).groups()
    try:
        return int(float(number) * _SIZES[unit.upper()])
    except (ValueError, KeyError):
        raise PackError(
            f"{spelled}: must be a size such as 500M or 2GB, but is '{size}'.",
            "invalid",
            "clear_cache_threshold",
        ) from None
