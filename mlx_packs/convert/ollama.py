"""Ollama: a GGUF adapter and a Modelfile that names the model it belongs to.

Ollama hands the file to llama.cpp. Of safetensors folders it reads those of llama and gemma2 alone,
without the scale of mlx-lm's, so a GGUF file is the one form that is right for all.
"""

import re
import shlex
from pathlib import Path

from ..errors import PackError
from ..packs.pack import Pack
from .gguf import Gguf

# The base of a pack that was trained on a model of Ollama. The name may be somebody else's text.
_OF_OLLAMA = re.compile(r"ollama:([\w.\-/:]+)", re.ASCII)


class Ollama:
    """`Gguf`, with the model that the Modelfile starts from."""

    def write(self, pack: Pack, out: Path, start: str | None) -> dict:
        """Write the folder; ``start`` is the model that `ollama pull` fetched."""
        base = pack.manifest["base"]["id"]
        if start is None and (of_ollama := _OF_OLLAMA.fullmatch(base)):
            start = of_ollama[1]
        if start is None:
            raise PackError(
                f"--to ollama: pass --from MODEL: the Ollama model, or the .gguf file, of {base}.",
                flag="from",
            )

        report = Gguf().write(pack, out, start)
        name = re.sub(r"[^a-z0-9_.-]", "-", out.name.lower())
        create = f"(cd {shlex.quote(str(out))} && ollama create {name}) && ollama run {name}"
        return {**report, "notes": [create]}
