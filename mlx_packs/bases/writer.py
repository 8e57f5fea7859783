"""Quantize a checkpoint to another, tensor by tensor: the whole model is never in memory.

`plan_quantized` decides which modules are quantized and how, and spreads the result over shards
(`packs merge` makes plans of its own); `write` executes a plan.
"""

import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mlx.utils import tree_flatten

from .. import runtime
from ..display import QUIET, Display, Task
from ..errors import PackError
from ..files import (
    atomic_folder,
    atomic_write,
    exclusive_writer,
    make_folder,
    to_json,
    write_errors,
)
from ..reading import read_json, sha256
from ..runtime import mx
from ..tensors import write_tensors
from . import files as base_files
from .families import has_vision_tower
from .files import RECORD
from .fingerprint import fingerprint
from .loading import load_model_of
from .quantization import QuantizeOptions, formats_for
from .supported import check_architecture, check_supported
from .weight_formats import WeightFormat, check_finite


@dataclass(frozen=True)
class Item:
    """One tensor of the source, its format (None: left as it is), and what it becomes."""

    name: str
    size: int
    weight_format: WeightFormat | None
    outline: dict[str, mx.array]

    @classmethod
    def of(
        cls,
        name: str,
        w: mx.array,
        weight_format: WeightFormat | None,
        size: int | None = None,
    ) -> "Item":
        """``size`` is the number of weights that a tensor stores, if not one each."""
        outline = {name: mx.zeros(w.shape, w.dtype)}
        if weight_format is not None:
            outline = weight_format.outline(name, w)
        return cls(name, w.size if size is None else size, weight_format, outline)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.outline.values())


@dataclass(frozen=True)
class WritePlan:
    """The plan that `write` executes."""

    tensors: dict[str, mx.array]  # of the source, lazy
    shards: dict[str, list[Item]]  # by file
    config: dict  # the new config.json
    fingerprint: str  # of the source
    left_dense: dict[str, str]  # modules that could be quantized, and why they are not
    quantization: dict | None  # of the whole model, for the record
    merged: dict | None = None  # the pack that was merged into it, if any
    ends: tuple[int, ...] = ()  # what ends an answer, for eos_token_id in addition to its own
    texts: Mapping[str, str] = field(default_factory=dict)  # other files, by their path in it

    @property
    def items(self) -> list[Item]:
        return [item for items in self.shards.values() for item in items]


def in_shards(items: list[Item], max_shard_gb: float) -> dict[str, list[Item]]:
    """Items by file, in their order; tensors of one module stay together."""
    shards = [[]]
    size = 0
    for item in items:
        if shards[-1] and size + item.nbytes > max_shard_gb * 1e9:
            shards.append([])
            size = 0

        shards[-1].append(item)
        size += item.nbytes

    if len(shards) == 1:
        return {"model.safetensors": items}

    count = len(shards)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": shard for i, shard in enumerate(shards, 1)}


_CACHE_BYTES = 1 << 24  # of buffers that MLX may keep between two slices of a tensor


def quantize(
    model: str | Path,
    out: str | Path,
    options: QuantizeOptions | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    display: Display | None = None,
) -> dict:
    """Write a quantized copy of a dense checkpoint; the folder appears when it is complete.

    Returns what `packs quantize --json` prints.
    """
    options = options or QuantizeOptions()
    display = display or Display(QUIET)
    options.check()
    source = base_files.resolve_checkpoint(model)
    started = time.monotonic()

    output_folder(str(out), source, overwrite)
    plan = plan_quantized(source, options, trust_remote_code, str(model))
    record = write(out, source, plan, overwrite, display)

    return {
        "out": str(out),
        "model": base_files.public_name(str(model)),
        **{key: record[key] for key in ("quantization", "format", "quantized", "dense")},
        "left_dense": plan.left_dense,
        "bits_per_weight": record["bits_per_weight"],
        "bits_per_quantized_weight": record["bits_per_quantized_weight"],
        "gb": sum(file["bytes"] for file in record["files"].values()) / 1e9,
        "shards": len(plan.shards),
        "seconds": round(time.monotonic() - started, 2),
        "process_peak_gb": runtime.peak_process_bytes() / 1e9,
    }


