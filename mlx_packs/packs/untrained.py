"""Packs of adapters from elsewhere that fit a base."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..adapters.imported import is_inference_only
from ..adapters.spec import Specs
from ..runtime import mx
from .attaching import attach_pack
from .making import group_paths, manifest_of, modules_json
from .pack import Pack

if TYPE_CHECKING:
    from ..bases.model import BaseModel


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
