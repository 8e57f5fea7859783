"""Attach what is applied but not trained: DoRA, adapters on embeddings, modules brought whole.

`adapters.attach` has put the trainable kinds in place; these go on top of it, and `detach` takes
them off with the rest.
"""

import copy
from collections.abc import Mapping

import mlx.nn as nn

from ..errors import PackError
from ..nn.imported import AdaptedEmbedding, DoRALinear
from ..nn.quantized import (
    EMBEDDINGS,
    LINEARS,
    TransientEmbedding,
    TransientLinear,
    dense_module,
    dequantized_weight,
)
from ..runtime import mx
from .lora import Attached
from .spec import ModuleSpec, Specs

_KINDS = {
    "dora": ((nn.Linear, *LINEARS, TransientLinear), "a linear"),
    "embedding": ((nn.Embedding, *EMBEDDINGS, TransientEmbedding), "an embedding"),
}


def is_inference_only(spec: ModuleSpec) -> bool:
    """Whether an adapter is of a kind that is not trained here."""
    return spec.kind != "lora"


def attach_inference_only(
    attached: Attached,
    specs: Specs,
    replaced: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, mx.array],
    where: str,
) -> None:
    """Put modules that are brought whole, then DoRA and embeddings' adapters, on a base.

    Args:
        specs: those of fixed kinds.   replaced: names and shapes of whole tensors.
    Raises: PackError naming the first module that does not fit.
    """
    wanted = dict(replaced)
    for spec in specs.values():
        wanted |= spec.shapes
    for name, shape in wanted.items():
        found = tuple(tensors[name].shape) if name in tensors else "missing"
        if found != shape:
            raise PackError(f"{where}: {name} is {found}, must be {shape}.")
    attached.swap(full_tensor_modules(attached.model, replaced, tensors, where))
    modules = dict(attached.model.named_modules())
    attached.swap(
        [
            (path, _adapted(path, modules.get(path), spec, tensors, where))
            for path, spec in specs.items()
        ]
    )


def full_tensor_modules(
    model: nn.Module, names: Mapping[str, object], tensors: Mapping[str, mx.array], where: str
) -> list[tuple[str, nn.Module]]:
    """A copy of each module with its own tensors, dense where the base's is packed."""
    modules = dict(model.named_modules())
    by_path: dict[str, dict[str, mx.array]] = {}
    for name in names:
        path, _, parameter = name.rpartition(".")
        by_path.setdefault(path, {})[parameter] = tensors[name]
    made = []
    for path, parameters in by_path.items():
        module = _bare(modules.get(path))
        if module is None or not all(isinstance(module.get(p), mx.array) for p in parameters):
            raise PackError(f"{where}: {path}: the base has no such module to replace.", "mismatch")
        packed = isinstance(module, (*LINEARS, *EMBEDDINGS))
        mine = dense_module(module) if packed else copy.copy(module)
        for parameter, tensor in parameters.items():
            if tensor.shape != mine[parameter].shape:
                raise PackError(
                    f"{where}: {path}.{parameter} is {list(tensor.shape)}, but the "
                    f"base's is {list(mine[parameter].shape)}."
                )
            mine[parameter] = tensor.astype(mine[parameter].dtype)
        mine.freeze()
        made.append((path, mine))
    return made


def _bare(module: nn.Module | None) -> nn.Module | None:
    """What a matmul path stands in for."""
    if isinstance(module, TransientLinear):
        return module.linear
    return module.embedding if isinstance(module, TransientEmbedding) else module


def _adapted(
    path: str,
    module: nn.Module | None,
    spec: ModuleSpec,
    tensors: Mapping[str, mx.array],
    where: str,
) -> nn.Module:
    types, kind = _KINDS[spec.kind]
    if not isinstance(module, types):
        found = "nothing" if module is None else f"a {type(module).__name__}"
        raise PackError(f"{where}: {path}: the adapter is for {kind}, but the base has {found}.")
    bare = _bare(module)
    packed = isinstance(bare, (*LINEARS, *EMBEDDINGS))
    weight = dequantized_weight(bare) if packed else bare.weight
    (part,) = spec.slices
    shape = (spec.in_features, part.width)
    if tuple(weight.shape) != (shape if spec.kind == "embedding" else shape[::-1]):
        raise PackError(
            f"{where}: {path}: the adapter is for {spec.in_features} x {part.width}, "
            f"but the base's weight is {list(weight.shape)}."
        )
    a, b = tensors[f"{path}.lora_a"], tensors[f"{path}.lora_b"]
    if spec.kind == "embedding":
        return AdaptedEmbedding(module, a, b, part.scale, spec.head is not False)
    m = tensors[f"{path}.m"]
    return DoRALinear(module, weight, a, b, m, part.scale, bare.get("bias"))
