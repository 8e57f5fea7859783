"""The checkpoint folder of a GGUF file: written one tensor at a time, into the cache.

It stays there while the file stays as it is.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...cache import Cache, key_of
from ...errors import PackError, file_errors
from ...files import atomic_write, free_bytes, to_json
from ...reading import check_regular
from ...runtime import mx
from ...tensors import write_tensors
from ..files import K_QUANTS
from .architectures import Architecture, architecture_of, config_of, names_of
from .blocks import FORMATS, BlockFormat, read_affine, read_dense
from .formats import choose_formats
from .header import GgufFile, TensorInfo, read_gguf
from .tokenizer import tokenizer_files

_CACHE = Cache("gguf", days=30, is_needed=True)
_FORMAT = "mlx_packs gguf 5"
_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
_STORED = {"F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32}
_FREE_BYTES = 256 << 20  # that stay free on the disk


def checkpoint_folder(path: Path, *, dense_k: bool = False) -> Path:
    """Write the folder of a file if it is missing, with ``dense_k`` another one."""
    path = path.resolve()
    with file_errors(path, code="not-found", flag="model"):
        check_regular(path)

    state = _state(path)

    def write(folder: Path) -> None:
        Conversion.of(path, dense_k=dense_k).write(folder)
        if _state(path) != state:
            raise PackError(
                f"{path}: changed while it was read. Wait until it is written.", "unreadable"
            )

    digest = hashlib.sha256(os.fsencode(path)).hexdigest()
    name = f"{path.stem[:80]}-{digest[:12]}"
    if dense_k:
        name += "-dense"
    return _CACHE.folder(name, key_of(state), write)


def _state(path: Path) -> list:
    """What changes when the bytes of a file do."""
    facts = path.stat()
    name = os.fsencode(path).hex()
    return [_FORMAT, name, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino]


@dataclass(frozen=True)
class Conversion:
    """How a GGUF file becomes a checkpoint."""

    file: GgufFile
    architecture: Architecture
    config: dict[str, Any]
    names: dict[str, str]  # tensors of the file by the names of MLX's model
    dtype: mx.Dtype  # of weights that are not exact: norms, biases, and what is dequantized
    formats: dict[str, BlockFormat]  # by the names of MLX's weights; others become dense
    tokenizer: tuple[str, dict[str, Any]]  # tokenizer.json and tokenizer_config.json

    @classmethod
    def of(cls, path: Path, *, dense_k: bool = False) -> "Conversion":
        """Read and check everything of a file but most of its weights."""
        file = read_gguf(path)
        architecture = architecture_of(file)
        config = config_of(file, architecture)
        names = names_of(file, architecture, config["num_hidden_layers"])
        _check_shapes(file, architecture, config, names)
        text, tokenizer_config, ends = tokenizer_files(file, config["vocab_size"])

        dtype = _main_dtype(file, architecture)
        config["torch_dtype"] = next(name for name, value in _DTYPES.items() if value == dtype)
        config["eos_token_id"] = ends
        bos = file.metadata.get("tokenizer.ggml.bos_token_id")
        if isinstance(bos, int):
            config["bos_token_id"] = bos

        formats, errors = choose_formats(file, names, dtype, dense_k=dense_k)
        if quantization := _quantization(file, names, formats):
            config |= {"quantization": quantization, "quantization_config": quantization}
        if any(block_format.is_k for block_format in formats.values()):
            config[K_QUANTS] = errors
        return cls(file, architecture, config, names, dtype, formats, (text, tokenizer_config))

    def write(self, folder: Path) -> None:
        """The folder is there and empty."""
        outline = {
            name: array for name, info in self._infos() for name, array in self._zeros(name, info)
        }

        needed = sum(array.nbytes for array in outline.values()) + _FREE_BYTES
        free = free_bytes(folder)
        if free is not None and free < needed:
            raise PackError(
                f"{folder.parent}: {self.file.path.name} needs {needed / 1e9:.1f} GB there, but "
                f"{free / 1e9:.1f} GB are free. Set MLX_PACKS_CACHE to a folder on another disk.",
                "unwritable",
            )

        write_tensors(folder / "model.safetensors", outline, self._tensors())

        text, tokenizer_config = self.tokenizer
        atomic_write(folder / "tokenizer.json", text)
        atomic_write(folder / "tokenizer_config.json", to_json(tokenizer_config))
        atomic_write(folder / "config.json", to_json(self.config))

    def _infos(self) -> Iterator[tuple[str, TensorInfo]]:
        for name, tensor in self.names.items():
            yield name, self.file.tensors[tensor]

    def _zeros(self, name: str, info: TensorInfo) -> Iterator[tuple[str, mx.array]]:
        if block_format := self.formats.get(name):
            rows, columns = info.shape
            path = name.removesuffix(".weight")
            yield name, mx.zeros((rows, columns * block_format.bits // 32), mx.uint32)
            groups = rows, columns // block_format.group_size
            for part in ("scales", "biases"):
                yield f"{path}.{part}", mx.zeros(groups, self._scale_dtype(block_format))
        else:
            yield name, mx.zeros(info.shape, self._dense_dtype(info))

    def _scale_dtype(self, block_format: BlockFormat) -> mx.Dtype:
        if block_format.is_k or self.dtype == mx.float32:
            return mx.float32
        return mx.float16

    def _dense_dtype(self, info: TensorInfo) -> mx.Dtype:
        """Matrices in F16 and BF16 keep their own."""
        if len(info.shape) > 1 and info.type in ("F16", "BF16"):
            return _STORED[info.type]
        return self.dtype

    def _tensors(self) -> Iterator[tuple[str, mx.array]]:
        for name, info in self._infos():
            order = self._order(name, info)
            if block_format := self.formats.get(name):
                arrays = read_affine(self.file, info, block_format)
                if order is not None:
                    arrays = [array[order] for array in arrays]
                yield from self._affine(name, arrays, block_format)
                continue

            array = read_dense(self.file, info)
            if order is not None:
                array = array[order]

            if name.endswith("norm.weight") and self.architecture.norm_offset:
                array = array - np.float32(self.architecture.norm_offset)

            tensor = mx.array(array).astype(self._dense_dtype(info))
            if not mx.isfinite(tensor).all().item():
                raise self.file.fault(f"{info.name} has weights beyond {tensor.dtype}.")

            yield name, tensor

    def _affine(
        self, name: str, arrays: list[np.ndarray], block_format: BlockFormat
    ) -> Iterator[tuple[str, mx.array]]:
        path = name.removesuffix(".weight")
        weight, *numbers = arrays
        yield name, mx.array(weight)
        for part, values in zip(("scales", "biases"), numbers, strict=True):
            tensor = mx.array(values)
            # the dtype on a GPU, which rounds the scales of K-quants when it loads them
            if self.dtype != mx.float32 and not mx.isfinite(tensor.astype(mx.float16)).all().item():
                raise self.file.fault(f"{name} has a scale beyond float16. Get it again.")
            yield f"{path}.{part}", tensor.astype(self._scale_dtype(block_format))

    def _order(self, name: str, info: TensorInfo) -> np.ndarray | None:
        """The rows of q and k in MLX's order; None if they are in it."""
        if not self.architecture.family.permuted:
            return None
        heads = _heads_of(name, self.config)
        return heads and rows_in_mlx(info.shape[0], heads)


