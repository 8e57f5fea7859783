"""Attach adapters to a base and take them off again; the base's own modules are never changed.

Attaching swaps attention and SwiGLU of the Llama family for blocks with grouped projections, and
wraps any other linear; detaching puts the very same objects back. In memory adapters are grouped;
their names and shapes on disk are mlx-lm's, per projection (`Attached.tensors`).
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import mlx.nn as nn

from ..bases.families import check_trainable
from ..bases.geometry import (
    BLOCK_PROJECTIONS,
    Geometry,
    GeometryError,
    Group,
    block_prefixes,
    find_groups,
    linears,
)
from ..bases.loading import Base
from ..config.schema import LoRAConfig
from ..errors import PackError
from ..nn.blocks import GroupedAttention, GroupedMLP, is_grouped_attention, is_grouped_mlp
from ..nn.experts import AdaptedSwitchLinear, expert_weights, is_switch_linear
from ..nn.lora import AdaptedLinear, AdapterShape, GroupedLoRA, adapter_key, low_rank_delta
from ..nn.quantized import (
    LINEARS,
    HalfLinear,
    apply_matmul_path,
    dequantized_weight,
    replace_modules,
)
from ..nn.recompute import RecomputedBlock
from ..runtime import mx


@dataclass(frozen=True)
class SliceSpec:
    """Adapter of one slice of a projection; rank 0 is none."""

    name: str
    width: int
    rank: int
    alpha: float

    @property
    def scale(self) -> float:
        return self.alpha / self.rank if self.rank else 0.0


@dataclass(frozen=True)
class ModuleSpec:
    """Adapters of one projection (several slices if it is fused).

    ``experts``: the projection is a switch linear, and each of its experts has an adapter.
    ``kind``: ``lora``; what comes by import may be ``dora``, or ``embedding``, where in_features is
    the vocabulary. ``head``: the embedding is the head too, and the adapter acts there (or not).
    """

    path: str
    in_features: int
    slices: tuple[SliceSpec, ...]
    experts: int | None = None
    kind: str = "lora"
    head: bool | None = None

    @property
    def rank(self) -> int:
        """Rank on disk: of all slices together, block-diagonal."""
        return sum(s.rank for s in self.slices)

    @property
    def widths(self) -> list[int]:
        """Output columns of each slice."""
        return [s.width for s in self.slices]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensors on disk by name: [in, r] and [r, out], or mlx-lm's [E, r, in] and [E, out, r]."""
        a, b = (self.in_features, self.rank), (self.rank, sum(self.widths))
        if self.experts is not None:
            a, b = (self.experts, *a[::-1]), (self.experts, *b[::-1])
        shapes = {f"{self.path}.lora_a": a, f"{self.path}.lora_b": b}
        return shapes | ({f"{self.path}.m": (sum(self.widths),)} if self.kind == "dora" else {})


Specs = dict[str, ModuleSpec]


def _match(pattern: Mapping[str, float], path: str) -> str | None:
    """The first key of a pattern that fits a path, by PEFT's rule."""
    return next((key for key in pattern if re.match(rf"(.*\.)?({key})$", path)), None)


def plan_specs(groups: list[Group], lora: LoRAConfig) -> Specs:
    """Rank and alpha of every slice under a LoRAConfig.

    Raises: PackError for a rank above a width, or a pattern that fits no projection.
    """
    specs: Specs = {}
    used: set[str] = set()
    for geometry in (g for group in groups for g in group.members):
        slices = []
        for name, width in geometry.slices:
            path = geometry.path if len(geometry.slices) == 1 else f"{geometry.path}.{name}"
            rank_key, alpha_key = _match(lora.rank_pattern, path), _match(lora.alpha_pattern, path)
            used |= {k for k in (rank_key, alpha_key) if k}
            rank = lora.rank_pattern[rank_key] if rank_key else lora.rank
            alpha = lora.alpha_pattern[alpha_key] if alpha_key else lora.alpha
            limit = min(geometry.in_features, width)
            if rank > limit:
                raise PackError(
                    f"--rank {rank}: {path} is {geometry.in_features} x {width}, so its"
                    f" rank can be at most {limit}."
                )
            slices.append(SliceSpec(name, width, rank, 2.0 * rank if alpha is None else alpha))
        specs[geometry.path] = ModuleSpec(
            geometry.path, geometry.in_features, tuple(slices), geometry.experts
        )
    if unused := (set(lora.rank_pattern) | set(lora.alpha_pattern)) - used:
        raise PackError(f"rank_pattern, alpha_pattern: '{sorted(unused)[0]}' fits no projection.")
    return specs


