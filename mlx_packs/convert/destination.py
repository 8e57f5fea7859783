"""Destinations of `packs export`: programs that open its output.

A new one is a class in a file of its own, an entry here, and its name in `config.choices`.
"""

from pathlib import Path
from typing import Protocol

from ..config import choices
from ..config.choices import registered
from ..packs.pack import Pack
from .gguf import Gguf
from .lmstudio import LMStudio
from .ollama import Ollama
from .swift import Swift


class Destination(Protocol):
    """A program that opens a pack in a form of its own."""

    def write(self, pack: Pack, out: Path, start: str | None) -> dict:
        """Write the folder atomically; ``start`` is the program's own name of the base.

        Returns:
            ``notes``, what the user does next, and figures of the conversion.

        Raises:
            PackError: the program has no place for something in the pack.
        """


DESTINATIONS: dict[str, Destination] = registered(
    choices.DESTINATIONS,
    {"gguf": Gguf(), "ollama": Ollama(), "lmstudio": LMStudio(), "swift": Swift()},
)
