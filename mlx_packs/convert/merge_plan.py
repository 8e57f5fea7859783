"""The plan of a merge: the weights that change, their formats and their names.

Everything is lazy: planning reads headers, and a tensor is computed when it is written.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.nn as nn
from mlx.utils import tree_flatten

from ..adapters.lora import delta_of
from ..adapters.spec import ModuleSpec
from ..bases import compressed_tensors
from ..bases import files as base_files
from ..bases.families import has_vision_tower
from ..bases.loading import lazy_base
from ..bases.model import BaseModel
from ..bases.precision import stored_dtype, with_rounded_scales
from ..bases.quantization import QuantizeOptions, format_after, formats_for, smaller_formats
from ..bases.weight_formats import WeightFormat, format_of, named_format
from ..bases.writer import Item, WritePlan, in_shards
from ..config.choices import WEIGHT_FORMATS, WEIGHT_MODES
from ..config.data import DataConfig
from ..display import Display
from ..errors import PackError
from ..nn.dora import LEAST_NORM
from ..nn.frozen_weight import frozen_weight
from ..nn.quantized import QUANTIZED
from ..packs.compatibility import quantize_for, quantize_options
from ..packs.manifest import replaced_of
from ..packs.pack import Pack
from ..reading import read_json
from ..runtime import mx

REQUANTIZE = ("none", "same", *WEIGHT_FORMATS)
DTYPES = {"auto": None, "float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
_MATRICES = (nn.Linear, nn.Embedding, *QUANTIZED)
_PARTS = tuple(part for facts in WEIGHT_MODES.values() for part in facts.parts)
_PART_NAME = re.compile(rf"(?P<place>.+?)\.(weight(\..*)?|{'|'.join(_PARTS)})")


@dataclass(frozen=True)
class MergeRequest:
    """The options of `merge_pack`."""

    pack: Pack
    model: str | Path
    requantize: str
    dtype: str
    max_drift: float | None
    columns: DataConfig
    rows: int
    max_shard_gb: float
    trust_remote_code: bool
    display: Display


@dataclass(frozen=True)
class Change:
    """The new weight of a module: lazy and dense, and its format (None: it stays dense)."""

    path: str
    weight: mx.array
    weight_format: WeightFormat | None


@dataclass(frozen=True)
class Changes:
    """All changes of a base, whose own weights are lazy, and config.json as it will be."""

    base: BaseModel
    changes: list[Change]
    tensors: dict[str, mx.array]  # parameters stored in full that are not weights of linears
    config: dict


class _Planner:
    """Collects new weights and their formats by module, in the order in which they depend."""

    def __init__(self, request: MergeRequest, base: BaseModel) -> None:
        self.request = request
        self.base = base
        self.dtype = DTYPES[request.dtype]
        self.modules = dict(base.model.named_modules())
        self.weights: dict[str, mx.array] = {}
        self.formats: dict[str, WeightFormat | None] = {}
        self.options = QuantizeOptions()

    def quantize_as_trained(self) -> None:
        """Round a dense checkpoint as it was for training, where the pack was trained on that."""
        pack = self.request.pack
        on_loading = quantize_for(pack, self.base.config)
        if on_loading == "none":
            return

        trained = quantize_options(pack)
        weight_format = named_format(on_loading, trained["double_quant"])
        self.options = QuantizeOptions(weight_format, trained["keep"])

        for path, weight_format in formats_for(self.base.model, self.options)[0].items():
            self.weights[path] = weight_format.rounded(self.modules[path].weight)
            self.formats[path] = weight_format if self.request.requantize == "same" else None

    def choose_formats(self) -> None:
        """Set the format to quantize to; all of a dense base is quantized."""
        if self.request.requantize not in WEIGHT_FORMATS:
            return

        self.options = QuantizeOptions(named_format(self.request.requantize))
        if not self.base.quantization:
            self.formats = dict(formats_for(self.base.model, self.options)[0])

    def replace_full_tensors(self, tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Take tensors that the pack stores in full; return those that are not such weights."""
        others = {}
        for name in replaced_of(self.request.pack.manifest):
            path, _, parameter = name.rpartition(".")
            if parameter == "weight" and isinstance(self.modules.get(path), _MATRICES):
                self.weights[path] = tensors[name]
            else:
                others[name] = tensors[name]

        return others

    def add_deltas(self, tensors: Mapping[str, mx.array]) -> None:
        pack = self.request.pack
        for path, spec in pack.specs.items():
            if path not in self.modules:
                raise PackError(
                    f"{pack.path}: {path}: {self.request.model} has no such module.", "mismatch"
                )
            self.weights[path] = _merged(spec, tensors, self._weight(path))

    def cast(self) -> None:
        """Bring every weight to its dtype and choose its format."""
        for path in {**self.weights, **self.formats}:
            dtype = self.dtype or frozen_weight(self.modules[path]).dtype
            self.weights[path] = self._weight(path).astype(dtype)
            self.formats.setdefault(
                path, format_after(path, self.modules[path], self.request.requantize)
            )

    def requantize_others(self) -> None:
        """Change modules of a quantized base without an adapter, where they become smaller."""
        smaller = smaller_formats(self.base, self.request.requantize, self.weights)
        for path, weight_format in smaller.items():
            weight = frozen_weight(self.modules[path]).dense()
            self.weights[path] = weight.astype(self.dtype or weight.dtype)
            self.formats[path] = weight_format

    def _weight(self, path: str) -> mx.array:
        """Return the new weight of a module as far as it is known, else its own, dense."""
        if path in self.weights:
            return self.weights[path]
        return frozen_weight(self.modules[path]).dense()


