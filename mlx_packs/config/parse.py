"""Settings from files and flags."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from ..errors import PackError
from ..reading import read_json, read_yaml
from .fields import Settings
from .fields import unknown_setting as unknown_setting
from .other_names import RENAMED_KEYS as RENAMED_KEYS
from .values import setting_error as setting_error
from .values import typed_value as typed_value

S = TypeVar("S", bound=Settings)


def build(cls: type[S], values: Mapping[str, Any], where: str = "") -> S:
    """Return a configuration by the names of its fields, as `Settings.from_mapping`."""
    return cls.from_mapping(values, where)


def read_settings(path: str | Path) -> dict:
    """Return the mapping in a YAML or JSON file.

    Raises:
        PackError: the file cannot be read, or contains something else.
    """
    path = Path(path)
    try:
        values = read_json(path, object) if path.suffix == ".json" else read_yaml(path)
    except OSError as error:
        code = "not-found" if isinstance(error, FileNotFoundError) else "unreadable"
        raise PackError(f"{path}: cannot be read ({error.strerror}).", code, "config") from None
    except PackError as error:
        raise PackError(error.message, error.code, "config") from error

    if not isinstance(values, dict | None):
        message = f"{path}: must be a mapping of settings, but is a {type(values).__name__}."
        raise PackError(message, "unreadable", "config")
    return values or {}