def write(
    folder: str | Path, source: Path, plan: WritePlan, overwrite: bool, display: Display
) -> dict:
    """Carry a plan out; return the record of the folder, which is there when it is complete."""
    out = output_folder(str(folder), source, overwrite)
    make_folder(out.parent)
    with exclusive_writer(out):
        output_folder(str(folder), source, overwrite)  # another run may have ended since
        with atomic_folder(out, replace=True) as partial, write_errors(out, "out"):
            _write_shards(partial, plan, display)
            return _write_rest(partial, source, plan)


def output_folder(folder: str, source: Path, overwrite: bool) -> Path:
    """The folder to write; only one that `packs quantize` or `merge` wrote is replaced."""
    if not folder.strip():
        raise PackError("--out: is empty. Name a folder.")

    out = Path(folder).expanduser()
    resolved = out.resolve()
    if source.resolve().is_relative_to(resolved):
        raise PackError(
            f"--out {out}: contains the checkpoint itself. Choose another name.", "conflict"
        )

    if out.is_file():
        raise PackError(f"--out {out}: must be a folder, but is a file.", "exists")
    if not out.exists():
        return resolved
    if not overwrite:
        raise PackError(
            f"{out}: already exists. Choose another name, or --overwrite.", "exists", "out"
        )

    if any(out.iterdir()) and not (out / RECORD).is_file():
        raise PackError(
            f"--out {out}: was not written by `packs quantize` or `packs merge` (no {RECORD}), so "
            "it is not replaced. Choose another name.",
            "exists",
        )

    return resolved


def plan_quantized(
    source: Path,
    options: QuantizeOptions,
    trust_remote_code: bool = False,
    named: str | None = None,
) -> WritePlan:
    """Reads the headers of the files only. Errors call the checkpoint as the user ``named`` it."""
    config = base_files.check_files(source)
    check_supported(config, source)
    check_architecture("quantize", "decoder", source, config.get("model_type"))

    if has_vision_tower(config):
        raise PackError(
            f"{named or source}: takes images, and a copy would have no vision tower. Quantize it "
            "with python -m mlx_vlm.convert -q, or while loading: packs train --quantize nf4.",
            "unsupported",
            "model",
        )
    if kind := base_files.quantized_as(source, config):
        raise PackError(
            f"{named or source}: is quantized already ({kind}). Use the checkpoint that it was "
            "made from.",
            "conflict",
            "model",
        )

    model, *_ = load_model_of(source, trust_remote_code, lambda _, weights: weights)
    formats, dense = formats_for(model, options)
    tensors = dict(tree_flatten(model.parameters()))
    del model

    items = []
    for name, tensor in tensors.items():
        path, _, parameter = name.rpartition(".")
        weight_format = formats.get(path) if parameter == "weight" else None
        items.append(Item.of(name, tensor, weight_format))

    if not any(item.weight_format for item in items):
        raise PackError(f"{source}: nothing is left to quantize with these options.", "conflict")

    shards = in_shards(items, options.max_shard_gb)
    config = _new_config(config, options, formats, list(dense))
    quantization = options.weight_format.to_config()
    return WritePlan(tensors, shards, config, fingerprint(source), dense, quantization)


def _new_config(
    config: dict,
    options: QuantizeOptions,
    formats: dict[str, WeightFormat],
    dense: list[str],
) -> dict:
    """config.json with the quantization as mlx-lm spells it."""
    weight_format = options.weight_format
    quantization = weight_format.to_config()
    if not weight_format.native:
        quantization |= {path: False for path in dense}
    quantization |= {path: f.to_config() for path, f in formats.items() if f != weight_format}

    new = config | {"quantization": quantization, "quantization_config": quantization}
    return dict(sorted(new.items()))


