"""The sizes of projections and blocks, as a config states them or `geometry` probes them."""

from dataclasses import dataclass

from ..errors import PackError


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
