"""The guards of a run, in the order in which they are called."""

from collections.abc import Callable

from .disk import DiskSpace
from .folder import RunFolder
from .guard import Guard, Guarded
from .memory import Memory

# By name: makes the guard of a run.
GUARDS: dict[str, Callable[[Guarded], Guard]] = {
    "folder": RunFolder,
    "disk": DiskSpace,
    "memory": Memory,
}


def make_guards(guarded: Guarded) -> list[Guard]:
    """Return the guards of a run."""
    return [make(guarded) for make in GUARDS.values()]
