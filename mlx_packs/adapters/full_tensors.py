"""What a pack stores besides adapters: tensors in full, and the head of a reward or class model.

A head maps the state of a token to one or several numbers. It is beside the model's own modules,
and belongs to no base: a pack stores it as `SCORE_WEIGHT`, [outputs, hidden], which is
transformers' and PEFT's name. A reward model has one output.
"""

import copy
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import mlx.nn as nn

from ..bases.geometry import Heads
from ..errors import PackError
from ..nn.lora import adapter_key
from ..nn.quantized import QUANTIZED, bare_module, dense_module
from ..nn.tables_on_disk import read_tables
from ..runtime import mx
from .lora import Attached
from .spec import SCORE, SCORE_WEIGHT

if TYPE_CHECKING:
    from ..bases.model import BaseModel

_DEFAULT_STD = 0.02  # transformers' initializer_range, where a config has none


def fresh_score_head(base: "BaseModel", seed: int, outputs: int = 1) -> nn.Linear:
    """Return an untrained head as transformers makes it: normal, of the config's deviation."""
    text = base.config.get("text_config") or base.config
    std = text.get("initializer_range") or _DEFAULT_STD
    shape = outputs, Heads.of(base.config).hidden
    return score_head(std * mx.random.normal(shape, key=adapter_key(seed, SCORE)))


def score_head(weight: mx.array) -> nn.Linear:
    """Return a frozen head in float32 with a weight [outputs, hidden]."""
    head = nn.Linear(1, 1, bias=False)
    head.weight = weight.astype(mx.float32)
    head.freeze()
    return head


def with_score_head(model: nn.Module, head: nn.Linear) -> nn.Module:
    """Return a model with a head besides, which has all of its modules in common with ``model``."""
    scored = copy.copy(model)
    scored._no_grad = set(model._no_grad)  # a shallow copy shares it
    scored[SCORE] = head
    return scored


def _stored_score_head(base: "BaseModel", weight: mx.array, where: str) -> nn.Linear:
    """Return the head of a pack for a base; a PackError if it is not [outputs, hidden]."""
    expected = [weight.shape[0], Heads.of(base.config).hidden]
    if list(weight.shape) != expected:
        raise PackError(
            f"{where}: {SCORE_WEIGHT} is {list(weight.shape)}, but a head of {base.name} is "
            f"{expected}.",
            "mismatch",
        )
    return score_head(weight)


def with_stored(
    attached: Attached, replaced: Collection[str], tensors: Mapping[str, mx.array], where: str
) -> Attached:
    """Give fresh adapters the values of a pack's, and the base its tensors stored in full.

    They are taken off again if that fails. Adapters with magnitudes are not trained from then on.
    """
    from .dora import DoRAAttached

    specs = attached.specs
    kinds = {spec.kind for spec in specs.values()}
    try:
        if "dora" in kinds:
            if len(kinds) > 1:
                raise PackError(f"{where}: has DoRA on some of its modules only.", "unsupported")
            attached = DoRAAttached(attached)

        attached.load({n: tensors[n] for spec in specs.values() for n in spec.shapes}, where)
        if isinstance(attached, DoRAAttached):
            attached.fix()
        attached.inference_only = bool(replaced) or "dora" in kinds
        attach_full_tensors(attached, replaced, tensors, where)
    except PackError:
        attached.detach()
        raise
    return attached


def attach_full_tensors(
    attached: Attached, names: Collection[str], tensors: Mapping[str, mx.array], where: str
) -> None:
    """Put tensors in the place of the base's, and a score head beside its modules.

    Tensors have names and shapes of the pack, which errors call ``where``.
    """
    if SCORE_WEIGHT in names:
        attached.score = _stored_score_head(attached.base, tensors[SCORE_WEIGHT], where)

    of_base = [name for name in names if name != SCORE_WEIGHT]
    attached.swap(full_tensor_modules(attached.model, of_base, tensors, where))


def full_tensor_modules(
    model: nn.Module, names: Collection[str], tensors: Mapping[str, mx.array], where: str
) -> list[tuple[str, nn.Module]]:
    """Return a copy of each module with the given tensors, dense where the base's is quantized."""
    read_tables(model, (name.rpartition(".")[0] for name in names))
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
