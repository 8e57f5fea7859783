"""Features of images on disk, each in a file of its own: computed once, read by every epoch."""

import hashlib
import json
import os
import tempfile
from collections import OrderedDict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from .. import runtime
from ..bases.fingerprint import fingerprint
from ..files import cache_folder, remove_unused, replace_file
from ..leftovers import temporary
from ..runtime import mx
from ..tensors import save_tensors
from .tower import Features

_DAYS = 30  # after which an unused file is removed
_IN_MEMORY = 512 << 20  # bytes of features that were read last
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


class FeatureStore:
    """Features by the key of their image.

    Args:
        base: all that features depend on besides the image: facts of the tower.
    """

    def __init__(self, base: dict[str, Any]) -> None:
        name = hashlib.sha256(json.dumps(base, sort_keys=True).encode()).hexdigest()[:32]
        folder = cache_folder("images")
        self._temporary: tempfile.TemporaryDirectory | None = None
        if folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="mlx_packs-images-")
            folder = Path(self._temporary.name)
        self.folder = folder / name
        self._last: OrderedDict[str, Features] = OrderedDict()
        self._last_bytes = 0

    def get(self, key: str) -> Features | None:
        """Return the features of an image; None if they are not stored, or damaged."""
        if key in self._last:
            self._last.move_to_end(key)
            return self._last[key]

        file = self._file(key)
        try:
            arrays, facts = mx.load(str(file), return_metadata=True)
            features = _features_of(arrays, facts)
            os.utime(file)
        except (OSError, RuntimeError, KeyError, ValueError):
            return None

        self._keep(key, features)
        return features

    def put(self, key: str, features: Features) -> None:
        arrays = {"rows": features.rows}
        if features.levels is not None:
            arrays["levels"] = features.levels
        if features.shifts is not None:
            arrays["shifts"] = mx.array(features.shifts)

        facts = {"text": features.text, "patches": json.dumps(features.patches)}
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # images may be private
        file = self._file(key)
        with temporary(file, Path.touch, suffix=file.suffix) as partial:
            save_tensors(partial, arrays, facts)
            replace_file(partial, file)
        self._keep(key, features)

    def sweep(self) -> None:
        """Remove what no run has used for a month."""
        if self.folder.is_dir():
            remove_unused(self.folder, "*.safetensors", _DAYS)

    def _file(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    def _keep(self, key: str, features: Features) -> None:
        self._last[key] = features
        self._last_bytes += features.nbytes
        while self._last_bytes > _IN_MEMORY:
            _, oldest = self._last.popitem(last=False)
            self._last_bytes -= oldest.nbytes


def tower_facts(path: Path, max_pixels: int) -> dict[str, Any]:
    """Return all that features depend on besides the image."""
    files = {}
    for name in _PROCESSOR_FILES:
        if (path / name).is_file():
            files[name] = hashlib.sha256((path / name).read_bytes()).hexdigest()

    dtype = "as stored"
    if runtime.on_cpu():
        dtype = "float32"
    return {
        "base": fingerprint(path),
        "processor": files,
        "dtype": dtype,
        "max_pixels": max_pixels,
        "versions": [version(name) for name in ("mlx-vlm", "transformers", "pillow")],
    }


def _features_of(arrays: dict[str, mx.array], facts: dict[str, str]) -> Features:
    shifts = arrays.get("shifts")
    patches = json.loads(facts["patches"])
    return Features(
        text=facts["text"],
        rows=arrays["rows"],
        patches=patches and tuple(patches),
        levels=arrays.get("levels"),
        shifts=None if shifts is None else np.array(shifts),
    )