def _write_shards(partial: Path, plan: WritePlan, display: Display) -> None:
    cache = mx.set_cache_limit(_CACHE_BYTES)
    try:
        with display.task("pack", len(plan.items), "tensors") as bar:
            for shard, items in plan.shards.items():
                outline = {name: w for item in items for name, w in item.outline.items()}
                written = _written(items, plan, bar)
                write_tensors(partial / shard, outline, written, "mlx")
    finally:
        mx.set_cache_limit(cache)


def _written(items: list[Item], plan: WritePlan, bar: Task) -> Iterator[tuple[str, mx.array]]:
    """The tensors of a shard; of the source only the current one is in memory."""
    for item in items:
        w = plan.tensors.pop(item.name)
        mx.eval(w)

        if item.weight_format is None:
            check_finite(item.name, w)
            yield item.name, w
        else:
            yield from item.weight_format.quantize(item.name, w).items()

        del w
        mx.clear_cache()
        bar.advance()


def _write_rest(partial: Path, source: Path, plan: WritePlan) -> dict:
    """Write config.json, index, tokenizer, other small files, and the record; return the record."""
    for file in base_files.text_files(source):
        copy = partial / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)

    for name, text in plan.texts.items():
        (partial / name).parent.mkdir(exist_ok=True)
        atomic_write(partial / name, text)

    names = {
        name: shard
        for shard, items in plan.shards.items()
        for item in items
        for name in item.outline
    }
    metadata = {
        "total_size": sum(item.nbytes for item in plan.items),
        "total_parameters": sum(item.size for item in plan.items),
    }

    index = {"metadata": metadata, "weight_map": dict(sorted(names.items()))}

    quantized = [item for item in plan.items if item.weight_format]
    record = {
        "version": 1,
        "source": plan.fingerprint,
        "versions": dict(runtime.versions()),
        "format": "mlx",
        "quantization": plan.quantization,
        "quantized": len(quantized),
        "dense": len(plan.items) - len(quantized),
        "bits_per_weight": _bits(plan.items),
        "bits_per_quantized_weight": _bits(quantized),
        "files": {
            shard: {"bytes": (partial / shard).stat().st_size, "sha256": sha256(partial / shard)}
            for shard in plan.shards
        },
    }
    if plan.merged:
        record["merged"] = plan.merged

    atomic_write(partial / "config.json", to_json(_with_ends(plan.config, plan.ends)))

    generation = partial / "generation_config.json"
    if plan.ends and generation.is_file() and "eos_token_id" in read_json(generation):
        atomic_write(generation, to_json(_with_ends(read_json(generation), plan.ends)))

    atomic_write(partial / "model.safetensors.index.json", to_json(index))
    atomic_write(partial / RECORD, to_json(record))
    return record


def _with_ends(config: dict, ends: tuple[int, ...]) -> dict:
    if not ends:
        return config
    own = config.get("eos_token_id")
    tokens = own if isinstance(own, list) else [own]
    all_ends = dict.fromkeys(token for token in (*tokens, *ends) if token is not None)
    return {**config, "eos_token_id": list(all_ends)}


def _bits(items: list[Item]) -> float:
    return round(8 * sum(i.nbytes for i in items) / max(1, sum(i.size for i in items)), 4)


def verify(folder: Path, display: Display | None = None) -> dict:
    """Check every shard of a folder that `quantize` wrote against its hash; return its record."""
    base_files.check_files(folder)
    record = base_files.read_record(folder)
    if record is None:
        raise PackError(
            f"{folder}: has no {RECORD} with hashes. `packs quantize` did not write it.",
            "unsupported",
        )

    with (display or Display(QUIET)).task("check", len(record["files"]), "files") as bar:
        base_files.check_record(folder, bar.advance)
    return record
