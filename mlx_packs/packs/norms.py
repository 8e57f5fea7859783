"""The change of each weight by a pack: the Frobenius norms of its deltas."""

from ..adapters.spec import by_number
from ..report.facts import Norms
from .diff import factors_of, layer_of, squared_norm
from .pack import Pack


def delta_norms(pack: Pack) -> Norms:
    """||scale * A @ B|| of each LoRA of a pack, by layer and projection.

    Tensors that are stored in full and adapters of other kinds have no delta of their own and are
    left out; no base model is loaded. Raises PackError if a tensor is damaged.
    """
    specs = {path: spec for path, spec in pack.specs.items() if spec.kind == "lora" and spec.rank}
    if not specs:
        return Norms((), ())

    tensors = pack.load_tensors()
    layers = {}
    for path in sorted(specs, key=by_number):
        layer = layer_of(path)
        name = path.removeprefix(layer).lstrip(".") or path
        norm = squared_norm(*factors_of(specs[path], tensors)) ** 0.5
        layers.setdefault(layer, {})[name] = norm

    names = {name for row in layers.values() for name in row}
    leaves = {name: name.rpartition(".")[2] for name in names}
    if len(set(leaves.values())) == len(names):  # the last part tells them apart
        layers = {at: {leaves[name]: v for name, v in row.items()} for at, row in layers.items()}

    projections = list(dict.fromkeys(name for row in layers.values() for name in row))
    rows = [
        (_shown(layer), [row.get(name) for name in projections]) for layer, row in layers.items()
    ]

    return Norms(projections, rows)


def _shown(layer: str) -> str:
    """``layer 3`` for ``model.layers.3``; a path without a number as it is."""
    *_, name, number = ["", *layer.split(".")]
    return f"{name.removesuffix('s')} {number}" if number.isdecimal() else layer