def rows_in_mlx(rows: int, heads: int) -> np.ndarray:
    """Return the rows of a projection of a file in MLX's order: the halves of a head, not pairs."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)


def _heads_of(name: str, config: dict[str, Any]) -> int | None:
    """How many heads are in the rows of a q or k projection; None for another tensor."""
    keys = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    key = keys.get(name.split(".")[-2])
    return config[key] if key else None


def _check_shapes(
    file: GgufFile, architecture: Architecture, config: dict[str, Any], names: dict[str, str]
) -> None:
    """Check that no tensor is missing, and the shapes that the rows of q and k depend on."""
    blocks = range(config["num_hidden_layers"])
    needed = [
        f"model.layers.{i}.{path}.weight" for i in blocks for path in architecture.names.values()
    ]
    missing = [
        n for n in ("model.embed_tokens.weight", "model.norm.weight", *needed) if n not in names
    ]

    if missing:
        raise file.fault(f"has no tensor for {missing[0]}. Copy or download it again.")

    for name, tensor in names.items():
        shape = file.tensors[tensor].shape
        is_matrix = name.endswith("_proj.weight") or "embed" in name or "lm_head" in name
        axes = 2 if is_matrix else 1
        if len(shape) != axes:
            raise file.fault(f"{tensor} has the shape {list(shape)}. Copy or download it again.")

        heads = _heads_of(name, config)
        if heads and shape[0] != heads * config["head_dim"]:
            raise file.fault(
                f"{tensor} has {shape[0]} rows, but {heads} heads of {config['head_dim']} need "
                f"{heads * config['head_dim']}. Copy or download it again."
            )


def _main_dtype(file: GgufFile, architecture: Architecture) -> mx.Dtype:
    """The dtype of norms, biases and dequantized weights, in which a GPU also computes.

    That of most weights of a dense file, else float16; for Gemma, which overflows it, bfloat16, or
    float32 where scales are exact.
    """
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        kind = "quantized"
        formats = FORMATS.get(tensor.type, ())
        # such a matrix stays as it is with scales in float16
        if len(tensor.shape) == 2 and any(not block_format.is_k for block_format in formats):
            kind = "exact"
        elif tensor.type in _STORED:
            kind = tensor.type
        sizes[kind] = sizes.get(kind, 0) + tensor.nbytes

    most = max(sizes, key=lambda kind: sizes[kind])
    if architecture.needs_bfloat16:
        is_exact = "exact" in sizes or most == "F32"
        return mx.float32 if is_exact else mx.bfloat16

    return _STORED.get(most, mx.float16)


def _quantization(
    file: GgufFile, names: Mapping[str, str], formats: Mapping[str, BlockFormat]
) -> dict[str, Any]:
    """The settings of most weights, and the others by path; {} if no weight is quantized."""
    if not formats:
        return {}

    sizes: dict[tuple[int, int], int] = {}
    for name, block_format in formats.items():
        key = (block_format.group_size, block_format.bits)
        sizes[key] = sizes.get(key, 0) + file.tensors[names[name]].nbytes
    main = max(sizes, key=lambda key: sizes[key])

    def settings(group_size: int, bits: int) -> dict[str, Any]:
        return {"group_size": group_size, "bits": bits, "mode": "affine"}

    others = {
        name.removesuffix(".weight"): settings(block_format.group_size, block_format.bits)
        for name, block_format in formats.items()
        if (block_format.group_size, block_format.bits) != main
    }
    return settings(*main) | others