def plan_changes(request: MergeRequest) -> Changes:
    """Return which weights of the base change, and how each is quantized."""
    base = lazy_base(request.model, request.trust_remote_code)
    _check_mergeable(request.pack)
    if request.requantize == "nf4":  # which mlx-vlm does not read
        _check_no_tower(base, request.requantize)
    planner = _Planner(request, base)
    tensors = request.pack.load_tensors()

    planner.quantize_as_trained()
    planner.choose_formats()
    others = planner.replace_full_tensors(tensors)
    planner.add_deltas(tensors)
    planner.cast()
    planner.requantize_others()

    changes = [
        Change(path, planner.weights[path], planner.formats[path])
        for path in reversed(planner.modules)
        if path in planner.weights
    ]

    stored = read_json(base.path / "config.json")
    config = _config(stored, base.quantization, changes, planner.options, request.requantize)
    return Changes(base, changes, others, config)


def _check_mergeable(pack: Pack) -> None:
    """Raise a PackError for an adapter of a tied embedding that acts on the input alone."""
    for spec in pack.specs.values():
        if spec.head is False:
            raise PackError(
                f"{pack.path}: {spec.path}: its adapter acts only on the input, but the base ties "
                "the head to this table, so no one table has both. Apply the pack instead.",
                "unsupported",
            )


def _merged(spec: ModuleSpec, tensors: Mapping[str, mx.array], weight: mx.array) -> mx.array:
    """Return W + D in float32; with DoRA each row then gets its magnitude."""
    adapted = weight.astype(mx.float32) + delta_of(spec, tensors)
    if spec.kind != "dora":
        return adapted

    m = tensors[f"{spec.path}.m"].astype(mx.float32)
    norms = mx.maximum(mx.linalg.norm(adapted, axis=1), LEAST_NORM)
    return (m / norms)[:, None] * adapted


def _is_rewritten(config: dict) -> bool:
    """Return whether weights that stay quantized are written in MLX's format, not as stored."""
    if compressed_tensors.is_compressed(config):
        return True
    return base_files.stored_quantization(config).get("quant_method") == base_files.BITSANDBYTES


def _config(
    config: dict,
    quantization: Mapping,
    changes: list[Change],
    options: QuantizeOptions,
    requantize: str,
) -> dict:
    # weights are no longer the file's
    config = {key: value for key, value in config.items() if key != base_files.K_QUANTS}
    is_stored = quantization or not any(c.weight_format for c in changes)
    if requantize == "same" and is_stored and not _is_rewritten(config):
        return config

    quantized = dict(quantization)
    plain = compressed_tensors.without_quantization(config)
    if requantize == "none":
        return plain

    if not quantized:
        quantized = options.weight_format.to_config()
    for change in changes:
        weight_format = change.weight_format
        entry = weight_format.to_config() if weight_format else {}
        if entry and all(quantized.get(k, "affine") == v for k, v in entry.items()):
            quantized.pop(change.path, None)
        elif entry and (weight_format.native or weight_format.is_stored(quantized)):
            quantized[change.path] = entry
        else:
            # mlx-lm quantizes nothing here: it is dense, or NF4 by its tensors
            quantized[change.path] = False

    return dict(
        sorted({**plain, "quantization": quantized, "quantization_config": quantized}.items())
    )


@dataclass(frozen=True)
class _Names:
    """The tensors of a checkpoint by the names of its files, with the places of modules there."""

    tensors: dict[str, mx.array]
    places: dict[str, str]  # the name of each changed module in the files, by path
    transposed: frozenset[str] = frozenset()  # paths whose weight is stored so (GPT-2's)