@dataclass(frozen=True)
class Slot:
    """Where the adapters of one projection live in memory."""

    lora: GroupedLoRA
    first: int
    spec: ModuleSpec


Slots = Mapping[str, Slot]


class Attached:
    """Adapters on a base. ``tensors`` and ``load`` speak mlx-lm's names; ``detach`` undoes all.

    ``slots`` has the adapters and ``frozen`` the base's own module, by path of the projection.
    """

    method = "lora"
    replaced: Mapping[str, tuple[int, ...]] = MappingProxyType({})  # `full.Unfrozen` has some

    def __init__(self, base: Base, specs: Specs, groups: list[Group], notes: list[str]):
        self.base = base
        self.specs = specs
        self.groups = groups
        self.notes = notes
        self.slots: dict[str, Slot] = {}
        self.frozen: dict[str, nn.Module] = {}
        self._originals: list[tuple[str, nn.Module]] = []

    @property
    def model(self) -> nn.Module:
        return self.base.model

    @property
    def details(self) -> str:
        """Ranks and places, for one line of output."""
        ranks = sorted({s.rank for spec in self.specs.values() for s in spec.slices if s.rank})
        return (
            f"rank {', '.join(map(str, ranks))} · geometry probed, {len(self.specs)} projections "
            f"in {len(self.groups)} groups"
        )

    def swap(self, modules: list[tuple[str, nn.Module]]) -> None:
        """Put modules at their paths, remembering what stood there."""
        current = dict(self.model.named_modules())
        self._originals += [(path, current[path]) for path, _ in modules]
        replace_modules(self.model, modules)

    def recompute(self, policy: str) -> None:
        """What the backward computes again: ``none``, ``selective`` or ``block``.

        ``selective`` acts in blocks with grouped projections; other families keep all.
        """
        for module in self.model.modules():
            if isinstance(module, (GroupedAttention, GroupedMLP)):
                module.recompute = policy != "none"
        if policy == "block":
            prefixes = block_prefixes(self.model)
            self.swap(
                [(p, RecomputedBlock(b)) for p, b in zip(prefixes, self.model.layers, strict=True)]
            )

    def detach(self) -> None:
        """Put the base's own modules back, the same objects; can be called twice."""
        while self._originals:
            replace_modules(self.model, [self._originals.pop()])
        self.model.eval()

    def standing(self) -> tuple[list[tuple[str, nn.Module]], list[tuple[str, nn.Module]]]:
        """The base's own modules that are away, and those that stand in for them, by path."""
        current = dict(self.model.named_modules())
        return list(self._originals), [(path, current[path]) for path, _ in self._originals]

    def tensors(self) -> dict[str, mx.array]:
        """Adapters by name on disk: ``<path>.lora_a`` [in, r], ``<path>.lora_b`` [r, out], fp32.

        Those of experts lie as mlx-lm has them, [E, r, in] and [E, out, r].
        """
        return slot_tensors(self.slots)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """A context in which the model computes what the base alone does: every B is zero."""
        loras = list({id(slot.lora): slot.lora for slot in self.slots.values()}.values())
        trained = [list(lora.lora_b) for lora in loras]
        try:
            for lora in loras:
                lora.lora_b[:] = [mx.zeros_like(b) for b in lora.lora_b]
            yield
        finally:
            for lora, b in zip(loras, trained, strict=True):
                lora.lora_b[:] = b

    def load(self, tensors: Mapping[str, mx.array], where: str) -> None:
        """Set all adapters from tensors named as on disk.

        Raises: PackError listing every missing, unknown or misshaped tensor; nothing is changed.
        """
        load_slots(self.slots, tensors, where)

    def parameter_count(self) -> int:
        """Trainable weights."""
        return sum(t.size for slot in self.slots.values() for t in self._arrays(slot))

    @staticmethod
    def _arrays(slot: Slot) -> list[mx.array]:
        last = slot.first + sum(1 for s in slot.spec.slices if s.rank)
        return [*slot.lora.lora_a[slot.first : last], *slot.lora.lora_b[slot.first : last]]

    def merged_weights(self) -> dict[str, mx.array]:
        """Dense weight of every adapted projection with its delta added, [out, in] in float32.

        A switch linear has one for each expert, [E, out, in].
        """
        tensors = self.tensors()
        return {
            path: merged_weight(slot.spec, tensors, self.frozen[path])
            for path, slot in self.slots.items()
        }


