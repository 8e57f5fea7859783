"""Arguments of public functions: wrong names and values of a wrong type have one line."""

import inspect
import os
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, Union, cast, get_args, get_origin

from ..errors import PackError, any_of, did_you_mean
from .data import DataConfig
from .fields import Settings
from .lora import LoRAConfig
from .other_names import ours_for, removal
from .schema import TrainConfig

F = TypeVar("F", bound=Callable[..., Any])
# The configurations of a run, by the argument that takes each.
_CONFIGS = {"lora": LoRAConfig, "train": TrainConfig, "columns": DataConfig}
# Names that functions of this package have for the same idea.
_SAME = {
    "model": ("base", "name"),
    "base": ("model", "name"),
    "max_seq_length": ("sequence_length",),
    "sequence_length": ("max_seq_length",),
}
# Kinds of values in words, by class; other classes have an article.
_WORDS = {
    **{"int": "an integer", "float": "a number", "bool": "True or False", "str": "text"},
    **{"Path": "a path", "Mapping": "a mapping", "Callable": "a function", "Iterable": "a list"},
    **{"Sequence[int]": "a list of integers", "Sequence[str]": "a list of texts"},
    **{"Sequence": "a list", "Pack": "a pack", "Base": "a base model", "NoneType": ""},
}


def checked_arguments(function: F) -> F:
    """Let a function reject an unknown argument, and a value that is not of its annotation.

    A mapping becomes the configuration that an argument takes. A function with ``**options``
    rejects only other names of its parameters; it checks the rest. Annotations in quotes are not
    read.
    """
    signature = inspect.signature(function)
    parameters = signature.parameters
    takes_options = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    kinds = {
        name: each.annotation
        for name, each in parameters.items()
        if each.annotation not in (Any, each.empty)
        and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    }

    @wraps(function)
    def checked(*args: Any, **arguments: Any) -> Any:
        for name in arguments:
            is_other = takes_options and not _same_idea(name, parameters) and not removal(name)
            if name in parameters or is_other:
                continue
            raise _unknown_argument(function.__name__, name, list(parameters))

        bound = signature.bind(*args, **arguments)
        for name, value in bound.arguments.items():
            if name in kinds:
                bound.arguments[name] = value = _typed(value, kinds[name], name)
            if name == "batch_size" and value is not None and value < 1:
                raise PackError(f"--batch-size {value}: must be at least 1.")
        return function(*bound.args, **bound.kwargs)

    return cast(F, checked)


def _typed(value: Any, kind: Any, name: str) -> Any:
    """Return the value of an argument, a configuration in place of a mapping of its settings."""
    kinds = _kinds_of(kind)
    configs = [each for each in kinds if inspect.isclass(each) and issubclass(each, Settings)]
    if configs and isinstance(value, Mapping):
        return configs[0].from_mapping(value)

    if getattr(value, "ndim", None) == 0:  # a number of NumPy or MLX
        value = value.item()
    if _fits(value, kind):
        return value

    shown = f"a {type(value).__name__}"
    if isinstance(value, (str, int, float, list, tuple)):
        shown = f"{value!r:.60} ({type(value).__name__})"
    texts = dict.fromkeys(filter(None, map(_in_words, kinds)))
    raise PackError(f"{name}: must be {any_of(list(texts))}, but is {shown}.", flag=name)


def _kinds_of(kind: Any) -> tuple:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _in_words(kind: Any) -> str:
    name = getattr(get_origin(kind) or kind, "__name__", str(kind))
    items = ", ".join(getattr(each, "__name__", "") for each in get_args(kind))
    return _WORDS.get(f"{name}[{items}]") or _WORDS.get(name, f"a {name}")


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value is of a kind; numbers, texts and tuples of a list are checked, too."""
    if len(kinds := _kinds_of(kind)) > 1:
        return any(_fits(value, each) for each in kinds)

    origin = get_origin(kind) or kind
    if origin is Path:
        return isinstance(value, os.PathLike)
    if origin is bool and value in (0, 1):
        return True
    if origin in (int, float):
        return isinstance(value, (int, origin)) and not isinstance(value, bool)
    if origin is Callable:
        return callable(value)
    if origin in (Sequence, Iterable) and isinstance(value, (str, bytes, Mapping)):
        return False
    if origin is Sequence:
        is_list = hasattr(value, "__len__") and hasattr(value, "__getitem__")
        (item,) = get_args(kind)
        is_checked = item in (int, str) or get_origin(item) is tuple
        return is_list and (not is_checked or all(_fits(each, item) for each in value))
    if origin is tuple:
        return isinstance(value, (tuple, list)) and len(value) == len(get_args(kind))

    is_checked = inspect.isclass(origin) and not getattr(origin, "_is_protocol", False)
    return not is_checked or isinstance(value, origin)


def _same_idea(name: str, valid: Collection[str]) -> list[str]:
    """Return the valid names of the idea that a name stands for here or in another library."""
    ours = ours_for(name, valid) or name
    return [other for other in (ours, *_SAME.get(ours, ())) if other in valid]


def _unknown_argument(function: str, name: str, valid: list[str]) -> PackError:
    if text := removal(name):
        return PackError(f"{function}: {name}: {text}", "unknown", name)

    ours = ours_for(name, valid) or name
    same = _same_idea(name, valid)
    taken = {key: config for key, config in _CONFIGS.items() if key in valid}
    owners = (key for key, config in taken.items() if ours in config.__dataclass_fields__)

    if same:
        hint = f"It is called '{same[0]}' here."
    elif owner := next(owners, None):
        hint = f"It is a setting: {owner}=mp.{taken[owner].__name__}({ours}=...)."
    else:
        hint = did_you_mean(name, valid)

    return PackError(f"{function}: has no argument '{name}'. {hint}", "unknown", name)
