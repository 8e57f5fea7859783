"""Attach adapters to a base: which of its modules get one, of which rank, and how it is used.

Methods that put a variant of LoRA in its place attach it first.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import mlx.nn as nn

from ..bases.geometry import Geometry, GeometryError, Group, find_groups, linears
from ..bases.supported import check_trainable
from ..config.lora import LoRAConfig
from ..errors import PackError
from ..nn.frozen_weight import frozen_weight
from ..nn.lora import GroupedLoRA, is_switch_linear
from ..nn.quantized import HalfLinear, apply_matmul_path
from ..nn.surgery import replace_modules
from ..nn.tables_on_disk import read_tables
from ..runtime import mx
from .lora import Attached, add_adapters
from .spec import ModuleSpec, SliceSpec, Specs, factor_shapes

if TYPE_CHECKING:
    from ..bases.model import BaseModel
    from ..config.schema import TrainConfig


class LoRA:
    """Low-rank adapters beside frozen weights: y = W x + (alpha / r) B A x.

    Methods that begin with other factors, or add magnitudes, are subclasses.

    Attributes:
        is_whole: whether a projection of several slices has one adapter.
    """

    is_whole: ClassVar[bool] = False

    def check(self, base: "BaseModel", matmul_path: str) -> None:
        """Accept every base; `attach` checks what it targets."""

    def attach(
        self, base: "BaseModel", lora: LoRAConfig, train: "TrainConfig", matmul_path: str
    ) -> Attached:
        """Attach adapters as the method begins with them; no output changes."""
        how = (matmul_path, train.seed, train.train_fp16_fallback, self.is_whole)
        attached = attach(base, lora, None, *how)
        try:
            return self.initialize(attached)
        except BaseException:
            attached.detach()
            raise

    def initialize(self, attached: Attached) -> Attached:
        """Return fresh adapters (B = 0) as the method begins with them."""
        return attached

    def adapter_shapes(self, specs: Specs) -> list[tuple[int, ...]]:
        return factor_shapes(specs)

    def kept_numbers(self, spec: ModuleSpec) -> int:
        return spec.rank


def attach(
    base: "BaseModel",
    lora: LoRAConfig | None = None,
    specs: Specs | None = None,
    matmul_path: str = "quantized",
    seed: int = 0,
    fp16_fallback: bool = False,
    is_whole: bool = False,
) -> Attached:
    """Attach fresh adapters (B = 0: no logit changes) to a base without any.

    ``lora`` says where and how large, for training; or ``specs`` exactly which, as a pack's
    manifest has them (none at all is allowed). With ``fp16_fallback`` modules whose geometry
    cannot be probed are dequantized to fp16; without it they are a PackError, and so is a target
    that does not exist. ``seed`` is of the values of A. If ``is_whole``, a projection of several
    slices has one adapter.
    """
    check_bare(base)
    if specs is None:
        check_trainable(base.name, base.model)
    lora = lora or LoRAConfig()

    names = lora.target_modules if specs is None else specs
    read_tables(base.model, names)
    groups, fallback, notes = _probed(base, lora, specs, fp16_fallback)
    if not groups and specs != {}:
        raise PackError("--target-modules: no projection gets an adapter.", "unknown")
    if specs is None:
        specs = with_heads(plan_specs(groups, lora), base.model)
    if is_whole:
        specs = {path: _with_one_slice(spec) for path, spec in specs.items()}

    attached = Attached(base, specs, groups, notes)
    try:
        attached.swap(fallback)
        modules = dict(base.model.named_modules())
        attached.frozen = {path: modules[path] for path in specs}
        attached.note_replaced(apply_matmul_path(base.model, matmul_path, base.is_lazy))
        add_adapters(attached, lora.dropout, seed)
        base.model.train(base.model.training)  # new modules join the mode of the rest
    except BaseException:
        attached.detach()
        raise
    return attached


def _with_one_slice(spec: ModuleSpec) -> ModuleSpec:
    if len(spec.slices) == 1:
        return spec

    first = max(spec.slices, key=lambda part: part.rank)
    name = spec.path.rpartition(".")[2]
    whole = SliceSpec(name, spec.out_features, first.rank, first.alpha)
    return replace(spec, slices=(whole,))


def _probed(
    base: "BaseModel", lora: LoRAConfig, specs: Specs | None, fp16_fallback: bool
) -> tuple[list[Group], list[tuple[str, nn.Module]], list[str]]:
    """Return the projections that get adapters, fp16 copies of those not probed, and notes."""
    groups = []
    faults = []
    if specs is None:
        where = lora.target_modules, lora.num_layers, lora.modules_to_save
        groups, faults = find_groups(base.model, base.config, *where)
    elif specs:
        groups, faults = find_groups(base.model, base.config, tuple(specs), -1)

    if faults and not fp16_fallback:
        raise faults[0]

    copies, notes = fp16_copies(base, faults)
    groups = groups + [Group(None, (geometry,)) for geometry, _ in copies]

    if specs is None and not lora.target_modules:
        groups, left_out = without_narrow(groups, lora)
        notes += left_out + experts_note(base.model)
    return groups, [(geometry.path, module) for geometry, module in copies], notes


def check_bare(base: "BaseModel") -> None:
    if any(isinstance(m, GroupedLoRA) for m in base.model.modules()):
        raise PackError(f"{base.name}: has adapters already. Detach them first.", "conflict")


def check_linears(attached: Attached, method: str) -> None:
    """Raise a PackError if an adapter is for an embedding or for a stack of experts."""
    for path, spec in attached.specs.items():
        fault = ""
        if spec.kind == "embedding":
            fault = "is an embedding, which has only LoRA. Name it in --modules-to-save, leave it"
        elif spec.experts is not None:
            fault = "is a stack of experts, which it cannot adapt. Leave it"
        if fault:
            raise PackError(
                f"--method {method}: {path} {fault} out of --target-modules, or take --method "
                "lora.",
                "unsupported",
            )


def install(attached: Attached, make: Callable[[GroupedLoRA], GroupedLoRA]) -> None:
    """Put another kind of group in the place of every group of adapters."""
    modules = attached.model.named_modules()
    loras = [(path, module) for path, module in modules if type(module) is GroupedLoRA]
    others = {id(lora): make(lora) for _, lora in loras}
    attached.swap([(path, others[id(lora)]) for path, lora in loras])
    attached.places = {
        path: replace(place, lora=others[id(place.lora)]) for path, place in attached.places.items()
    }


def weight_of(path: str, module: nn.Module, lazy: bool = False) -> mx.array:
    """Return the dense weight [O, D] of a frozen module in float32; PackError if it has none.

    A ``lazy`` one is not read.
    """
    remedy = ". Use --method lora, which needs no dense weights."
    return _dense_weight(path, module, mx.float32, lazy, "unsupported", remedy)


def _dense_weight(
    path: str, module: nn.Module, dtype: mx.Dtype, lazy: bool, code: str, remedy: str
) -> mx.array:
    try:
        weight = frozen_weight(module).dense().astype(dtype)
        if not lazy:
            mx.eval(weight)
    except (ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise PackError(f"{path}: cannot be dequantized: {reason}{remedy}", code) from None
    return weight


def plan_specs(groups: list[Group], lora: LoRAConfig) -> Specs:
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
                # a spec's scale is alpha / rank, so rsLoRA's scale is in its alpha
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


def without_narrow(groups: list[Group], lora: LoRAConfig) -> tuple[list[Group], list[str]]:
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
    """Return the tensors of tables that are both the embedding and the head."""
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
        weight = _dense_weight(fault.path, module, mx.float16, False, "unreadable", "")
        half = HalfLinear(weight, module.get("bias"))

        out, width = half.weight.shape
        name = fault.path.rsplit(".", 1)[-1]
        has_bias = "bias" in module
        slices = ((name, out),)
        geometry = Geometry(fault.path, width, out, None, None, None, width, has_bias, slices)
        copies.append((geometry, half))
        notes.append(f"{fault.path}: geometry could not be probed, dequantized to fp16")
    return copies, notes
