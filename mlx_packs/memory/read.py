"""Read config and tensor headers of a base, and choose the module that plans for them.

They are in a folder, on the Hub, or described by a config alone.
"""

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Protocol

from .. import runtime
from ..bases.compressed_tensors import renamed_headers
from ..bases.files import (
    CONFIG,
    K_QUANTS,
    check_files,
    is_complete,
    read_config,
    resolve_checkpoint,
    unknown_to_hub,
    weight_files,
)
from ..bases.precision import stored_dtype
from ..bases.readers import is_local_model, names_file
from ..bases.supported import check_supported
from ..config.choices import architecture_of
from ..config.lora import LoRAConfig
from ..config.schema import TrainConfig
from ..errors import PackError, reason_of
from ..files import is_hub_id
from ..reading import read_header
from ..tensors import DTYPES
from .headers import Headers, Tensors
from .plan import MemoryPlan, Shape


class Estimator(Protocol):
    """The memory estimate of one architecture: a module."""

    def describe(self, config: Mapping) -> Tensors:
        """Return the headers of the dense checkpoint that a config describes."""

    def estimate(
        self, headers: Headers, lora: LoRAConfig, train: TrainConfig, shape: Shape | None = None
    ) -> MemoryPlan:
        """Return the peak memory of training on batches of one shape."""

    def smallest_shape(self, train: TrainConfig) -> Shape:
        """Return the shape of the smallest batch that a run has."""

    def resized(self, shape: Shape, before: TrainConfig, after: TrainConfig) -> Shape:
        """Return the shape that a batch has after a change of batch size or maximal length."""

    def run_settings(self, headers: Headers, train: TrainConfig) -> TrainConfig:
        """Return the settings that `packs train` would take for such a base."""


def estimator_of(config: Mapping) -> Estimator:
    from . import decoder, encoder  # of which a run needs one

    check_supported(config)
    estimators = {"decoder": decoder, "encoder": encoder}
    return estimators[architecture_of(config.get("model_type"))]


def read_headers(name: str | Path) -> Headers:
    """Return the headers of a folder, ``tiny`` or a hub id (cached first, else by range requests).

    A folder with ``config.json`` alone is read as the dense checkpoint that this describes.

    Raises:
        PackError: There is none, or the Hub cannot be reached.
    """
    is_here = is_local_model(str(name)) or os.path.exists(Path(name).expanduser())
    is_id = is_hub_id(str(name)) and not is_here and not names_file(str(name))
    path = _cached(str(name)) if is_id else resolve_checkpoint(name)

    if path is None:
        return Headers(str(name), *_from_hub(str(name)))
    if not weight_files(path):
        return describe(str(name), _config_of_dense(path / CONFIG))

    config = check_files(path)
    tensors: dict[str, Mapping] = {}
    for file in weight_files(path):
        tensors |= read_header(file)[0]
    return Headers(str(name), config, _as_loaded(tensors, config))


def describe(name: str, config: dict) -> Headers:
    return Headers(name, config, estimator_of(config).describe(config))


def _config_of_dense(file: Path) -> dict:
    """Return the config in ``file``; raise a PackError if it belongs to a quantized checkpoint."""
    config = read_config(file)
    if config.get("quantization_config", config.get("quantization")):
        raise PackError(
            f"{file}: is the only file and does not say how each weight is quantized. A plan "
            "needs the headers of model*.safetensors too.",
            "not-found",
        )
    return config


def _cached(repo: str) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        path = Path(snapshot_download(repo, local_files_only=True))
    except (OSError, ValueError):  # not there, or no name of the Hub's
        return None
    return path if is_complete(path) else None


def _from_hub(repo: str) -> tuple[dict, Tensors]:
    import huggingface_hub
    from huggingface_hub import errors

    unreachable = (OSError, ValueError, errors.HTTPError, errors.SafetensorsParsingError)
    try:
        headers = huggingface_hub.get_safetensors_metadata(repo)
        file = huggingface_hub.hf_hub_download(repo, CONFIG)
    except errors.RepositoryNotFoundError:
        raise unknown_to_hub(repo) from None
    except unreachable as error:
        raise PackError(
            f"--model {repo}: not a folder here, not in the Hugging Face cache, and its headers "
            f"cannot be read from the Hub ({reason_of(error)}).",
            "network",
        ) from None

    tensors = {
        name: {"dtype": str(getattr(t.dtype, "value", t.dtype)), "shape": list(t.shape)}
        for file in headers.files_metadata.values()
        for name, t in file.tensors.items()
    }
    config = read_config(Path(file), tensors)
    return config, _as_loaded(tensors, config)


def _as_loaded(tensors: Tensors, config: dict) -> Tensors:
    dtype = DTYPES[stored_dtype(config)]
    tensors = renamed_headers(tensors, config, dtype)
    if K_QUANTS not in config:
        return tensors
    # as `bases.precision.with_rounded_scales`; a plan for float32 widens half precision
    return {
        name: {**t, "dtype": dtype} if name.endswith((".scales", ".biases")) else t
        for name, t in tensors.items()
    }


@cache
def teacher_bytes(name: str) -> int:
    """Return the bytes of a teacher's weights; on a CPU with dense copies of quantized ones.

    Raises a PackError if its headers cannot be read, or no plan knows its architecture.
    """
    headers = read_headers(name)
    estimator = estimator_of(headers.config)
    train = TrainConfig(matmul_path="dense" if runtime.on_cpu() else "quantized")
    return estimator.estimate(headers, LoRAConfig(), train, estimator.smallest_shape(train)).base
