"""Features of images on disk, an entry for each: computed once, read by every epoch."""

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from .. import runtime
from ..bases.fingerprint import fingerprint
from ..cache import Cache, json_array, key_of
from ..errors import PackError
from ..runtime import dtype_name, mx
from .tower import Features

IMAGES = Cache("images", days=30, is_needed=True)
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def read_features(tower: dict[str, Any], key: str) -> Features | None:
    """Return the features of an image by `tower_facts`; None if not stored, or damaged."""
    arrays = IMAGES.get(key_of(tower, key))
    return arrays and _features_of(arrays)


def write_features(tower: dict[str, Any], key: str, features: Features) -> None:
    """Store the features of an image; a PackError if the disk is full."""
    if not IMAGES.put(key_of(tower, key), _arrays_of(features)):
        raise PackError(
            f"{IMAGES.path}: the features of images cannot be written. Make room, or set "
            "MLX_PACKS_CACHE to a folder on another disk.",
            "unwritable",
        )


def tower_facts(path: Path, max_pixels: int) -> dict[str, Any]:
    """Return all that features depend on besides the image; remove what was not used for long."""
    IMAGES.remove_unused()
    files = {}
    for name in _PROCESSOR_FILES:
        if (path / name).is_file():
            files[name] = hashlib.sha256((path / name).read_bytes()).hexdigest()

    dtype = "float32" if runtime.on_cpu() else "as stored"
    return {
        "base": fingerprint(path),
        "processor": files,
        "dtype": dtype,
        "max_pixels": max_pixels,
        "versions": [version(name) for name in ("mlx-vlm", "transformers", "pillow")],
    }


def _arrays_of(features: Features) -> dict[str, np.ndarray]:
    dtype = dtype_name(features.rows.dtype)
    facts = {"text": features.text, "dtype": dtype}
    arrays = {"facts": json_array(facts), "rows": _bytes_of(features.rows)}
    if features.levels is not None:
        arrays["levels"] = _bytes_of(features.levels)
    if features.shifts is not None:
        arrays["shifts"] = features.shifts
    return arrays


def _features_of(arrays: dict[str, np.ndarray]) -> Features:
    facts = json.loads(arrays["facts"].tobytes())
    dtype = getattr(mx, facts["dtype"])
    levels = arrays.get("levels")
    shifts = arrays.get("shifts")
    return Features(
        text=facts["text"],
        rows=mx.array(arrays["rows"]).view(dtype),
        levels=None if levels is None else mx.array(levels).view(dtype),
        shifts=None if shifts is None else np.array(shifts),
    )


def _bytes_of(array: mx.array) -> np.ndarray:
    """Return an array as bytes, since NumPy has no bfloat16."""
    return np.array(array.view(mx.uint8))
