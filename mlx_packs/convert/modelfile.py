"""The Modelfile of a pack for Ollama, and the model that it starts from, checked.

FROM is an absolute path, since Ollama reads a relative one from the folder of the Modelfile.
Ollama's templates are no Jinja, so it writes prompts by the one that it has for the model.
https://docs.ollama.com/modelfile
"""

import os.path
import re
from pathlib import Path

from ..bases.files import check_files, resolve_checkpoint
from ..bases.readers import DENSE, is_local_model, local_model
from ..config.data import PLAIN
from ..errors import PackError, errors_of
from ..packs.compatibility import check_checkpoint
from ..packs.manifest import chat_template_of
from ..packs.pack import Pack
from ..terminal import printable

_NAME = re.compile(r"[\w.\-/:]+", re.ASCII)
_OWN_TEMPLATE = (
    "Ollama uses the template that it has for the model. Write TEMPLATE into the Modelfile if the "
    "pack needs another one"
)


def modelfile(pack: Pack, adapter: str, start: str | None) -> tuple[str, str, list[str]]:
    """Return a Modelfile, the base model as llama.cpp names it, and notes.

    Without ``start``, FROM is a GGUF for the user to add.
    """
    base = printable(pack.manifest["base"]["id"])
    lines = [f"# {printable(pack.name)}: an adapter of {base}. FROM must be that model."]
    file = None
    if start is None:
        lines.append("# Put its GGUF here as base.gguf, or name the model that you pulled.")
    else:
        start = start.removeprefix(DENSE).removeprefix("ollama:")
        file = _file_of(start)

    notes = []
    if start is not None and file is None:
        try:
            _check_base(pack, local_model(f"ollama:{start}"))
        except PackError as error:
            if error.code == "mismatch":
                raise
            notes.append(f"Ollama has no {start} here: it was not compared with the pack's base")

    if file is not None:
        _check_base(pack, file)
        start = base = str(file)

    lines += [f"FROM {start or './base.gguf'}", f"ADAPTER ./{adapter}"]
    template = chat_template_of(pack.manifest)
    if template == PLAIN:
        lines.append('TEMPLATE """{{ .Prompt }}"""')
    elif template is not None or file is not None:
        notes.append(_OWN_TEMPLATE)
    return "\n".join([*lines, ""]), base, notes


def _file_of(start: str) -> Path | None:
    """Return the file that ``--from`` names; None if it is a model of Ollama."""
    if is_local_model(start):
        return local_model(start).resolve()

    path = Path(start).expanduser()
    is_path = path.suffix.lower() == ".gguf" or start.startswith((".", "/", "~")) or path.is_file()
    if is_path and not path.is_file():
        raise PackError(f"--from {start}: no such file.", "not-found", "from")
    if not (is_path or _NAME.fullmatch(start)) or not str(path).isprintable():
        raise PackError(
            f"--from {start!r:.80}: is no name of Ollama and no .gguf file.", flag="from"
        )
    return Path(os.path.abspath(path)) if is_path else None


def _check_base(pack: Pack, file: Path) -> None:
    """Check that a GGUF file is the pack's base."""
    base = pack.manifest["base"]
    with errors_of("from"):
        if base["id"].lower().endswith(".gguf") or is_local_model(base["id"]):
            prefix = DENSE if base["id"].startswith(DENSE) else ""
            check_checkpoint(pack, f"{prefix}{file}")
        else:  # it was trained on other weights of the same model
            _check_shapes(pack, check_files(resolve_checkpoint(file)))


def _check_shapes(pack: Pack, config: dict) -> None:
    base = pack.manifest["base"]
    family = base["model_type"].removesuffix("_text")
    blocks = [int(n) for path in pack.specs for n in re.findall(r"\.layers\.(\d+)\.", path)]
    widths = {s.in_features for path, s in pack.specs.items() if path.endswith("q_proj")}
    fits = max(blocks, default=0) < config["num_hidden_layers"]
    if (
        family != config["model_type"].removesuffix("_text")
        or not fits
        or (widths and widths != {config["hidden_size"]})
    ):
        raise PackError(
            f"{pack.name}: was trained on {base['id']}, and the file is another model.", "mismatch"
        )
