"""Merge a pack into its base: a checkpoint of the base's own names and dtypes that needs no pack.

The merge is planned from lazy tensors (`plan_of`), measured against the attached pack before a file
is written (`drift.py`), and written tensor by tensor, whole or not at all (`quantize.write`). It is
refused where rounding to few bits would take the pack out again.
"""

import dataclasses
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.nn as nn
from mlx.utils import tree_flatten

from ..adapters.imported import full_tensor_modules
from ..adapters.spec import ModuleSpec
from ..adapters.tensors import delta_of
from ..bases import files as base_files
from ..bases import writer as quantize
from ..bases.bitsandbytes import METHOD
from ..bases.loading import lazy_base
from ..bases.model import BaseModel
from ..bases.quantization import QuantizeOptions, formats_for
from ..bases.weight_formats import FORMATS, MODES, WeightFormat, format_of, named_format
from ..bases.writer import Item, Plan
from ..config.schema import DataConfig
from ..display import QUIET, Display
from ..errors import PackError
from ..evaluation.rows import columns_of
from ..nn.experts import expert_weights, is_switch_linear
from ..nn.quantized import LINEARS, QUANTIZED, dequantized_weight
from ..packs.base import load_base_for
from ..packs.manifest import is_of_encoder, replaced_of
from ..packs.pack import Pack
from ..runtime import mx, on_cpu
from .fidelity import (
    ROWS,
    Drift,
    drift_batches,
    fastest_path,
    measure,
    put_base,
    put_modules,
    put_pack,
)