def plan_merge(request: MergeRequest, facts: Mapping | None = None) -> WritePlan:
    """Plan the merged checkpoint for the writer of `packs quantize`; reads headers only.

    ``facts`` are for the record that the writer leaves in the folder.
    """
    planned = plan_changes(request)
    base = planned.base
    source = base_files.resolve_checkpoint(request.model)
    requantize = request.requantize

    stored = read_json(source / "config.json")
    is_dense = requantize == "none" and not compressed_tensors.is_compressed(stored)

    names = None
    if is_dense or not _is_rewritten(stored):
        names = _own_names(source, planned)

    origin = "base"
    if names is None:
        _check_no_tower(base, requantize)
        tensors = dict(tree_flatten(base.model.parameters()))
        names = _Names(tensors, {c.path: c.path for c in planned.changes})
        origin = "mlx-lm"

    items, tensors = _items(planned, names, DTYPES[request.dtype])

    quantized = base_files.stored_quantization(planned.config)
    short = {k: v for k, v in quantized.items() if not isinstance(v, dict) and v is not False}
    changed = len(planned.changes) + len(planned.tensors)
    merged = {**(facts or {}), "changed": changed, "names": origin}

    shards = in_shards(items, request.max_shard_gb)
    return WritePlan(tensors, shards, planned.config, base.fingerprint, {}, short or None, merged)


def _check_no_tower(base: BaseModel, requantize: str) -> None:
    """Raise a PackError for a vision tower, which has no tensors under mlx-lm's names."""
    if has_vision_tower(base.config):
        raise PackError(
            f"--requantize {requantize}: {base.name} takes images, and its vision tower would be "
            "lost. Merge it with --requantize none, and quantize that with python -m "
            "mlx_vlm.convert -q.",
            "unsupported",
        )


def _items(
    planned: Changes, names: _Names, dtype: mx.Dtype | None
) -> tuple[list[Item], dict[str, mx.array]]:
    places = names.places
    by_name = {f"{places[c.path]}.weight": c for c in planned.changes}
    changed = {places[c.path] for c in planned.changes}

    full_tensors = {}
    for name, tensor in planned.tensors.items():
        path, _, parameter = name.rpartition(".")
        full_tensors[f"{places.get(path, path)}.{parameter}"] = tensor

    sizes = _true_sizes(planned.base, places)
    items = []
    tensors = {}
    for name, tensor in names.tensors.items():
        change = by_name.get(name)
        part = _PART_NAME.fullmatch(name)
        if change is None and part and part["place"] in changed:
            continue

        weight_format = None
        size = sizes.get(name, tensor.size)
        if change:
            weight_format = change.weight_format
            tensor = change.weight
            if change.path in names.transposed:
                tensor = tensor.T
            size = tensor.size
        elif name in full_tensors:
            tensor = full_tensors[name].astype(dtype or tensor.dtype)

        items.append(Item.of(name, tensor, weight_format, size))
        tensors[name] = tensor

    return items, tensors


def _true_sizes(base: BaseModel, places: Mapping[str, str]) -> dict[str, int]:
    """Return how many weights each stored tensor represents where it is quantized; scales: none."""
    sizes = {}
    for path, module in base.model.named_modules():
        if stored := format_of(module):
            place = places.get(path, path)
            sizes[f"{place}.weight"] = module.weight.nbytes * 8 // stored.bits
            sizes |= {f"{place}.{part}": 0 for part in _PARTS}
    return sizes


def _own_names(source: Path, planned: Changes) -> _Names | None:
    """None if mlx-lm has other names or shapes for a module that changes."""
    tensors: dict[str, mx.array] = {}
    for file in base_files.weight_files(source):
        tensors |= mx.load(str(file))

    base = planned.base
    tensors = with_rounded_scales(tensors, base.config, DTYPES[stored_dtype(base.config)])
    modules = dict(base.model.named_modules())
    is_gpt2 = base.config["model_type"] == "gpt2"
    paths = [c.path for c in planned.changes]
    paths += [name.rpartition(".")[0] for name in planned.tensors]

    places = {path: _place_of(path, base, tensors, is_gpt2) for path in paths}
    if None in places.values():
        return None
    transposed = {
        path
        for path, place in places.items()
        if is_gpt2 and place != path and isinstance(modules[path], nn.Linear)
    }

    for change in planned.changes:
        place = places[change.path]
        stored = format_of(modules[change.path])
        if change.path in transposed:
            if change.weight_format:
                return None
            continue
        # what scales are called beside a weight of another name is not known
        if place != change.path and (stored or change.weight_format):
            return None
        if stored is None and tensors[f"{place}.weight"].shape != change.weight.shape:
            return None

    return _Names(tensors, places, frozenset(transposed))


def _place_of(
    path: str, base: BaseModel, tensors: Mapping[str, mx.array], is_gpt2: bool
) -> str | None:
    """Return the name of a module in the files; None if that is unknown."""
    if is_gpt2:
        short = path.removeprefix("model.")
        candidates = [path, short, f"transformer.{short}"]
    else:
        candidates = [path, f"bert.{path}"]
        origin = base.weight_map.get(f"{path}.weight")
        if isinstance(origin, str):
            candidates.append(origin.removesuffix(".weight"))

    for name in candidates:
        if f"{name}.weight" in tensors or f"{name}.bias" in tensors:
            return name
    return None
