"""Functions of the user's own, which a setting names as ``FILE.py:NAME``."""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import Code, PackError, flag_of, reason_of

FUNCTION = "FILE.py:NAME"


def names_function(value: Any) -> bool:
    """Return whether the value of a setting names a function in a file."""
    return isinstance(value, str) and value.rpartition(":")[0].endswith(".py")


def load_function(setting: str, value: str) -> Callable[..., Any]:
    """Return the function that a setting names; its file is executed.

    Raises:
        PackError: If there is no such file or function, or the file raises.
    """
    file, _, name = value.rpartition(":")
    path = Path(file).expanduser()
    if not path.is_file():
        raise function_error(setting, value, f"{file} is no file.", "not-found")

    try:
        functions = runpy.run_path(str(path), run_name=f"{setting}_function")
    except Exception as error:
        text = f"{file} cannot be executed ({raised(error)})."
        raise function_error(setting, value, text, "unreadable") from error

    if not callable(function := functions.get(name)):
        raise function_error(setting, value, f"{file} has no function {name}.", "not-found")
    return function


def function_error(setting: str, function: str, text: str, code: Code = "data") -> PackError:
    """Return the error for what a function of the user's did."""
    return PackError(f"{flag_of(setting)} {function}: {text}", code, setting)


def raised(error: Exception) -> str:
    """Return an exception of the user's code in one line."""
    return f"{type(error).__name__}: {reason_of(error)}"
