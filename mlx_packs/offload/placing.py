"""Put the blocks of a loaded base on disk, and its embeddings and head.

Where a tensor of the model has the values of a tensor of the checkpoint, that one is read. What
loading changed otherwise (experts that it stacks, weights that it converts) is written to the
user's cache, a file for each block. A base that is loaded lazily is never in memory as a whole: one
block at a time is compared, and written if need be; later loads of the same base find the result.
"""

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

import mlx.nn as nn
from mlx.utils import tree_flatten

from ..bases.families import VISION_FAMILIES
from ..bases.files import resolve_checkpoint, weight_files
from ..bases.loading import constants_of
from ..bases.model import BaseModel
from ..cache import Cache, key_of
from ..display import size
from ..errors import Float16Overflow, PackError
from ..nn.surgery import block_prefixes
from ..reading import read_header, read_json
from ..runtime import mx, on_cpu, total_memory, versions
from ..tensors import save_tensors
from .blocks import OffloadedBlocks, StoredBlock, empty, state_of
from .tables import TableModule, piece_files, tables_of, write_pieces

_CACHE = Cache("blocks", days=30, is_needed=True)
_PLACES = "places.json"  # by module and name in it: the name in the checkpoint, or null
_FORMAT = 2
_CHECKED = "checked"  # a file that is there once a forward pass has worked

Places = dict[str, dict[str, str | None]]
Found = dict[str, tuple[Path, str]]  # file of an array of a module, and its name there


def put_on_disk(base: BaseModel) -> None:
    """Let the blocks of a base read their weights whenever they are computed.

    Raises:
        PackError: If the base has no blocks that can do so, or the converted ones do not fit on
            the disk.
    """
    _check(base)
    blocks = dict(zip(block_prefixes(base.model), base.model.layers, strict=True))
    tables = tables_of(base.model)
    folder, found = _find_arrays(base, blocks, tables)

    on_disk = OffloadedBlocks(
        base.model, [_stored_block(block, found[path]) for path, block in blocks.items()]
    )
    for path, table in tables.items():
        rows = len(table.module.weight)
        pieces = piece_files(folder, path, rows) if table.is_head else []
        table.put_on_disk(found[path], pieces, on_disk.count)

    mx.eval(base.model.parameters(), constants_of(base.model))
    if not (folder / _CHECKED).exists():
        _check_output(base)
        (folder / _CHECKED).touch()


def _find_arrays(
    base: BaseModel, blocks: Mapping[str, nn.Module], tables: Mapping[str, TableModule]
) -> tuple[Path, dict[str, Found]]:
    """Return the cached folder of a base, and where the arrays of its blocks and tables are."""
    modules = {**blocks, **{path: table.module for path, table in tables.items()}}
    heads = {path for path, table in tables.items() if table.is_head}
    index = {name: file for file in weight_files(base.path) for name in read_header(file)[0]}
    key = key_of(
        _FORMAT, base.fingerprint, base.quantization, base.compute_dtype, on_cpu(), versions()
    )

    def write(folder: Path) -> None:
        places = _write_converted(base, modules, heads, index, folder)
        (folder / _PLACES).write_text(json.dumps(places))

    folder = _CACHE.folder(key[:32], key, write)
    places = read_json(folder / _PLACES)
    return folder, {
        path: {
            name: (_converted(folder, path), name) if source is None else (index[source], source)
            for name, source in of_module.items()
        }
        for path, of_module in places.items()
    }


def _stored_block(block: nn.Module, found: Found) -> StoredBlock:
    arrays: dict[Path, dict[str, mx.array]] = {}
    for name, array in tree_flatten(block.parameters()):
        file, stored_name = found[name]
        arrays.setdefault(file, {})[stored_name] = array
    return StoredBlock(arrays, {file: state_of(file) for file in arrays})


def exceeds_memory(model: str | Path, share: float = 1.0) -> bool:
    """Return whether the weights of a base, as the device stores them, exceed a share of memory."""
    nbytes = 0
    for file in weight_files(resolve_checkpoint(model)):
        for tensor in read_header(file)[0].values():
            start, stop = tensor["data_offsets"]
            # a CPU computes in float32
            is_widened = on_cpu() and tensor["dtype"] in ("F16", "BF16")
            nbytes += (stop - start) * (1 + is_widened)
    return nbytes > share * total_memory()


def _check(base: BaseModel) -> None:
    """Raise a PackError if a base cannot be on disk."""
    if base.architecture != "decoder":
        raise _unsupported(f"{base.name} is an encoder, and those stay in memory")
    if base.config["model_type"] in VISION_FAMILIES:
        raise _unsupported(f"{base.name} reads images, and such bases stay in memory")


def _check_output(base: BaseModel) -> None:
    """Raise a PackError if the model uses weights of a block without calling the block."""
    logits = base.model(mx.array([[1, 2, 3]]))
    if mx.isnan(logits).any().item():
        kind = base.config["model_type"]
        raise _unsupported(f"the blocks of {base.name}, a {kind}, cannot be read one by one")


def _unsupported(reason: str) -> PackError:
    return PackError(f"--offload-base: {reason}. Use off.", "unsupported", "offload_base")


def _write_converted(
    base: BaseModel,
    modules: Mapping[str, nn.Module],
    heads: Collection[str],
    index: Mapping[str, Path],
    folder: Path,
) -> Places:
    """Return where the arrays of blocks and tables are; write what the checkpoint does not have."""
    places: Places = {}
    for prefix, module in modules.items():
        parameters = dict(tree_flatten(module.parameters()))
        mx.eval(parameters)
        names = {name: _stored_name(f"{prefix}.{name}", base.weight_map) for name in parameters}
        files = {index[source] for source in names.values() if source in index}
        stored = {name: array for file in files for name, array in mx.load(str(file)).items()}

        for name, array in parameters.items():
            if array.dtype == mx.float16 and not mx.isfinite(array).all().item():
                raise Float16Overflow(f"{prefix}.{name} overflows")

        places[prefix] = of_module = {}
        converted = {}
        for name, array in parameters.items():
            source = names[name]
            of_module[name] = source
            if not _is_equal(stored.get(source), array):
                of_module[name] = None
                converted[name] = array

        if converted:
            _check_space(folder, converted)
            save_tensors(_converted(folder, prefix), converted)
        if prefix in heads:
            _check_space(folder, parameters)
            write_pieces(piece_files(folder, prefix, len(module.weight)), parameters)

        for array in parameters.values():
            empty(array)
    return places


def _converted(folder: Path, path: str) -> Path:
    return folder / f"{path}.safetensors"


def _stored_name(name: str, weight_map: Mapping[str, str | list[str]]) -> str:
    """Return the name that a tensor of the model probably has in the checkpoint."""
    module, _, part = name.rpartition(".")
    source = weight_map.get(f"{module}.weight")
    if isinstance(source, str):
        return source.removesuffix("weight") + part
    return name


def _is_equal(stored: mx.array | None, array: mx.array) -> bool:
    """Return whether a tensor of the files, read in the model's dtype, is the model's."""
    if stored is None or stored.shape != array.shape:
        return False

    return mx.array_equal(stored.astype(array.dtype), array, equal_nan=True).item()


def _check_space(folder: Path, tensors: Mapping[str, mx.array]) -> None:
    needed = sum(array.nbytes for array in tensors.values())
    free = shutil.disk_usage(folder).free
    if free < needed + (1 << 30):
        raise PackError(
            f"{folder.parent}: {size(free)} are free, too few for the converted blocks of the "
            "base. Free some space, or name another folder in MLX_PACKS_CACHE.",
            "unwritable",
        )