def slot_tensors(slots: Slots) -> dict[str, mx.array]:
    """Adapters by name on disk, as `Attached.tensors` has them."""
    found = {}
    for path, slot in slots.items():
        adapted = [s for s in slot.spec.slices if s.rank]
        a = slot.lora.lora_a[slot.first : slot.first + len(adapted)]
        b = slot.lora.lora_b[slot.first : slot.first + len(adapted)]
        if slot.spec.experts is not None:
            a, b = ([t.swapaxes(-1, -2) for t in tensors] for tensors in (a, b))
        found[f"{path}.lora_a"] = a[0] if len(a) == 1 else mx.concatenate(a, axis=1)
        found[f"{path}.lora_b"] = _block_diagonal(slot.spec, b)
    return found


def check_tensors(
    wanted: Mapping[str, tuple[int, ...]], tensors: Mapping[str, mx.array], where: str
) -> None:
    """Hold tensors against names and shapes.

    Raises: PackError listing what is missing, unknown or misshaped.
    """
    faults = [f"{n}: missing" for n in wanted if n not in tensors]
    faults += [f"{n}: not learned in this run" for n in tensors if n not in wanted]
    faults += [
        f"{n}: is {tuple(tensors[n].shape)}, must be {shape}"
        for n, shape in wanted.items()
        if n in tensors and tuple(tensors[n].shape) != shape
    ]
    if faults:
        more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
        raise PackError(f"{where}: tensors do not fit: {'; '.join(faults[:3])}{more}.")


def load_slots(slots: Slots, tensors: Mapping[str, mx.array], where: str) -> None:
    """Set all adapters from tensors named as on disk; raises as `Attached.load`."""
    wanted = {n: shape for s in slots.values() for n, shape in s.spec.shapes.items()}
    check_tensors(wanted, tensors, where)
    for path, slot in slots.items():
        b = tensors[f"{path}.lora_b"]
        if not _is_block_diagonal(slot.spec, b):
            raise PackError(f"{where}: {path}.lora_b couples the slices of a fused projection.")
    for path, slot in slots.items():
        a, b = tensors[f"{path}.lora_a"], tensors[f"{path}.lora_b"]
        if slot.spec.experts is not None:
            a, b = a.swapaxes(-1, -2), b.swapaxes(-1, -2)
        rank = column = 0
        index = slot.first
        for s in slot.spec.slices:
            if s.rank:
                rows, columns = slice(rank, rank + s.rank), slice(column, column + s.width)
                slot.lora.lora_a[index] = a[..., rows].astype(mx.float32)
                slot.lora.lora_b[index] = b[..., rows, columns].astype(mx.float32)
                index += 1
            rank, column = rank + s.rank, column + s.width


def merged_weight(spec: ModuleSpec, tensors: Mapping[str, mx.array], linear: nn.Module) -> mx.array:
    """The dense weight of a frozen linear with its adapters' delta added, in float32."""
    if spec.experts is not None:
        weight = expert_weights(linear)
    else:
        quantized = isinstance(linear, LINEARS)
        weight = dequantized_weight(linear) if quantized else linear.weight
    return weight.astype(mx.float32) + delta_of(spec, tensors)


def delta_of(spec: ModuleSpec, tensors: Mapping[str, mx.array]) -> mx.array:
    """What adapters, named as on disk, add to their weight: [out, in] in float32.

    Of experts [E, out, in]; of an embedding [vocab, dim], which is how its table lies.
    """
    a, b = tensors[f"{spec.path}.lora_a"], tensors[f"{spec.path}.lora_b"]
    if spec.experts is not None:
        return low_rank_delta(a.swapaxes(-1, -2), b.swapaxes(-1, -2), spec.slices[0].scale)
    scales = [mx.full((s.rank,), s.scale) for s in spec.slices if s.rank]
    delta = low_rank_delta(a, b * mx.concatenate(scales)[:, None], 1.0)
    return delta.T if spec.kind == "embedding" else delta


def _block_diagonal(spec: ModuleSpec, parts: list[mx.array]) -> mx.array:
    """B of a fused projection: each slice's B in its own rows and columns, zero elsewhere."""
    if len(spec.slices) == 1:
        return parts[0]
    rows, remaining = [], iter(parts)
    before, total = 0, sum(s.width for s in spec.slices)
    for s in spec.slices:
        if s.rank:
            rows.append(mx.pad(next(remaining), ((0, 0), (before, total - before - s.width))))
        before += s.width
    return mx.concatenate(rows)


