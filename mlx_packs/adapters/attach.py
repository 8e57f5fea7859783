"""Attach adapters to a base: which of its modules get one, and how its frozen weights are used.

Methods that put a variant of LoRA in its place attach it first.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import mlx.nn as nn

from ..bases.geometry import Group, find_groups
from ..bases.supported import check_trainable
from ..config.lora import LoRAConfig
from ..errors import PackError
from ..nn.frozen_weight import frozen_weight
from ..nn.lora import GroupedLoRA
from ..nn.quantized import apply_matmul_path
from ..nn.tables_on_disk import read_tables
from ..runtime import mx
from .lora import Attached, add_adapters
from .spec import ModuleSpec, SliceSpec, Specs, factor_shapes
from .targets import (
    experts_note,
    fp16_copies,
    open_projector,
    plan_specs,
    with_heads,
    without_narrow,
)

if TYPE_CHECKING:
    from ..bases.model import BaseModel
    from ..config.lora import LoRAConfig
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
        self, base: "BaseModel", lora: "LoRAConfig", train: "TrainConfig", matmul_path: str
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
    lora: "LoRAConfig | None" = None,
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
    open_projector(base, names)
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
    base: "BaseModel", lora: "LoRAConfig", specs: Specs | None, fp16_fallback: bool
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
        if spec.kind == "embedding":
            raise PackError(
                f"--method {method}: {path} is an embedding, which has LoRA alone. Leave it out of "
                "--target-modules, name it in --modules-to-save, or take --method lora.",
                "unsupported",
            )
        if spec.experts is not None:
            raise PackError(
                f"--method {method}: {path} is a stack of experts, which it cannot adapt. Leave it "
                "out of --target-modules, or take --method lora.",
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
    try:
        weight = frozen_weight(module).dense().astype(mx.float32)
        if not lazy:
            mx.eval(weight)
    except (ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise PackError(
            f"{path}: cannot be dequantized: {reason}. Take --method lora, which needs no "
            "dense weights.",
            "unsupported",
        ) from None
    return weight
