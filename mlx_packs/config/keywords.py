"""Arguments of public functions that have other trainers' names: errors suggest ours."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from ..errors import PackError, did_you_mean
from ..late import load
from .other_names import OTHER_NAMES

F = TypeVar("F", bound=Callable[..., Any])

# The configurations of a run, by the argument that takes each.
_CONFIGS = {
    "lora": "config.lora:LoRAConfig",
    "train": "config.schema:TrainConfig",
    "columns": "config.data:DataConfig",
}
# Names that functions of this package have for the same idea.
_SAME = {
    "model": ("base", "name"),
    "base": ("model", "name"),
    "max_seq_length": ("sequence_length",),
    "sequence_length": ("max_seq_length",),
}


def answers_other_names(function: F) -> F:
    """Let a function reject an unknown argument with the name to write instead."""
    parameters = inspect.signature(function).parameters

    @wraps(function)
    def checked(*args: Any, **arguments: Any) -> Any:
        for name in arguments:
            if name not in parameters:
                raise _unknown_argument(function.__name__, name, list(parameters))
        return function(*args, **arguments)

    return cast(F, checked)


def _unknown_argument(function: str, name: str, valid: list[str]) -> PackError:
    ours = OTHER_NAMES.get(name, name)
    same = [other for other in (ours, *_SAME.get(ours, ())) if other in valid]
    taken = {key: load(config) for key, config in _CONFIGS.items() if key in valid}
    owners = (key for key, config in taken.items() if ours in config.__dataclass_fields__)

    if same:
        hint = f"It is called '{same[0]}' here."
    elif owner := next(owners, None):
        hint = f"It is a setting: {owner}=mp.{taken[owner].__name__}({ours}=...)."
    else:
        hint = did_you_mean(name, valid)

    return PackError(f"{function}: has no argument '{name}'. {hint}", "unknown", name)
