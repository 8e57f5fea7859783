"""What adapters a base carries: slices, modules, and the names of their tensors on disk."""

from dataclasses import dataclass


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
