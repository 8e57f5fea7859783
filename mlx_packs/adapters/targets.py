"""Selection of the projections that get adapters, and of their rank and alpha."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import mlx.nn as nn

from ..bases.families import is_of_projector
from ..bases.geometry import Geometry, GeometryError, Group, linears
from ..errors import PackError
from ..nn.frozen_weight import frozen_weight
from ..nn.lora import is_switch_linear
from ..nn.quantized import HalfLinear
from ..nn.surgery import replace_modules
from ..runtime import mx
from ..vision import projector
from .spec import ModuleSpec, SliceSpec, Specs

if TYPE_CHECKING:
    from ..bases.model import BaseModel
    from ..config.lora import LoRAConfig


def open_projector(base: "BaseModel", names: Iterable[str]) -> None:
    """Make the projector of a vision tower a part of a base if names of modules ask for it."""
    if any(map(is_of_projector, names)):
        projector.open_projector(base)


def plan_specs(groups: list[Group], lora: "LoRAConfig") -> Specs:
    """Return rank and alpha of every slice under a LoRAConfig, which must fit the projections."""
    specs: Specs = {}
    used: set[str] = set()

    for geometry in (g for group in groups for g in group.members):
        slices = []
        for name, width in geometry.slices:
            path = f"{geometry.path}.{name}" if len(geometry.slices) > 1 else geometry.path

            rank = lora.rank
            if rank_key := match_pattern(lora.rank_pattern, path):
                rank = lora.rank_pattern[rank_key]
                used.add(rank_key)
            alpha = lora.alpha
            if alpha_key := match_pattern(lora.alpha_pattern, path):
                alpha = lora.alpha_pattern[alpha_key]
                used.add(alpha_key)

            limit = min(geometry.in_features, width)
            if rank > limit:
                raise PackError(
                    f"--rank {rank}: {path} is {geometry.in_features} x {width}. Its rank can be "
                    f"at most {limit}."
                )

            if alpha is None:
                alpha = 2.0 * rank
            if lora.rslora:
                # a spec's scale is alpha / rank, so that of rsLoRA is in its alpha
                alpha *= math.sqrt(rank)
            slices.append(SliceSpec(name, width, rank, alpha))

        kind = "embedding" if geometry.embeds else "lora"
        specs[geometry.path] = ModuleSpec(
            geometry.path, geometry.in_features, tuple(slices), geometry.experts, kind
        )

    if unused := (set(lora.rank_pattern) | set(lora.alpha_pattern)) - used:
        pattern = sorted(unused)[0]
        flag = "--rank-pattern" if pattern in lora.rank_pattern else "--alpha-pattern"
        raise PackError(f"{flag}: '{pattern}' fits no projection.", "unknown")
    return specs


def match_pattern(pattern: Mapping[str, float], path: str) -> str | None:
    """Return the first key of a pattern that fits a path, by PEFT's rule."""
    return next((key for key in pattern if re.match(rf"(.*\.)?({key})$", path)), None)


def without_narrow(groups: list[Group], lora: "LoRAConfig") -> tuple[list[Group], list[str]]:
    """Return the groups without linears that are not named and too narrow, and notes on those.

    Such are gates and steps by head of a recurrence or a mixture. If that were all of them, they
    stay, and `plan_specs` reports what is wrong with the rank. So does a projection of a grouped
    block.
    """

    def is_narrow(group: Group) -> bool:
        (geometry, *others) = group.members
        limit = min(geometry.in_features, *geometry.widths)
        named = match_pattern(lora.rank_pattern, geometry.path)
        return group.block is None and not others and not named and lora.rank > limit

    wide = [group for group in groups if not is_narrow(group)]
    if not wide or len(wide) == len(groups):
        return groups, []

    names = sorted({group.members[0].name for group in groups if is_narrow(group)})
    return wide, [f"{', '.join(names)}: narrower than rank {lora.rank}, have no adapter"]


def with_heads(specs: Specs, model: nn.Module) -> Specs:
    """Return specs that have whether an adapted embedding acts as the head."""
    paths = [path for path, spec in specs.items() if spec.kind == "embedding"]
    heads = used_as_heads(model, paths)
    return {p: replace(spec, head=heads.get(p) or spec.head) for p, spec in specs.items()}


def used_as_heads(model: nn.Module, paths: Collection[str]) -> dict[str, bool]:
    """Return which embeddings a model multiplies by for its logits, as a tied head; by path.

    The model is called, and nothing is computed. One that is no language model has none.
    """
    modules = dict(model.named_modules())
    used = dict.fromkeys(paths, False)
    if not used:
        return used

    probes = [
        (path, _HeadProbe(modules[path], partial(used.__setitem__, path, True))) for path in paths
    ]
    replace_modules(model, probes)

    try:
        model(mx.array([[1, 2]]))
    except AttributeError as error:
        raise PackError(
            f"--target-modules: {', '.join(paths)}: the model does not call every one of them, but "
            f"reads its arrays itself ({error}). Leave those out.",
            "unsupported",
        ) from None
    finally:
        replace_modules(model, [(path, modules[path]) for path in paths])
    return used


def tied_tables(model: nn.Module, tensors: Iterable[str]) -> set[str]:
    """Return those of the tensors that are tables of embeddings and the head as well."""
    modules = dict(model.named_modules())
    paths = [name.removesuffix(".weight") for name in tensors]
    tables = [path for path in paths if hasattr(modules.get(path), "as_linear")]
    return {f"{path}.weight" for path, used in used_as_heads(model, tables).items() if used}


class _HeadProbe(nn.Module):
    """An embedding that reports that it is used as a head."""

    def __init__(self, embedding: nn.Module, report: Callable[[], None]) -> None:
        super().__init__()
        self.embedding = embedding
        self._report = report

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.embedding(tokens)

    def as_linear(self, x: mx.array) -> mx.array:
        self._report()
        return self.embedding.as_linear(x)


def experts_note(model: nn.Module) -> list[str]:
    """Return a note that experts have no adapters unless named, if a model has experts."""
    names = {path.rpartition(".")[2] for path, m in linears(model) if is_switch_linear(m)}
    if not names:
        return []
    return [f"experts get adapters only where named: --target-modules {','.join(sorted(names))}"]


def fp16_copies(
    base: "BaseModel", faults: list[GeometryError]
) -> tuple[list[tuple[Geometry, nn.Module]], list[str]]:
    """Return geometry and fp16 copy of each module that could not be probed, and notes on them."""
    copies = []
    notes = []
    modules = dict(base.model.named_modules())

    for fault in faults:
        module = modules[fault.path]
        if is_switch_linear(module):
            raise fault
        try:
            weight = frozen_weight(module).dense().astype(mx.float16)
            half = HalfLinear(weight, module.get("bias"))
            mx.eval(half.parameters())
        except (ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise PackError(
                f"{fault.path}: cannot be dequantized: {reason}", "unreadable"
            ) from None

        out, width = half.weight.shape
        name = fault.path.rsplit(".", 1)[-1]
        has_bias = "bias" in module
        slices = ((name, out),)
        geometry = Geometry(fault.path, width, out, None, None, None, width, has_bias, slices)
        copies.append((geometry, half))
        notes.append(f"{fault.path}: geometry could not be probed, dequantized to fp16")
    return copies, notes
