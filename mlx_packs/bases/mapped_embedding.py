"""Rows of a frozen embedding, read from its mapped file; MLX's own loader reads whole tensors."""

from collections.abc import Mapping
from pathlib import Path

import mlx.nn as nn
import numpy as np

from ..nn.frozen_weight import FloatingEmbedding, frozen_weight
from ..reading import read_header
from ..runtime import mx
from .files import weight_files

# numpy has no bfloat16: its bits are read
_KINDS = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "U32": np.uint32,
    "U8": np.uint8,
}


class MappedEmbedding:
    """An embedding whose rows are read from its file when a batch has them.

    Semantics: mapped(tokens) is bit-identical to ``module(mx.array(tokens))``, whose own arrays are
    not read.
    """

    def __init__(self, parts: Mapping[str, tuple[np.ndarray, str]], module: nn.Module) -> None:
        self._parts = dict(parts)  # [V, .] by parameter, and dtypes as safetensors spells them
        self._dtypes = {name: module[name].dtype for name in parts}
        self._quantization = None
        if isinstance(module, nn.QuantizedEmbedding):
            settings = ("group_size", "bits", "mode")
            self._quantization = {name: getattr(module, name) for name in settings}
            self._quantization["dtype"] = frozen_weight(module).dtype

    def __call__(self, tokens: np.ndarray) -> mx.array:
        """Rows [..., D] of tokens [...]."""
        rows = {name: self._rows(name, tokens) for name in self._parts}
        if self._quantization is None:
            return rows["weight"]
        return mx.dequantize(
            rows["weight"], rows["scales"], rows.get("biases"), **self._quantization
        )

    def _rows(self, name: str, tokens: np.ndarray) -> mx.array:
        mapped, kind = self._parts[name]
        rows = mx.array(mapped[tokens])
        if kind == "BF16":
            rows = rows.view(mx.bfloat16)
        return rows.astype(self._dtypes[name])


def map_embedding(folder: Path, key: str | None, module: nn.Module) -> MappedEmbedding | str:
    """Map an embedding from a checkpoint's files, or return why it must be loaded.

    ``key`` is the name of its weight in the files, if it is one tensor there.
    """
    if type(module) not in (nn.Embedding, nn.QuantizedEmbedding, FloatingEmbedding):
        return f"rows of a {type(module).__name__} are not read from a file"
    if key is None:
        return "its tensor in the files is not known"

    path = key.removesuffix(".weight")
    parameters = [name for name in ("weight", "scales", "biases") if module.get(name) is not None]

    parts = {}
    for file in weight_files(folder):
        header, start = read_header(file)
        for name in parameters:
            if (tensor := header.get(f"{path}.{name}")) is None:
                continue

            kind = tensor["dtype"]
            shape = tuple(tensor["shape"])
            if kind not in _KINDS or shape != tuple(module[name].shape):
                return f"{path}.{name} is stored in the files as {kind} {list(shape)}"

            offset = start + int(tensor["data_offsets"][0])
            parts[name] = np.memmap(file, _KINDS[kind], "r", offset, shape), kind

    if missing := [name for name in parameters if name not in parts]:
        return f"it was quantized while it was loaded: the files have no {path}.{missing[0]}"
    return MappedEmbedding(parts, module)
