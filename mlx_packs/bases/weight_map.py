"""Which tensor of a checkpoint's files each weight of the model is.

mlx-lm's loader renames, turns round and stacks tensors to suit its model. What passes through under
another name is known by being the same object; what is made anew, only where its name and shape
leave one answer. Where there is none, nothing is said.
"""

import re
from collections.abc import Mapping

from ..runtime import mx

Origin = str | list[str]  # one tensor, or those of the experts that are stacked, in their order

_MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def origins(stored: Mapping[str, mx.array], named: Mapping[str, mx.array]) -> dict[str, Origin]:
    """The tensor of the files for each ``.weight`` of the model; absent where that is not certain.

    Args:
        stored: by the names of the files.   named: by the names of the model, of which those that
            only changed their name are the same objects.
    """
    by_object = {id(tensor): name for name, tensor in stored.items()}
    weights = {name: t for name, t in named.items() if name.endswith(".weight")}
    found = {
        name: by_object[id(tensor)] for name, tensor in weights.items() if id(tensor) in by_object
    }
    taken = set(found.values())
    free = {name: t for name, t in stored.items() if name not in taken}
    for name, tensor in weights.items():
        if name in found:
            continue
        if (origin := _experts(name, tensor, free) or _alike(name, tensor, free)) is not None:
            found[name] = origin
    return found


def _alike(name: str, tensor: mx.array, free: Mapping[str, mx.array]) -> str | None:
    """The one tensor of this name, or of this name but for what stands before, of these sizes."""
    if name in free:
        return name
    alike = [other for other in free if name.endswith(f".{other}") or other.endswith(f".{name}")]
    if len(alike) != 1 or sorted(free[alike[0]].shape) != sorted(tensor.shape):
        return None
    return alike[0]


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
