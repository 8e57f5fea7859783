"""Specifications of adapters: slices, modules, and the names of their tensors on disk."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..errors import PackError

SCORE = "score"  # the head of a reward model, as transformers and PEFT call it
SCORE_WEIGHT = f"{SCORE}.weight"  # what a pack stores of it


@dataclass(frozen=True)
class SliceSpec:
    """The adapter of one slice of a projection; rank 0 is none."""

    name: str
    width: int
    rank: int
    alpha: float

    @property
    def scale(self) -> float:
        """Factor of the low-rank product: alpha / rank."""
        if not self.rank:
            return 0.0
        return self.alpha / self.rank


@dataclass(frozen=True)
class ModuleSpec:
    """Adapters of one projection (several slices if it is fused).

    Attributes:
        in_features: width of its input; of an embedding the vocabulary.
        experts: how many experts a switch linear has, each with an adapter.
        kind: ``lora``, ``dora``, or ``embedding``: of a table [vocab, out], whose rows A has.
        head: whether the adapter of an embedding that is the head too acts there.
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
        return [s.width for s in self.slices]

    @property
    def out_features(self) -> int:
        """Width of the output, of all slices together."""
        return sum(self.widths)

    @property
    def size(self) -> str:
        """Widths of input and output in words, and the number of experts."""
        experts = f" x {self.experts} experts" if self.experts is not None else ""
        return f"{self.in_features} -> {self.out_features}{experts}"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensors on disk by name: [in, r] and [r, out], or mlx-lm's [E, r, in] and [E, out, r]."""
        a = (self.in_features, self.rank)
        b = (self.rank, self.out_features)
        if self.experts is not None:
            a = (self.experts, *a[::-1])
            b = (self.experts, *b[::-1])

        shapes = dict(zip(factor_names(self.path), (a, b), strict=True))
        if self.kind == "dora":
            shapes[f"{self.path}.m"] = (self.out_features,)
        return shapes


Specs = dict[str, ModuleSpec]


def factor_names(path: str) -> tuple[str, str]:
    """Return the names on disk of A and B of the projection at a path."""
    return f"{path}.lora_a", f"{path}.lora_b"


def factor_shapes(specs: Specs) -> list[tuple[int, ...]]:
    """Return the shapes of A [in, r] and B [r, out] of every slice."""
    return [
        shape
        for spec in specs.values()
        for part in spec.slices
        for shape in ((spec.in_features, part.rank), (part.rank, part.width))
    ]


def weights_of(specs: Iterable[ModuleSpec]) -> int:
    """Return the number of weights of adapters; a fused B counts without its zeros."""
    count = 0
    for spec in specs:
        of_slices = sum(part.rank * (spec.in_features + part.width) for part in spec.slices)
        count += of_slices * (spec.experts or 1)
        if spec.kind == "dora":
            count += spec.out_features
    return count


def ranks_of(specs: Specs) -> list[int]:
    """Return the ranks of all slices that have an adapter, each once."""
    return sorted({s.rank for spec in specs.values() for s in spec.slices if s.rank})


def by_number(path: str) -> list:
    """Return a key that sorts paths by the numbers in them: layers.2 before layers.10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in path.split(".")]


def leaf_names(paths: Iterable[str]) -> list[str]:
    """Return the last parts of paths, each once: q_proj, v_proj."""
    return sorted({path.rpartition(".")[2] for path in paths})


def check_shapes(
    expected: Mapping[str, tuple[int, ...]], actual: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Raise a PackError that lists which tensors are missing, unexpected or misshaped."""
    names = [n for n in expected if n not in actual] + [n for n in actual if n not in expected]
    names += [n for n in expected if n in actual and actual[n] != expected[n]]
    faults = [
        f"{name}: is {actual.get(name, 'missing')}, must be {expected.get(name, 'absent')}"
        for name in names
    ]

    if faults:
        more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
        raise PackError(f"{where}: tensors do not fit: {'; '.join(faults[:3])}{more}.", "mismatch")
