"""Probe the geometry of the projections that get adapters, and check every assumption.

A 4-bit q_proj of Qwen3-4B is stored as uint32 of width 320, but its input is 2560 wide
(320 x 32 / 4), and q, k, v have 4096, 1024 and 1024 rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.nn as nn

from ..errors import PackError, did_you_mean
from ..nn.frozen_weight import frozen_weight
from ..nn.lora import is_switch_linear
from ..nn.quantized import EMBEDDINGS, LINEARS
from ..nn.surgery import block_kind, block_prefixes
from ..runtime import mx


@dataclass(frozen=True)
class Geometry:
    """The sizes of one frozen linear, or of an embedding, from whose V tokens it maps to D."""

    path: str
    in_features: int  # D
    out_features: int  # O
    bits: int | None  # of a code; None for a dense weight
    group_size: int | None  # weights that share a scale
    mode: str | None
    stored_width: int  # of the stored tensor, in words or bytes
    bias: bool
    slices: tuple[tuple[str, int], ...]  # names and widths of its output columns
    experts: int | None = None  # of a switch linear: how many such weights are stacked
    embeds: bool = False  # whether it is an embedding

    @property
    def name(self) -> str:
        return self.path.rsplit(".", 1)[-1]

    @property
    def widths(self) -> list[int]:
        return [width for _, width in self.slices]

    def describe(self) -> str:
        """One line for people: stored and true shape."""
        if self.bits is None:
            shape = [self.out_features, self.in_features]
            if self.embeds:
                shape.reverse()
            stored = f"dense {shape}"
        else:
            width = self.out_features if self.embeds else self.in_features
            unit = width * self.bits // self.stored_width  # bits of a byte or a word
            stored = f"{self.mode} {self.bits}-bit g{self.group_size}, stored width"
            stored += f" {self.stored_width} = {width} x {self.bits} / {unit}"

        experts = f"{self.experts} experts of " if self.experts is not None else ""
        return f"{self.path}: {experts}{self.in_features} -> {self.out_features} ({stored})"


@dataclass(frozen=True)
class Group:
    """A projection group: the linears that read one input. ``block``: path of a grouped block."""

    block: str | None
    members: tuple[Geometry, ...]


@dataclass(frozen=True)
class Heads:
    """The sizes that a config states; None where it does not."""

    hidden: int | None
    ffn: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None

    @classmethod
    def of(cls, config: dict) -> "Heads":
        text = config.get("text_config") or config

        def size(*keys: str) -> int | None:
            value = next((text[key] for key in keys if text.get(key)), None)
            return value if isinstance(value, int) else None  # some families have one a block

        hidden = size("hidden_size", "n_embd")
        heads = size("num_attention_heads", "n_head")
        head_dim = size("head_dim")
        if not head_dim and hidden and heads:
            head_dim = hidden // heads
        kv_heads = size("num_key_value_heads") or heads
        return cls(hidden, size("intermediate_size"), heads, kv_heads, head_dim)


class GeometryError(PackError):
    """A module whose tensors contradict each other or the config."""

    def __init__(self, path: str, fault: str) -> None:
        self.path = path
        self.fault = fault
        super().__init__(
            f"{path}: {fault} Pass --train-fp16-fallback to train on a dequantized copy of just "
            "such modules, or leave it out of --target-modules.",
            "unreadable",
        )


def check_num_layers(num_layers: int, blocks: int) -> None:
    if num_layers > blocks:
        raise PackError(
            f"--num-layers {num_layers}: the base has only {blocks} blocks.", "mismatch"
        )


def is_named(path: str, name: str) -> bool:
    """A module is called by its whole path or the end of it."""
    return path == name or path.endswith("." + name)


def probe(path: str, module: nn.Module, config: dict, grouped: bool = False) -> Geometry:
    """The geometry of a linear or embedding, from its tensors, checked against the config.

    With ``grouped`` the parent is attention or SwiGLU of the Llama family, whose sizes are in the
    config. A GeometryError names the module and both shapes.
    """
    weight = module.weight
    axes = 3 if is_switch_linear(module) else 2
    if weight.ndim != axes:
        raise GeometryError(path, f"its weight must have {axes} axes, but is {list(weight.shape)}.")
    *stack, _, stored_width = weight.shape

    frozen = frozen_weight(module)
    try:
        frozen.check()
    except ValueError as error:
        raise GeometryError(path, str(error)) from None
    out_features, in_features = frozen.shape

    bias = "bias" in module
    if bias and list(module.bias.shape) != [*stack, out_features]:
        raise GeometryError(path, f"bias {list(module.bias.shape)} for {out_features} outputs.")

    name = path.rsplit(".", 1)[-1]
    stored = frozen.bits, frozen.group_size, frozen.mode, stored_width
    if embeds := is_embedding(module):
        slices = ((name, in_features),)
        return Geometry(path, out_features, in_features, *stored, False, slices, embeds=embeds)

    if grouped:
        _check_config(path, name, in_features, out_features, Heads.of(config))

    if stack:
        slices = ((name, out_features),)
    else:
        slices = _own_slices(name, module) or _fused_slices(name, out_features, Heads.of(config))
    return Geometry(path, in_features, out_features, *stored, bias, slices, *stack)


def _check_config(path: str, name: str, in_features: int, out_features: int, c: Heads) -> None:
    attention = kv = None
    if c.heads and c.head_dim:
        attention = c.heads * c.head_dim
    if c.kv_heads and c.head_dim:
        kv = c.kv_heads * c.head_dim

    sizes = {
        "q_proj": (c.hidden, attention),
        "k_proj": (c.hidden, kv),
        "v_proj": (c.hidden, kv),
        "o_proj": (attention, c.hidden),
        "gate_proj": (c.hidden, c.ffn),
        "up_proj": (c.hidden, c.ffn),
        "down_proj": (c.ffn, c.hidden),
    }.get(name, (None, None))

    sides = zip(("input", "output"), (in_features, out_features), sizes, strict=True)
    for side, actual, expected in sides:
        if expected is not None and actual != expected:
            raise GeometryError(
                path,
                f"its true shape is [{out_features}, {in_features}], but the config states "
                f"[{sizes[1]}, {sizes[0]}] (heads {c.heads}, KV heads {c.kv_heads}, head_dim "
                f"{c.head_dim}, hidden {c.hidden}, FFN {c.ffn}): the {side} does not fit.",
            )


def _own_slices(name: str, module: nn.Module) -> tuple[tuple[str, int], ...] | None:
    """The slices of a linear that splits its own output (Apple's foundation model)."""
    widths = getattr(module, "output_dims", None)
    if not isinstance(widths, list):
        return None
    names = "qkv" if name == "qkv_proj" else range(len(widths))
    return tuple((str(part), width) for part, width in zip(names, widths, strict=True))


def _fused_slices(name: str, width: int, c: Heads) -> tuple[tuple[str, int], ...]:
    """The projections inside a fused linear, where its layout is known; else one slice."""
    if name == "c_attn" and c.hidden and width == 3 * c.hidden:  # GPT-2: q, k, v of equal width
        return tuple((part, width // 3) for part in "qkv")
    if name == "qkv_proj" and c.heads and c.head_dim and c.kv_heads:  # Phi-3
        q = c.heads * c.head_dim
        kv = c.kv_heads * c.head_dim
        if q + 2 * kv == width:
            return (("q", q), ("k", kv), ("v", kv))
    if name == "gate_up_proj" and c.ffn and 2 * c.ffn == width:
        return (("gate", c.ffn), ("up", c.ffn))
    return ((name, width),)


def linears(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Linears and switch linears that can have adapters, in the order of the model."""
    return [
        (path, module)
        for path, module in reversed(model.named_modules())
        if (isinstance(module, (nn.Linear, *LINEARS)) or is_switch_linear(module))
        and path.rpartition(".")[2] not in _READ_AS_DATA
    ]


def is_embedding(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, *EMBEDDINGS))


# Parts of the paths of linears that choose the highest of their outputs: routers, and the indexer
# of sparse attention. Little gradient reaches them, or none.
_CHOOSERS = ("gate", "indexer")
# Linears of Gemma 3n and Kimi K3 that are never called: the block reads their weight itself.
_READ_AS_DATA = (
    "prediction_coefs correction_coefs self_attention_res_proj mlp_res_proj output_attn_res_proj"
).split()


def is_router(path: str) -> bool:
    """Routers and indexers choose experts or keys for a token."""
    return any(part in _CHOOSERS or part.endswith("router") for part in path.split("."))


def select_targets(
    model: nn.Module,
    target_modules: Sequence[str],
    num_layers: int,
    modules_to_save: Sequence[str] = (),
) -> list[tuple[str, nn.Module]]:
    """Return the linears, and the embeddings if they are named, that get adapters.

    They are named by leaf (q_proj), by tail (self_attn.q_proj) or by path. Without names: every
    linear inside the last ``num_layers`` blocks but routers, indexers, the experts of a mixture,
    whose adapters would be as many as there are experts, and ``modules_to_save``. Names are those
    of modules in these blocks, else of modules outside of all blocks; a full path may be anywhere
    (as with mlx-lm's absolute keys).
    """
    prefixes = block_prefixes(model)
    check_num_layers(num_layers, len(prefixes))

    last = prefixes  # 0 and -1 both mean all, as in mlx-lm
    if num_layers > 0:
        last = prefixes[-num_layers:]
    blocks = tuple(f"{prefix}." for prefix in last)

    saved = dict(select_saved(model, modules_to_save))
    tables = [(path, m) for path, m in reversed(model.named_modules()) if is_embedding(m)]
    every = linears(model) + tables
    inside = [(path, m) for path, m in every if path.startswith(blocks)]
    if not target_modules:
        return [
            (path, m)
            for path, m in inside
            if not (is_switch_linear(m) or is_embedding(m) or is_router(path) or path in saved)
        ]

    in_blocks = tuple(f"{prefix}." for prefix in prefixes)
    outside = [(path, m) for path, m in every if not path.startswith(in_blocks)]

    chosen: dict[str, nn.Module] = {}
    for target in target_modules:
        matched = [(p, m) for p, m in inside if is_named(p, target)]
        matched = matched or [(p, m) for p, m in outside if is_named(p, target)]
        matched = matched or [(p, m) for p, m in every if p == target]
        if not matched:
            raise _no_target(model, target, every)

        for path, _ in matched:
            if path in saved:
                raise PackError(
                    f"--modules-to-save: {path} is one of --target-modules too. It has an adapter, "
                    "or is trained in full. Leave it out of one of them.",
                    "conflict",
                    "modules_to_save",
                )

        chosen.update(matched)

    return [(path, m) for path, m in every if path in chosen]


def _no_target(model: nn.Module, target: str, every: Sequence[tuple[str, nn.Module]]) -> PackError:
    if target == "projector":
        return PackError(
            "--target-modules projector: the projector of images is frozen. Name linear layers of "
            "the language model.",
            "unsupported",
        )

    names = sorted({p.rsplit(".", 1)[-1] for p, _ in every})
    other = next((m for p, m in model.named_modules() if is_named(p, target)), None)
    if other is not None:
        kind = type(other).__name__
        return PackError(
            f"--target-modules {target}: is of type {kind} and cannot have an adapter.",
            "unsupported",
        )

    return PackError(
        f"--target-modules {target}: no such projection. {_hint(target, names)}", "unknown"
    )


def _hint(name: str, names: Sequence[str]) -> str:
    """The name that was probably meant, or all names."""
    if name.rpartition(".")[2] == "lm_head":
        tables = [n for n in ("embed_tokens", "wte") if n in names]
        if tables:
            return f"The head is the embedding: name {tables[0]}."
        return did_you_mean(name, names)

    hint = did_you_mean(name, names)
    if hint.startswith("Valid"):
        return hint
    return f"{hint} Those that exist: {', '.join(names)}."


def select_saved(model: nn.Module, modules_to_save: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Modules with weights of their own, in or outside of blocks, named as in `select_targets`."""
    modules = [(path, m) for path, m in reversed(model.named_modules()) if path and _has_weights(m)]
    chosen: dict[str, nn.Module] = {}
    for name in modules_to_save:
        matched = [(path, m) for path, m in modules if is_named(path, name)]
        if not matched:
            others = [path for path, _ in model.named_modules() if is_named(path, name)]
            names = sorted({path.rpartition(".")[2] for path, _ in modules})
            fault = "no such module."
            if others:
                fault = f"{others[0]} has no weights of its own. Name modules inside it."
            raise PackError(
                f"--modules-to-save {name}: {fault} {_hint(name, names)}",
                "unsupported" if others else "unknown",
                "modules_to_save",
            )

        chosen.update(matched)
    return [(path, m) for path, m in modules if path in chosen]


def _has_weights(module: nn.Module) -> bool:
    """Whether a module has weights of its own, and no modules inside it."""
    values = (value for key, value in module.items() if not key.startswith("_"))
    return not module.children() and any(isinstance(value, mx.array) for value in values)


def find_groups(
    model: nn.Module,
    config: dict,
    target_modules: Sequence[str],
    num_layers: int,
    modules_to_save: Sequence[str] = (),
) -> tuple[list[Group], list[GeometryError]]:
    """The projection groups of the targets, and an error for each module that has none."""
    modules = dict(model.named_modules())
    groups: list[Group] = []
    faults: list[GeometryError] = []
    members: dict[tuple[str, tuple[str, ...]], list[Geometry]] = {}

    for path, module in select_targets(model, target_modules, num_layers, modules_to_save):
        parent, _, name = path.rpartition(".")
        kind = block_kind(modules.get(parent))
        try:
            geometry = probe(path, module, config, grouped=kind is not None)
        except GeometryError as fault:
            faults.append(fault)
            continue

        owner = path
        group: tuple[str, ...] = (name,)
        if kind is not None:
            owner = parent
            if name in kind.shared:
                group = kind.shared
        members.setdefault((owner, group), []).append(geometry)

    for (owner, names), geometries in members.items():
        ordered = tuple(sorted(geometries, key=lambda g, names=names: names.index(g.name)))
        groups.append(Group(None if owner == geometries[0].path else owner, ordered))
    return groups, faults