def _is_block_diagonal(spec: ModuleSpec, b: mx.array) -> bool:
    """Whether B [r, out] of a projection is zero outside its slices."""
    if len(spec.slices) == 1:
        return True
    ones = [mx.ones((s.rank, s.width)) for s in spec.slices if s.rank]
    return not mx.any(mx.where(_block_diagonal(spec, ones) == 0, b, 0)).item()


def attach(
    base: Base,
    lora: LoRAConfig | None = None,
    specs: Specs | None = None,
    matmul_path: str = "quantized",
    seed: int = 0,
    fp16_fallback: bool = False,
) -> Attached:
    """Attach fresh adapters (B = 0: no logit changes) to a base.

    Args:
        lora: where and how large, for training; or
        specs: exactly which adapters, as a pack's manifest has them; none at all is allowed.
        matmul_path: how the frozen weights are multiplied while attached.
        fp16_fallback: dequantize modules whose geometry cannot be probed to fp16 and train on.
    Raises: PackError if a target does not exist or a geometry cannot be probed.
    """
    check_bare(base)
    if specs is None:
        check_trainable(base.name, base.model)
    lora = lora or LoRAConfig()
    targets = tuple(specs) if specs is not None else lora.target_modules
    num_layers = -1 if specs is not None else lora.num_layers
    groups, faults = [], []
    if specs is None or specs:
        groups, faults = find_groups(base.model, base.config, targets, num_layers)
    if faults and not fp16_fallback:
        raise faults[0]
    fallback, notes = _fp16_modules(base, faults)
    groups = groups + [Group(None, (geometry,)) for geometry, _ in fallback]
    if not targets and specs is None:
        groups, left_out = _without_narrow(groups, lora)
        notes += left_out + _experts_note(base.model)
    if not groups and specs != {}:
        raise PackError("--target-modules: no projection carries an adapter.")
    if specs is None:
        specs = plan_specs(groups, lora)
    attached = Attached(base, specs, groups, notes)
    try:
        attached.swap([(geometry.path, module) for geometry, module in fallback])
        modules = dict(base.model.named_modules())
        attached.frozen = {path: modules[path] for path in specs}
        attached._originals += apply_matmul_path(base.model, matmul_path)
        _swap_in_adapters(attached, lora.dropout, seed)
        base.model.train(base.model.training)  # new modules join the mode of the rest
    except BaseException:
        attached.detach()
        raise
    return attached


def check_bare(base: Base) -> None:
    """Raises: PackError if a base carries adapters."""
    if any(isinstance(m, GroupedLoRA) for m in base.model.modules()):
        raise PackError(f"{base.name}: carries adapters already; take them off first.")


def _without_narrow(groups: list[Group], lora: LoRAConfig) -> tuple[list[Group], list[str]]:
    """Groups without the linears that nobody named and that are too narrow for the rank.

    Such are gates and steps by head of a recurrence or a mixture. What is left out is noted; if
    that were all, it stays, and `plan_specs` says what is wrong with the rank. So does a projection
    of a grouped block.
    """

    def is_narrow(group: Group) -> bool:
        (geometry, *others) = group.members
        limit = min(geometry.in_features, *geometry.widths)
        named = _match(lora.rank_pattern, geometry.path)
        return group.block is None and not others and not named and lora.rank > limit

    kept = [group for group in groups if not is_narrow(group)]
    if not kept or len(kept) == len(groups):
        return groups, []
    names = sorted({group.members[0].name for group in groups if is_narrow(group)})
    return kept, [f"{', '.join(names)}: narrower than rank {lora.rank}, carry no adapter"]


def _experts_note(model: nn.Module) -> list[str]:
    names = {path.rpartition(".")[2] for path, m in linears(model) if is_switch_linear(m)}
    if not names:
        return []
    return [f"experts carry adapters only where named: --target-modules {','.join(sorted(names))}"]


