"""The pack of what was trained on a base, and of adapters from elsewhere that fit one."""

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from .. import runtime
from ..adapters.imported import is_inference_only
from ..adapters.spec import Specs, weights_of
from ..adapters.targets import tied_tables
from ..adapters.trainable import Trainable
from ..bases.fingerprint import sampled_fingerprint, text_hashes
from ..bases.shapes import Group, Heads
from ..nn.surgery import block_prefixes
from ..runtime import mx
from .attaching import attach_pack
from .manifest import FORMAT_VERSION, replaced_json, spec_json
from .pack import Pack

if TYPE_CHECKING:
    from ..bases.model import BaseModel


def pack_of(attached: Trainable, dtype: str = "float32", **facts: object) -> Pack:
    """``facts`` are optional parts of the manifest."""
    adapters = {
        "parameters": weights_of(attached.specs.values())
        + sum(math.prod(shape) for shape in attached.replaced.values()),
        "groups": group_paths(attached.groups),
        "dtype": dtype,
    }
    if attached.for_merge != "none":
        adapters["for_merge"] = attached.for_merge
    adapters |= modules_json(attached.base, attached.specs, attached.replaced)

    facts = {"method": attached.method, **facts}
    tensors = {n: t.astype(getattr(mx, dtype)) for n, t in attached.tensors().items()}
    return Pack(manifest_of(attached.base, adapters, facts), tensors)


def group_paths(groups: Iterable[Group]) -> list[list[str]]:
    return [[geometry.path for geometry in group.members] for group in groups]


def modules_json(
    base: "BaseModel", specs: Specs, replaced: Mapping[str, tuple[int, ...]]
) -> dict[str, list]:
    """Each module with the tensor of the base's files that it adapts."""
    origins = {path: base.weight_map.get(f"{path}.weight") for path in specs}
    modules = {"modules": [spec_json(spec, origins[path]) for path, spec in specs.items()]}
    if replaced:
        heads = tied_tables(base.model, replaced) if specs else ()
        modules["replaced"] = [replaced_json(n, s, n in heads) for n, s in replaced.items()]
    return modules


def manifest_of(base: "BaseModel", adapters: dict, facts: Mapping[str, object]) -> dict:
    """``facts`` are optional parts of the manifest."""
    heads = Heads.of(base.config)
    return {
        "format_version": FORMAT_VERSION,
        "base": {
            "id": base.public_name,
            "fingerprint": base.fingerprint,
            "sampled_fingerprint": sampled_fingerprint(base.path),
            "text_files": text_hashes(base.path),
            "model_type": base.config["model_type"],
            "quantization": base.quantization or None,
            "num_layers": len(block_prefixes(base.model)),
            "num_heads": heads.heads,
            "num_kv_heads": heads.kv_heads,
            "head_dim": heads.head_dim,
            "hidden_size": heads.hidden,
        },
        "adapters": adapters,
        "versions": versions_line(),
        **facts,
    }


def versions_line() -> dict[str, str]:
    return {**runtime.versions(), "device": runtime.device_name()}


def untrained_pack(
    base: "BaseModel",
    specs: Specs,
    tensors: Mapping[str, mx.array],
    full_tensors: Mapping[str, mx.array] | None = None,
    **facts: object,
) -> Pack:
    """A pack of adapters from another source, after checking each against the base model.

    Tensors have their names on disk; ``full_tensors`` replace tensors of the base model. ``facts``
    are optional parts of the manifest.
    """
    full_tensors = full_tensors or {}

    factors = [shape for spec in specs.values() for shape in spec.shapes.values()]
    adapters = {
        "parameters": sum(math.prod(shape) for shape in factors),
        "groups": [],
        **modules_json(base, specs, {n: t.shape for n, t in full_tensors.items()}),
    }

    pack = Pack(manifest_of(base, adapters, facts), {**tensors, **full_tensors})
    attached = attach_pack(base, pack)
    attached.detach()

    inference_only = [[path] for path, spec in specs.items() if is_inference_only(spec)]
    adapters["groups"] = group_paths(attached.groups) + inference_only
    return pack
