"""The map from weights of a model to tensors of its checkpoint.

mlx-lm's loader renames, transposes and stacks tensors to suit its model. What passes through under
another name is known by being the same object; what is made anew, only where its name and shape
leave one answer.
"""

import re
from collections.abc import Mapping

from ..runtime import mx

Source = str | list[str]  # one tensor, or those of the experts that are stacked, in their order

_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def weight_map(stored: Mapping[str, mx.array], named: Mapping[str, mx.array]) -> dict[str, Source]:
    """The tensor of the files for each ``.weight`` of the model, where that is certain.

    ``stored`` has the names of the files, ``named`` those of the model; tensors that only changed
    their name are the same objects.
    """
    by_object = {id(tensor): name for name, tensor in stored.items()}
    weights = {name: t for name, t in named.items() if name.endswith(".weight")}
    sources = {
        name: by_object[id(tensor)] for name, tensor in weights.items() if id(tensor) in by_object
    }

    used = set(sources.values())
    free = {name: t for name, t in stored.items() if name not in used}
    for name, tensor in weights.items():
        if name in sources:
            continue
        if (source := _experts(name, tensor, free) or _alike(name, tensor, free)) is not None:
            sources[name] = source

    return sources


def _alike(name: str, tensor: mx.array, free: Mapping[str, mx.array]) -> str | None:
    """The one tensor of this name, or of this name but for a prefix, of these sizes."""
    if name in free:
        return name
    similar = [other for other in free if name.endswith(f".{other}") or other.endswith(f".{name}")]
    if len(similar) != 1 or sorted(free[similar[0]].shape) != sorted(tensor.shape):
        return None
    return similar[0]


def _experts(name: str, tensor: mx.array, free: Mapping[str, mx.array]) -> list[str] | None:
    """The tensors of a mixture's experts that are stacked to [E, out, in]."""
    place = re.fullmatch(r"(.+)\.switch_mlp\.(\w+)\.weight", name)
    if place is None or tensor.ndim != 3:
        return None

    for leaf in (place[2], _MIXTRAL.get(place[2])):
        names = [f"{place[1]}.experts.{e}.{leaf}.weight" for e in range(tensor.shape[0])]
        beyond = f"{place[1]}.experts.{len(names)}.{leaf}.weight"
        if beyond not in free and all(
            n in free and tuple(free[n].shape) == tuple(tensor.shape[1:]) for n in names
        ):
            return names
    return None