def _fp16_modules(
    base: Base, faults: list[GeometryError]
) -> tuple[list[tuple[Geometry, nn.Module]], list[str]]:
    """An fp16 copy of each module that could not be probed, with what is then true of it."""
    found, notes = [], []
    modules = dict(base.model.named_modules())
    for fault in faults:
        module = modules[fault.path]
        if is_switch_linear(module):
            raise fault
        try:
            weight = module.weight
            if isinstance(module, LINEARS):
                weight = dequantized_weight(module)
            half = HalfLinear(weight.astype(mx.float16), module.get("bias"))
            mx.eval(half.parameters())
        except (ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise PackError(f"[geometry] {fault.path}: cannot be dequantized: {reason}") from None
        out, width = half.weight.shape
        name = fault.path.rsplit(".", 1)[-1]
        found.append(
            (
                Geometry(
                    fault.path,
                    width,
                    out,
                    None,
                    None,
                    None,
                    width,
                    "bias" in module,
                    ((name, out),),
                ),
                half,
            )
        )
        notes.append(f"{fault.path}: geometry could not be probed, dequantized to fp16")
    return found, notes


def _make_lora(
    attached: Attached, members: list[Geometry | None], dropout: float, seed: int
) -> GroupedLoRA | None:
    """One GroupedLoRA for projections that read the same input, in order; None carries nothing."""
    shapes: list[AdapterShape | None] = []
    keys: list[mx.array | None] = []
    firsts: dict[str, int] = {}
    for geometry in members:
        spec = attached.specs.get(geometry.path) if geometry is not None else None
        if spec is None:
            shapes.append(None)
            keys.append(None)
            continue
        wanted = spec.in_features, spec.widths, spec.experts
        found = geometry.in_features, geometry.widths, geometry.experts
        # one adapter over all slices of a fused projection, as other tools train it
        whole = geometry.in_features, [sum(geometry.widths)], geometry.experts
        if wanted not in (found, whole):
            raise PackError(
                f"{spec.path}: the adapter is for {_sizes(*wanted)}, but the projection is "
                f"{_sizes(*found)}."
            )
        firsts[spec.path] = sum(shape is not None for shape in shapes)
        for s in spec.slices:
            shape = AdapterShape(s.width, s.rank, s.scale, spec.experts)
            shapes.append(shape if s.rank else None)
            keys.append(adapter_key(seed, f"{spec.path}.{s.name}"))
    if not firsts:
        return None
    in_features = attached.specs[next(iter(firsts))].in_features
    lora = GroupedLoRA(in_features, shapes, dropout, keys)
    for path, first in firsts.items():
        attached.slots[path] = Slot(lora, first, attached.specs[path])
    return lora


def _sizes(in_features: int, widths: list[int], experts: int | None) -> str:
    return f"{in_features} -> {widths}" + ("" if experts is None else f" x {experts} experts")


def _adapted(linear: nn.Module, lora: GroupedLoRA, spec: ModuleSpec) -> nn.Module:
    """A module that stands for a lone projection and adds what its adapters give."""
    if spec.experts is not None:
        return AdaptedSwitchLinear(linear, lora)
    own = getattr(linear, "output_dims", None)
    if isinstance(own, list) and spec.widths != own:
        raise PackError(f"{spec.path}: cuts its output into {own}, and the adapter does not.")
    return AdaptedLinear(linear, lora, spec.widths)


def _swap_in_adapters(attached: Attached, dropout: float, seed: int) -> None:
    """Replace modules by ones that carry GroupedLoRA: lone projections first, then whole blocks.

    Blocks that carry nothing are replaced too: training by ours keeps no T x T scores, nor do they
    exist on the way through.
    """

    def lora_of(members: list[Geometry | None]) -> GroupedLoRA | None:
        return _make_lora(attached, members, dropout, seed)

    modules = dict(attached.model.named_modules())
    lone = [group.members[0] for group in attached.groups if group.block is None]
    wrapped = [
        (g.path, _adapted(modules[g.path], lora, attached.specs[g.path]))
        for g in lone
        if (lora := lora_of([g])) is not None
    ]
    attached.swap(wrapped)

    blocks: dict[str, dict[str, Geometry]] = {
        path: {} for path, m in modules.items() if is_grouped_attention(m) or is_grouped_mlp(m)
    }
    for group in attached.groups:
        if group.block is not None:
            blocks[group.block].update({g.name: g for g in group.members})
    swapped = []
    for path, by_name in blocks.items():
        attention = is_grouped_attention(modules[path])
        make = GroupedAttention if attention else GroupedMLP
        *shared, last = BLOCK_PROJECTIONS["attention" if attention else "mlp"]
        loras = lora_of([by_name.get(n) for n in shared]), lora_of([by_name.get(last)])
        swapped.append((path, make(modules[path], *loras)))
    attached.swap(swapped)
    order = {path: i for i, path in enumerate(attached.specs)}
    attached.slots = dict(sorted(attached.slots.items(), key=lambda item: order[item[0]]))