REQUANTIZE = ("none", "same", *FORMATS)
_CHEAPEST_FIRST = ("affine8", "none")  # what is tried where a merge drifts too far
_DTYPES = {"auto": None, "float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
_MATRICES = (nn.Linear, nn.Embedding, *QUANTIZED)
_PARTS = ("scales", "biases", "absmax", "nested_absmax", "offset")


@dataclass(frozen=True)
class Change:
    """What becomes of one module's weight: lazy and dense, and its format (None: dense)."""

    path: str
    weight: mx.array
    weight_format: WeightFormat | None


def merge_pack(
    pack: str | Path | Pack,
    model: str | Path,
    out: str | Path,
    requantize: str = "none",
    dtype: str = "auto",
    max_drift: float | None = None,
    data: str | Path = "tiny",
    rows: int = ROWS,
    max_shard_gb: float = 1.0,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    columns: DataConfig | None = None,
    display: Display | None = None,
) -> dict:
    """Write a pack's base with the pack merged into it, if the two stay alike.

    Args:
        requantize: ``none`` writes dense weights in the base's float dtype; ``same`` packs as the
            base is packed; ``affine4``, ``affine8``, ``nf4`` pack the weights that change so, and
            of the others those that become smaller by it.
        dtype: of the weights that change (with packed ones, of what they are packed from): ``auto``
            is the base's, or ``float32``, ``bfloat16``, ``float16``.
        max_drift: largest mean KL, nats a token, of the attached pack from the merged model; None
            is a tenth of the KL that the pack itself makes, and 0.02 at most.
        data: rows to measure on, at most ``rows`` of them.
    Returns: what `packs merge --json` prints. With ``passed`` false nothing is written, and
        ``passes`` names the cheapest way that would pass (``affine8``, ``none --dtype float32``).
    Raises: PackError if the pack is not of this base, cannot be merged, or ``out`` is no place.
    """
    if requantize not in REQUANTIZE:
        raise PackError(f"--requantize {requantize}: must be one of {', '.join(REQUANTIZE)}.")
    if dtype not in _DTYPES:
        raise PackError(f"--dtype {dtype}: must be one of {', '.join(_DTYPES)}.")
    check_max_drift(max_drift)
    started, display = time.monotonic(), display or Display(QUIET)
    pack = pack if isinstance(pack, Pack) else Pack.open(pack)
    source, _ = pack.check_checkpoint(model)
    quantize.output_folder(str(out), source, overwrite)
    columns = columns or columns_of(pack, data)
    if is_of_encoder(pack.manifest):
        from .merge_encoder import merge_encoder

        return merge_encoder(
            pack,
            model,
            out,
            requantize,
            dtype,
            max_drift,
            columns,
            rows,
            max_shard_gb,
            overwrite,
            trust_remote_code,
            display,
        )
    found, tried, passes = measured(
        pack, model, requantize, dtype, max_drift, columns, rows, trust_remote_code, display
    )
    limit = found.limit(max_drift)
    passed = found.kl_mean <= limit
    report = {
        "out": str(out),
        "model": base_files.public_name(str(model)),
        "requantize": requantize,
        "dtype": dtype,
        **found.to_json(),
        "max_drift": limit,
        "passed": passed,
        "passes": passes,
        "tried": tried,
    }
    if not passed:
        return report
    facts = {
        "base": base_files.public_name(str(model)),
        "pack_sha256": pack.adapters_hash,
        "requantize": requantize,
        "dtype": dtype,
        "kl_mean": found.kl_mean,
        "ppl_ratio": found.ppl_ratio,
    }
    plan = plan_of(pack, model, requantize, dtype, max_shard_gb, trust_remote_code, facts)
    record, _ = quantize.write(out, source, plan, overwrite, display)
    return report | {
        "changed": record["merged"]["changed"],
        "names": record["merged"]["names"],
        "shards": len(plan.shards),
        "gb": sum(file["bytes"] for file in record["files"].values()) / 1e9,
        "seconds": round(time.monotonic() - started, 2),
    }


def measured(
    pack: Pack,
    model: str | Path,
    requantize: str,
    dtype: str,
    max_drift: float | None,
    columns: DataConfig,
    rows: int = ROWS,
    trust_remote_code: bool = False,
    display: Display | None = None,
) -> tuple[Drift, dict[str, float], str | None]:
    """The drift of a merge; the mean KL of each way tried, and the cheapest within the limit."""
    display = display or Display(QUIET)
    planned = _planned(pack, model, requantize, dtype, trust_remote_code)
    base = load_base_for(pack, model, trust_remote_code)
    batches = drift_batches(base, pack, columns, rows=rows)
    path = fastest_path(base, batches)
    attached, plain = put_pack(pack, base, path), put_base(base, path)

    def drift_of(changes: list[Change]) -> Drift:
        merged = put_modules(base, modules_of(base, changes, pack))
        with display.task("drift", len(batches), "batches") as bar:
            return measure(base, attached, merged, plain, batches, bar.advance)

    found = drift_of(planned.changes)
    tried, limit = {requantize: found.kl_mean}, found.limit(max_drift)
    if found.kl_mean <= limit:
        return found, tried, requantize
    ways = {finer: (finer, dtype) for finer in _finer(requantize)}
    if any(change.weight.dtype != mx.float32 for change in planned.changes):
        ways["none --dtype float32"] = ("none", "float32")
    for way, how in ways.items():
        tried[way] = drift_of(_planned(pack, model, *how, trust_remote_code).changes).kl_mean
        if tried[way] <= limit:
            return found, tried, way
    return found, tried, None


def _finer(requantize: str) -> tuple[str, ...]:
    """The ways that take more bits than one, the cheapest first."""
    if requantize not in _CHEAPEST_FIRST:
        return _CHEAPEST_FIRST
    return _CHEAPEST_FIRST[_CHEAPEST_FIRST.index(requantize) + 1 :]


def check_max_drift(max_drift: float | None) -> None:
    """Raises: PackError for what is no limit; JSON has no infinity either."""
    if max_drift is not None and not 0 <= max_drift < math.inf:
        raise PackError(f"--max-drift must be a number of 0 or more, but is {max_drift}.")


@dataclass(frozen=True)
class _Planned:
    """Changes of a base, whose own weights are lazy, and config.json as it will be."""

    base: BaseModel
    changes: list[Change]
    tensors: dict[str, mx.array]  # parameters brought whole that are no weights of linears
    config: dict
    options: QuantizeOptions


def _planned(pack: Pack, model: str | Path, requantize: str, dtype: str, trust: bool) -> _Planned:
    base = lazy_base(model, trust)
    _refuse_unmergeable(pack)
    modules = dict(base.model.named_modules())
    on_loading = pack.quantize_for(base.config)
    weights: dict[str, mx.array] = {}
    formats: dict[str, WeightFormat | None] = {}
    options = QuantizeOptions()
    if on_loading != "none":  # the pack was trained on what the dense checkpoint becomes
        asked = pack.quantize_options
        options = QuantizeOptions(named_format(on_loading, asked["double_quant"]), asked["keep"])
        for path, weight_format in formats_for(base.model, options)[0].items():
            weights[path] = weight_format.rounded(modules[path].weight)
            formats[path] = weight_format if requantize == "same" else None
    if requantize in FORMATS:
        options = QuantizeOptions(named_format(requantize))
        if not base.quantization:
            formats = dict(formats_for(base.model, options)[0])
    tensors = pack.load_tensors()
    whole = replaced_of(pack.manifest)
    bare = {}
    for name in whole:
        path, _, parameter = name.rpartition(".")
        if parameter == "weight" and isinstance(modules.get(path), _MATRICES):
            weights[path] = tensors[name]
        else:
            bare[name] = tensors[name]
    for path, spec in pack.specs.items():
        if (module := modules.get(path)) is None:
            raise PackError(f"{pack.path}: {path}: {model} has no such module.")
        weight = weights.get(path, dense_weight(module))
        merged = _merged(spec, tensors, weight)
        weights[path] = merged.astype(_DTYPES[dtype] or _dtype_of(module))
    for path in [*weights, *formats]:
        module = modules[path]
        if path not in weights:
            weights[path] = dense_weight(module)
        weights[path] = weights[path].astype(_DTYPES[dtype] or _dtype_of(module))
        formats.setdefault(path, _format_for(path, module, requantize))
    if base.quantization and requantize != "same":
        for path, module in modules.items():
            if path in weights or not (stored := format_of(module)):
                continue
            wanted = _format_for(path, module, requantize)
            if wanted is None or wanted.bits_per_weight < stored.bits_per_weight:
                weights[path] = dense_weight(module).astype(_DTYPES[dtype] or _dtype_of(module))
                formats[path] = wanted
    order = [path for path in reversed(modules) if path in weights]
    changes = [Change(path, weights[path], formats[path]) for path in order]
    config = _config(_stored_config(base.path), base.quantization, changes, options, requantize)
    return _Planned(base, changes, bare, config, options)


def _refuse_unmergeable(pack: Pack) -> None:
    for spec in pack.specs.values():
        if spec.head is False:
            raise PackError(
                f"{pack.path}: {spec.path}: its adapter acts on the input alone, but the base ties "
                "the head to this table, so no one table has both. Apply the pack instead.",
                "unsupported",
            )


def dense_weight(module: nn.Module) -> mx.array:
    """The weight of any linear, embedding or stack of experts, unpacked."""
    if is_switch_linear(module):
        return expert_weights(module)
    return dequantized_weight(module) if isinstance(module, QUANTIZED) else module.weight


def _dtype_of(module: nn.Module) -> mx.Dtype:
    """Of a weight when it is dense."""
    return dense_weight(module).dtype


def _merged(spec: ModuleSpec, tensors: Mapping[str, mx.array], weight: mx.array) -> mx.array:
    """W + D in float32; of DoRA each row then gets its magnitude."""
    adapted = weight.astype(mx.float32) + delta_of(spec, tensors)
    if spec.kind != "dora":
        return adapted
    m = tensors[f"{spec.path}.m"].astype(mx.float32)
    return (m / mx.linalg.norm(adapted, axis=1))[:, None] * adapted


def _format_for(path: str, module: nn.Module, requantize: str) -> WeightFormat | None:
    """The format of the merged weight of a module; None is dense."""
    stored = format_of(module)
    if requantize == "none":
        return None
    if requantize == "same":
        if stored and stored.mode not in MODES:
            raise PackError(
                f"--requantize same: {path} is {stored.mode}, which is not written here"
                "; choose affine4, affine8 or none."
            )
        return stored
    if stored is None:  # what the base left dense stays so
        return None
    wanted = named_format(requantize)
    if wanted.is_stored(stored.to_config()):
        return stored
    if is_switch_linear(module) and not wanted.holds("other"):
        raise PackError(
            f"--requantize {requantize}: {path} holds experts, and {requantize} is for linears and "
            "embeddings; choose same, affine4 or affine8.",
            "unsupported",
        )
    return wanted if wanted.fits(dense_weight(module).shape[-1]) else None


def _config(
    config: dict,
    quantization: Mapping,
    changes: list[Change],
    options: QuantizeOptions,
    requantize: str,
) -> dict:
    """config.json of the merged model."""
    if requantize == "same" and (quantization or not any(c.weight_format for c in changes)):
        return config
    stated = dict(quantization)
    plain = {k: v for k, v in config.items() if k not in ("quantization", "quantization_config")}
    if "text_config" in plain:
        text = plain["text_config"]
        plain["text_config"] = {k: v for k, v in text.items() if k != "quantization_config"}
    if requantize == "none":
        return plain
    if not stated:
        stated = options.weight_format.to_config()
    for change in changes:
        weight_format = change.weight_format
        spelled = weight_format.to_config() if weight_format else {}
        if spelled and all(stated.get(k, "affine") == v for k, v in spelled.items()):
            stated.pop(change.path, None)
        elif spelled and (weight_format.native or weight_format.is_stored(stated)):
            stated[change.path] = spelled
        else:
            stated[change.path] = False  # mlx-lm quantizes nothing here: dense, or NF4 by tensors
    return dict(sorted({**plain, "quantization": stated, "quantization_config": stated}.items()))


def modules_of(
    base: BaseModel, changes: list[Change], pack: Pack | None = None
) -> list[tuple[str, nn.Module]]:
    """Dense modules that compute what the written ones will, for a base that is loaded."""
    modules = dict(base.model.named_modules())
    made = []
    for change in changes:
        module = modules[change.path]
        weight = _as_loaded(change, mx.float32 if on_cpu() else _dtype_of(module))
        if is_switch_linear(module):
            from mlx_lm.models.switch_layers import SwitchLinear

            dense = SwitchLinear(1, 1, 1, bias="bias" in module)
        elif isinstance(module, (nn.Linear, *LINEARS)):
            dense = nn.Linear(1, 1, bias="bias" in module)
        else:
            dense = nn.Embedding(1, 1)
        dense.weight = weight
        if "bias" in module:
            dense.bias = module.bias
        dense.freeze()
        mx.eval(dense.parameters())
        made.append((change.path, dense))
    known = {path for path, _ in made}
    whole = replaced_of(pack.manifest) if pack is not None else {}
    if whole := [n for n in whole if n.rpartition(".")[0] not in known]:
        made += full_tensor_modules(base.model, whole, pack.load_tensors(), str(pack.path))
    return made


def _as_loaded(change: Change, dtype: mx.Dtype) -> mx.array:
    """The weight that the written tensors stand for, in the dtype in which it is multiplied."""
    if change.weight_format is None:
        return change.weight.astype(dtype)
    tensors = change.weight_format.quantize(f"{change.path}.weight", change.weight)
    return change.weight_format.dequantize(tensors, dtype)


def plan_of(
    pack: Pack,
    model: str | Path,
    requantize: str,
    dtype: str = "auto",
    max_shard_gb: float = 1.0,
    trust_remote_code: bool = False,
    facts: Mapping | None = None,
) -> Plan:
    """The merged checkpoint as the writer of `packs quantize` takes it; reads headers only."""
    planned = _planned(pack, model, requantize, dtype, trust_remote_code)
    base, source = planned.base, base_files.resolve_checkpoint(model)
    foreign = base_files.stored_quantization(base.config).get("quant_method") == METHOD
    native = requantize in FORMATS and FORMATS[requantize].native
    spelled = "bitsandbytes" if foreign and requantize != "none" and not native else "mlx"
    named = _own_names(base, source, planned, spelled)
    config = planned.config
    if named is None or (foreign and native):
        named = _names_of_model(base, planned)
        spelled, names = "mlx", "mlx-lm"
    else:
        names = "base"
    if spelled == "bitsandbytes":
        config = _stored_config(source)
    raw, places, turned = named
    modules = dict(base.model.named_modules())
    by_name = {f"{places[c.path]}.weight": c for c in planned.changes}
    gone = {name for c in planned.changes for name in raw if _belongs(name, places[c.path])} - set(
        by_name
    )
    bare = {
        f"{places.get(n.rpartition('.')[0], n.rpartition('.')[0])}.{n.rpartition('.')[2]}": t
        for n, t in planned.tensors.items()
    }
    items, tensors = [], {}
    quantized_sizes, wanted = _true_sizes(modules, places), _DTYPES[dtype]
    for name, tensor in raw.items():
        if name in gone:
            continue
        weight_format = None
        size = quantized_sizes.get(name, tensor.size)
        if change := by_name.get(name):
            tensor, weight_format = change.weight, change.weight_format
            if turned and turned(change.path):
                tensor = tensor.T
            size = tensor.size
        elif name in bare:
            tensor = bare[name].astype(wanted or tensor.dtype)
        items.append(Item.of(name, tensor, weight_format, spelled, size))
        tensors[name] = tensor
    options = dataclasses.replace(planned.options, layout=spelled, max_shard_gb=max_shard_gb)
    stated = base_files.stored_quantization(config)
    short = {k: v for k, v in stated.items() if not isinstance(v, dict) and v is not False}
    merged = {**(facts or {}), "changed": len(planned.changes) + len(bare), "names": names}
    shards = quantize.in_shards(items, max_shard_gb)
    return Plan(options, tensors, shards, config, base.fingerprint, {}, short or None, merged)


def _stored_config(source: Path) -> dict:
    return json.loads((source / "config.json").read_text(encoding="utf-8"))


def _belongs(name: str, place: str) -> bool:
    """Whether a tensor of a file is a part of the weight of the module called so."""
    if not name.startswith(f"{place}."):
        return False
    rest = name.removeprefix(f"{place}.")
    return rest == "weight" or rest in _PARTS or rest.startswith("weight.")


def _true_sizes(modules: Mapping[str, nn.Module], places: Mapping[str, str]) -> dict[str, int]:
    """Weights that each stored tensor stands for, where it is packed; none for its scales."""
    sizes = {}
    for path, module in modules.items():
        if stored := format_of(module):
            place = places.get(path, path)
            sizes[f"{place}.weight"] = module.weight.nbytes * 8 // stored.bits
            sizes |= {f"{place}.{part}": 0 for part in _PARTS}
    return sizes


def _own_names(base: BaseModel, source: Path, planned: _Planned, spelled: str):
    """The base's tensors as its files name them, where each change has its place among them.

    Returns: tensors, the name of each changed module in the files, and which of them lie turned
    round there (GPT-2's); None if mlx-lm has other names or shapes for a module that changes.
    """
    raw: dict[str, mx.array] = {}
    for file in base_files.weight_files(source):
        raw |= mx.load(str(file))
    modules = dict(base.model.named_modules())
    gpt2 = base.config["model_type"] == "gpt2"
    places = {}
    wanted = [c.path for c in planned.changes]
    wanted += [name.rpartition(".")[0] for name in planned.tensors]
    for path in wanted:
        short = path.removeprefix("model.")
        origin = base.weight_map.get(f"{path}.weight")
        known = [origin.removesuffix(".weight")] if isinstance(origin, str) else []
        for place in (
            (path, short, f"transformer.{short}") if gpt2 else (path, f"bert.{path}", *known)
        ):
            if any(f"{place}.{part}" in raw for part in ("weight", "bias")):
                places[path] = place
                break
        else:
            return None
    by_path = {c.path: c for c in planned.changes}
    for path, place in places.items():
        change = by_path.get(path)
        if change is None:
            continue
        stored = format_of(modules[path])
        if gpt2 and place != path and isinstance(modules[path], nn.Linear):
            if change.weight_format:
                return None
            continue
        # what scales are called beside a weight of another name is not known
        if place != path and (stored or change.weight_format):
            return None
        if stored is None and tuple(raw[f"{place}.weight"].shape) != tuple(change.weight.shape):
            return None
        if spelled == "mlx" and change.weight_format and f"{place}.weight.absmax" in raw:
            return None

    def turned(path: str) -> bool:
        return gpt2 and places[path] != path and isinstance(modules[path], nn.Linear)

    return raw, places, turned


def _names_of_model(base: BaseModel, planned: _Planned):
    tensors = dict(tree_flatten(base.model.parameters()))
    return tensors, {c.path: c.path for c in planned.changes}, None
