"""The pack of what was trained on a base or is from elsewhere, and a pack attached to its base."""

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from .. import runtime
from ..adapters.attach import attach, tied_tables
from ..adapters.full_tensors import with_stored
from ..adapters.lora import Attached
from ..adapters.spec import Specs, check_shapes, weights_of
from ..adapters.trainable import Trainable
from ..bases.families import has_vision_tower
from ..bases.fingerprint import text_hashes
from ..bases.geometry import Group, Heads
from ..bases.loading import lazy_base
from ..errors import PackError
from ..nn.surgery import block_prefixes
from ..reading import read_header
from ..runtime import mx
from .compatibility import check_base, check_checkpoint
from .manifest import ADAPTERS, FORMAT_VERSION, replaced_json, replaced_of, shapes_of, spec_json
from .pack import Pack

if TYPE_CHECKING:
    from ..bases.model import BaseModel


def attach_pack(base: "BaseModel", pack: Pack, matmul_path: str = "quantized") -> Attached:
    check_base(pack, base)

    tensors = pack.load_tensors()
    fallback = bool(pack._part("recipe").get("train_fp16_fallback"))
    where = str(pack.path / ADAPTERS) if pack.path else "pack"
    check_shapes(shapes_of(pack.manifest), {n: t.shape for n, t in tensors.items()}, where)

    attached = attach(base, specs=pack.specs, matmul_path=matmul_path, fp16_fallback=fallback)
    attached = with_stored(attached, replaced_of(pack.manifest), tensors, where)
    base.model.eval()
    return attached


def check_fit(pack: Pack, model: str, trust_remote_code: bool = False) -> dict:
    """Report on a saved pack that fits a base, without its weights; a PackError if it does not."""
    pack.verify()
    check_checkpoint(pack, model)
    base = lazy_base(model, trust_remote_code)
    # as it will be once it is loaded
    base.quantization = pack.manifest["base"]["quantization"] or {}

    modules = dict(base.model.named_modules())
    if missing := next((path for path in pack.specs if path not in modules), None):
        raise PackError(f"{pack.path}: {missing}: {model} has no such module.", "mismatch")
    attach_pack(base, pack).detach()

    return {
        "pack": str(pack.path),
        "model": str(model),
        "fits": True,
        "geometry": "checked",
        "fingerprint": pack.manifest["base"]["fingerprint"],
        "projections": len(pack.specs),
        "full_tensors": len(replaced_of(pack.manifest)),
        "dtype": sorted({t["dtype"] for t in read_header(pack.path / ADAPTERS)[0].values()}),
        "pack_mb": round(pack.size_mb, 3),
    }


def pack_of(attached: Trainable, dtype: str = "float32", **facts: object) -> Pack:
    """``facts`` are optional parts of the manifest."""
    adapters = {
        "parameters": weights_of(attached.specs.values())
        + sum(math.prod(shape) for shape in attached.replaced.values()),
        "groups": group_paths(attached.groups),
        "dtype": dtype,
    }
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
    facts_of_base = {
        "id": base.public_name,
        "fingerprint": base.fingerprint,
        "text_files": text_hashes(base.path),
        "model_type": base.config["model_type"],
        "quantization": base.quantization or None,
        "num_layers": len(block_prefixes(base.model)),
        "num_heads": heads.heads,
        "num_kv_heads": heads.kv_heads,
        "head_dim": heads.head_dim,
        "hidden_size": heads.hidden,
    }
    if has_vision_tower(base.config):
        facts_of_base["takes_images"] = True

    return {
        "format_version": FORMAT_VERSION,
        "base": facts_of_base,
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

    adapters["groups"] = group_paths(attached.groups)
    return pack
