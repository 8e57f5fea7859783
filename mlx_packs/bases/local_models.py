"""Models that Ollama and LM Studio have on this machine, by their names there: ``ollama:qwen3:4b``.

Ollama: a manifest at ``manifests/HOST/NAMESPACE/MODEL/TAG`` names blobs, one of which is the GGUF.
LM Studio: ``models/PUBLISHER/MODEL/FILE.gguf``.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

from ..errors import PackError
from ..kinds import check_keys
from ..reading import read_json

_MODEL_LAYER = "application/vnd.ollama.image.model"
_ADAPTER_LAYER = "application/vnd.ollama.image.adapter"
_PART = re.compile(r"[\w][\w.\-]*", re.ASCII)


def is_local_model(name: str) -> bool:
    """Whether a name is a model of another program on this machine."""
    return name.partition(":")[0] in PROGRAMS and ":" in name


def local_model(name: str) -> Path:
    """The GGUF file of ``ollama:NAME`` or ``lmstudio:PUBLISHER/MODEL``, or PackError."""
    program, _, rest = name.partition(":")
    return PROGRAMS[program](rest)


def _ollama(name: str) -> Path:
    flag = f"--model ollama:{name}"
    model, _, tag = name.partition(":")
    parts = model.split("/")
    if not all(_PART.fullmatch(part) for part in (*parts, tag or "latest")) or len(parts) > 3:
        raise PackError(f"{flag}: is not a name of Ollama. Name it as `ollama list` does.")

    defaults = ["registry.ollama.ai", "library"]
    host = [*defaults[: 3 - len(parts)], *parts]

    folder = Path(os.environ.get("OLLAMA_MODELS") or "~/.ollama/models").expanduser()
    manifest = folder.joinpath("manifests", *host, tag or "latest")
    if not manifest.is_file():
        raise PackError(
            f"{flag}: Ollama has no such model in {folder}. `ollama pull {name}` gets it; "
            "OLLAMA_MODELS names another folder.",
            "not-found",
        )

    content = read_json(manifest)
    try:
        check_keys(content, {"layers": "a list", "layers.*": "a mapping"})
        check_keys(content, {"layers.*.mediaType": "text", "layers.*.digest": "text"})
    except ValueError as error:
        raise PackError(
            f"{manifest}: is not a manifest of Ollama: {error}.", "unreadable"
        ) from None

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


def _lmstudio(name: str) -> Path:
    """With several files, the name says which."""
    flag = f"--model lmstudio:{name}"
    parts = name.split("/")
    if len(parts) not in (2, 3) or not all(_PART.fullmatch(part) for part in parts):
        raise PackError(
            f"{flag}: is not a name of LM Studio. Name PUBLISHER/MODEL or "
            "PUBLISHER/MODEL/FILE.gguf."
        )

    root = Path("~/.lmstudio/models").expanduser()
    place = root.joinpath(*parts)
    if len(parts) == 3 and place.is_file():
        return place

    folder = root.joinpath(*parts[:2])
    names = [file.name for file in sorted(folder.glob("*.gguf")) if "mmproj" not in file.name]
    if not names or len(parts) == 3:
        listed = ""
        if names:
            listed = f" It has {', '.join(names)}."
        raise PackError(f"{flag}: there is no GGUF file at {place}.{listed}", "not-found")

    if len(names) > 1:
        raise PackError(
            f"{flag}: has {len(names)} GGUF files. Name one: lmstudio:{name}/{names[0]} "
            f"({', '.join(names)}).",
            "conflict",
        )

    return folder / names[0]


PROGRAMS: dict[str, Callable[[str], Path]] = {"ollama": _ollama, "lmstudio": _lmstudio}
