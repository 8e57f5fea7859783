"""Attach what is applied and not trained as it is attached: DoRA, and tensors stored in full.

`lora.attach` puts the trainable kinds in place; these go on top of it, and `detach` takes them off
with the rest.
"""

import copy
from collections.abc import Collection, Iterable, Mapping

import mlx.nn as nn

from ..errors import PackError
from ..nn.dora import DoRALinear
from ..nn.frozen_weight import frozen_weight
from ..nn.quantized import LINEARS, QUANTIZED, TransientLinear, bare_module, dense_module
from ..runtime import mx
from .lora import Attached
from .score_head import stored_score_head
from .spec import SCORE_WEIGHT, ModuleSpec, Specs, factor_names

_LINEARS = (nn.Linear, *LINEARS, TransientLinear)


def is_inference_only(spec: ModuleSpec) -> bool:
    """Return whether an adapter is of a kind that is applied but not trained here."""
    return spec.kind == "dora"


def attach_inference_only(
    attached: Attached,
    specs: Specs,
    replaced: Collection[str],
    tensors: Mapping[str, mx.array],
    where: str,
) -> None:
    """Put the tensors ``replaced``, then DoRA, on top of trainable kinds; a score head beside them.

    Tensors have names and shapes of the pack, which errors call ``where``.
    """
    attached.inference_only = bool(specs or replaced)
    if SCORE_WEIGHT in replaced:
        attached.score = stored_score_head(attached.base, tensors[SCORE_WEIGHT], where)

    of_base = [name for name in replaced if name != SCORE_WEIGHT]
    attached.swap(full_tensor_modules(attached.model, of_base, tensors, where))

    modules = dict(attached.model.named_modules())
    attached.swap([(p, _adapted(modules.get(p), s, tensors, where)) for p, s in specs.items()])


def full_tensor_modules(
    model: nn.Module, names: Iterable[str], tensors: Mapping[str, mx.array], where: str
) -> list[tuple[str, nn.Module]]:
    """Return a copy of each module with the given tensors, dense where the base's is quantized."""
    modules = dict(model.named_modules())
    by_path: dict[str, dict[str, mx.array]] = {}
    for name in names:
        path, _, parameter = name.rpartition(".")
        by_path.setdefault(path, {})[parameter] = tensors[name]

    copies = []
    for path, parameters in by_path.items():
        module = bare_module(modules.get(path))
        if module is None or not all(isinstance(module.get(p), mx.array) for p in parameters):
            raise PackError(f"{where}: {path}: the base has no such module.", "mismatch")

        dense = dense_module(module) if isinstance(module, QUANTIZED) else copy.copy(module)

        for parameter, tensor in parameters.items():
            if tensor.shape != dense[parameter].shape:
                raise PackError(
                    f"{where}: {path}.{parameter} is {list(tensor.shape)}, but the base's is "
                    f"{list(dense[parameter].shape)}.",
                    "mismatch",
                )
            dense[parameter] = tensor.astype(dense[parameter].dtype)

        dense.freeze()
        copies.append((path, dense))
    return copies


def _adapted(
    module: nn.Module | None, spec: ModuleSpec, tensors: Mapping[str, mx.array], where: str
) -> nn.Module:
    path = spec.path
    if not isinstance(module, _LINEARS):
        actual = f"a {type(module).__name__}" if module is not None else "nothing"
        raise PackError(
            f"{where}: {path}: the adapter is for a linear, but the base has {actual}.", "mismatch"
        )

    bare = bare_module(module)
    weight = frozen_weight(bare).dense()
    (part,) = spec.slices
    if tuple(weight.shape) != (part.width, spec.in_features):
        raise PackError(
            f"{where}: {path}: the adapter is for {spec.in_features} x {part.width}, "
            f"but the base's weight is {list(weight.shape)}.",
            "mismatch",
        )

    a, b = (tensors[name] for name in factor_names(path))
    m = tensors[f"{path}.m"]
    return DoRALinear(module, weight, a, b, m, part.scale, bare.get("bias"))
