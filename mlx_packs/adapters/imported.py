"""Attach inference-only adapters: DoRA, adapters on embeddings, and tensors stored in full.

`lora.attach` puts the trainable kinds in place; these go on top of it, and `detach` takes them off
with the rest.
"""

import copy
from collections.abc import Collection, Iterable, Mapping

import mlx.nn as nn

from ..errors import PackError
from ..nn.imported import AdaptedEmbedding, DoRALinear
from ..nn.quantized import (
    EMBEDDINGS,
    LINEARS,
    QUANTIZED,
    TransientEmbedding,
    TransientLinear,
    dense_module,
    dense_weight,
)
from ..runtime import mx
from .lora import Attached
from .spec import ModuleSpec, Specs, factor_names

_KINDS = {
    "dora": ((nn.Linear, *LINEARS, TransientLinear), "a linear"),
    "embedding": ((nn.Embedding, *EMBEDDINGS, TransientEmbedding), "an embedding"),
}


def is_inference_only(spec: ModuleSpec) -> bool:
    """Return whether an adapter is of a kind that is applied but not trained here."""
    return spec.kind != "lora"


def attach_inference_only(
    attached: Attached,
    specs: Specs,
    replaced: Collection[str],
    tensors: Mapping[str, mx.array],
    where: str,
) -> None:
    """Put the tensors ``replaced``, then DoRA and embeddings' adapters, on top of trainable kinds.

    Tensors have names and shapes of the pack, which errors call ``where``.
    """
    attached.inference_only = bool(specs or replaced)
    attached.swap(full_tensor_modules(attached.model, replaced, tensors, where))
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
        module = _bare(modules.get(path))
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


def _bare(module: nn.Module | None) -> nn.Module | None:
    """Return the module that one of a matmul path replaces."""
    if isinstance(module, TransientLinear):
        return module.linear
    return module.embedding if isinstance(module, TransientEmbedding) else module


def _adapted(
    module: nn.Module | None, spec: ModuleSpec, tensors: Mapping[str, mx.array], where: str
) -> nn.Module:
    path = spec.path
    types, kind = _KINDS[spec.kind]
    if not isinstance(module, types):
        actual = "nothing" if module is None else f"a {type(module).__name__}"
        raise PackError(
            f"{where}: {path}: the adapter is for {kind}, but the base has {actual}.", "mismatch"
        )
    bare = _bare(module)
    weight = dense_weight(bare)
    (part,) = spec.slices
    shape = (spec.in_features, part.width)
    if tuple(weight.shape) != (shape if spec.kind == "embedding" else shape[::-1]):
        raise PackError(
            f"{where}: {path}: the adapter is for {spec.in_features} x {part.width}, "
            f"but the base's weight is {list(weight.shape)}.",
            "mismatch",
        )
    a, b = (tensors[name] for name in factor_names(path))
    if spec.kind == "embedding":
        return AdaptedEmbedding(module, a, b, part.scale, spec.head is not False)
    m = tensors[f"{path}.m"]
    return DoRALinear(module, weight, a, b, m, part.scale, bare.get("bias"))
