"""Formats of other tools that packs are exported to and imported from, and programs that read them.

A new format is a class in a file of its own, a new program a function in `destinations`; each has
an entry here, and its name in `config.choices`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ..bases.model import BaseModel
from ..config import choices
from ..config.choices import ADAPTER_FORMATS, registered
from ..errors import PackError
from ..packs.pack import Pack
from .destinations import write_for_lmstudio, write_for_ollama, write_for_swift
from .external import CONFIG, Delta, ExternalAdapter, StoredAdapter
from .gguf import write_gguf
from .mlx_lm import MlxLm
from .peft import Peft


class AdapterFormat(Protocol):
    """The storage format of another tool's adapters.

    ``convention`` is what the metadata of its safetensors files call their framework.
    """

    tensor_file: str
    convention: str

    def recognises(self, config: dict) -> bool:
        """Return whether an adapter_config.json is of this format."""

    def check_config(self, config: dict, where: Path) -> None:
        """Raise a PackError unless a pack can store the adapters of a config."""

    def read(self, stored: StoredAdapter, model_type: str) -> ExternalAdapter:
        """Return an adapter under a pack's names.

        Raises:
            PackError: a tensor cannot be converted.
        """

    def drop_copies(self, adapter: ExternalAdapter, base: BaseModel, where: Path) -> None:
        """Drop what an adapter stores twice, now that its base is known.

        Raises:
            PackError: the base has no place for what it stores.
        """

    def convert(self, pack: Pack, file: Path) -> StoredAdapter:
        """Return a pack as this format stores it; ``file`` is where its tensors will be.

        Raises:
            PackError: the format has no place for something in the pack.
        """

    def deltas(self, stored: StoredAdapter, model_type: str) -> dict[str, Delta]:
        """Return the other tool's delta of each module of a pack, from its own tensors."""


FORMATS: dict[str, AdapterFormat] = registered(ADAPTER_FORMATS, {"mlx-lm": MlxLm(), "peft": Peft()})


def format_of(config: dict, where: Path) -> str:
    for name, form in FORMATS.items():
        if form.recognises(config):
            return name
    raise PackError(f"{where}: is not the {CONFIG} of any of {', '.join(FORMATS)}.", "unsupported")


# Programs that open a pack in a form of their own. Each function writes the folder of a pack
# atomically, for the base that the program names so (None: as the pack does). It returns ``notes``,
# what the user does next, and figures; PackError where the program has no place for something.
Writer = Callable[[Pack, Path, str | None], dict]

DESTINATIONS: dict[str, Writer] = registered(
    choices.DESTINATIONS,
    {
        "gguf": write_gguf,
        "ollama": write_for_ollama,
        "lmstudio": write_for_lmstudio,
        "swift": write_for_swift,
    },
)
