"""Base models that are single files: their formats, and models of Ollama.

Each file becomes an ordinary checkpoint folder. To add a format: its functions in a package here,
and an entry in `READERS`; or a package of its own, whose entry point names a `Reader`.
"""

import logging
import os
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..config.choices import Table
from ..errors import PackError, file_errors
from ..kinds import check_keys
from ..reading import open_regular, read_json

_log = logging.getLogger("mlx_packs")
_MODEL_LAYER = "application/vnd.ollama.image.model"
_ADAPTER_LAYER = "application/vnd.ollama.image.adapter"
_OLLAMA = "ollama:"
_OLLAMA_PATH = ("registry.ollama.ai", "library")  # of models whose name has no host or namespace
LM_STUDIO = Path("~/.lmstudio/models")  # <publisher>/<model>: a checkpoint, or GGUF files
GGUF_MAGIC = b"GGUF"
DENSE = "dense:"  # before the name of a GGUF file: with dense K-quants
_PART = re.compile(r"[\w][\w.\-]*", re.ASCII)
_logged: set[str] = set()  # faults of packages, each of which is logged once


@dataclass(frozen=True)
class Reader:
    """One format of files.

    Attributes:
        name: for people.
        matches: whether a file is named or begins as one.
        code: the function that returns the checkpoint folder of a file, and writes it if it is
            not there; ``module:name``, imported when it is needed.
        suffixes: endings of the names of its files, in lower case, by which a file is known that
            is not there.
    """

    name: str
    matches: Callable[[Path], bool]
    code: str
    suffixes: tuple[str, ...] = ()

    def folder(self, file: Path, **options: bool) -> Path:
        return pkgutil.resolve_name(self.code)(file, **options)


def is_gguf(path: Path) -> bool:
    """By its name or its first bytes."""
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with open_regular(path) as f:
            return f.read(4) == GGUF_MAGIC
    except (OSError, PackError):
        return False


_GGUF_CODE = "mlx_packs.bases.gguf.checkpoint:checkpoint_folder"
_GGUF = Reader("GGUF", is_gguf, _GGUF_CODE, (".gguf",))
READERS = (_GGUF,)


def reader_of(path: Path) -> Reader | None:
    """None if the format is not read."""
    return next((reader for reader in _readers() if reader.matches(path)), None)


def names_file(base: str) -> bool:
    """Whether a name of a base is the name of a file that a reader reads."""
    return any(base.lower().endswith(reader.suffixes) for reader in _readers())


def _readers() -> Iterator[Reader]:
    """The readers here and of installed packages; a faulty package is logged."""
    yield from READERS
    for plugin, *_ in pkgutil.resolve_name(Table.installed)("readers").values():
        try:
            yield plugin.facts(Reader)
        except PackError as error:
            if error.message not in _logged:
                _log.warning("%s", error.message)
                _logged.add(error.message)


def is_local_model(name: str) -> bool:
    """Whether a name is a model of Ollama on this machine, or a GGUF file with dense K-quants."""
    return name.startswith((_OLLAMA, DENSE))


def local_model(name: str) -> Path:
    """The GGUF file of ``ollama:NAME``, or the folder of ``dense:FILE.gguf``."""
    if name.startswith(DENSE):
        return _dense(name.removeprefix(DENSE))
    return _ollama(name.removeprefix(_OLLAMA))


def _dense(name: str) -> Path:
    path = Path(name).expanduser()
    if is_local_model(name) and not os.path.exists(path):
        path = local_model(name)
    if not is_gguf(path):
        raise PackError(
            f"--model {DENSE}{name}: is not a GGUF file. Name it without {DENSE!r}.", "unsupported"
        )
    return _GGUF.folder(path, dense_k=True)


def ollama_folder() -> Path:
    return Path(os.environ.get("OLLAMA_MODELS") or "~/.ollama/models").expanduser()


def ollama_names() -> list[str]:
    """Return the names of Ollama's models on this machine, as `local_model` takes them."""
    names = []
    top = ollama_folder() / "manifests"
    for manifest in sorted(top.glob("*/*/*/[!.]*")):
        *parts, tag = manifest.relative_to(top).parts
        for default in _OLLAMA_PATH:
            if parts[0] == default:
                del parts[0]
        names.append(f"{_OLLAMA}{'/'.join(parts)}:{tag}")
    return names


# A manifest at ``manifests/HOST/NAMESPACE/MODEL/TAG`` names blobs, one of which is the GGUF.
def _ollama(name: str) -> Path:
    flag = f"--model {_OLLAMA}{name}"
    model, _, tag = name.partition(":")
    parts = model.split("/")
    if not all(_PART.fullmatch(part) for part in (*parts, tag or "latest")) or len(parts) > 3:
        raise PackError(f"{flag}: is not a name of Ollama. Name it as `ollama list` does.")

    host = [*_OLLAMA_PATH[: 3 - len(parts)], *parts]

    folder = ollama_folder()
    manifest = folder.joinpath("manifests", *host, tag or "latest")
    if not manifest.is_file():
        raise PackError(
            f"{flag}: Ollama has no such model in {folder}. `ollama pull {name}` gets it; "
            "OLLAMA_MODELS names another folder.",
            "not-found",
        )

    content = read_json(manifest)
    with file_errors(f"{manifest}: is not a manifest of Ollama"):
        check_keys(content, {"layers": "a list", "layers.*": "a mapping"})
        check_keys(content, {"layers.*.mediaType": "text", "layers.*.digest": "text"})

    kinds = {layer["mediaType"]: layer["digest"] for layer in content["layers"]}
    if _ADAPTER_LAYER in kinds:
        raise PackError(
            f"{flag}: is a model with an adapter (ADAPTER in its Modelfile). Name the model that "
            "it is FROM.",
            "unsupported",
        )

    digest = kinds.get(_MODEL_LAYER, "")
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise PackError(
            f"{manifest}: names no GGUF file. `ollama pull {name}` again.", "unreadable"
        )

    blob = folder / "blobs" / digest.replace(":", "-")
    if not blob.is_file():
        raise PackError(
            f"{flag}: its file {blob} is gone, which the manifest names. `ollama pull {name}` gets "
            "it again.",
            "not-found",
        )
    return blob
