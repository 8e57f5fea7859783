"""Formats of other tools that packs are exported to and imported from, and programs that read them.

A new format is a class in a file of its own, a new program a function here; each has an entry in
one of the tables, and its name in `config.choices`.

LM Studio opens no adapters, so it gets a merged model where it looks for models. Ollama hands a
GGUF adapter to llama.cpp, and a Modelfile names the model it belongs to. Of safetensors folders it
reads those of llama and gemma2 alone, without the scale of mlx-lm's, so a GGUF file is the one form
that is right for all. mlx-swift-lm opens a folder by ``LoRAContainer.from(directory:)``.
"""

import re
import shlex
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

from ..bases.model import BaseModel
from ..bases.readers import LM_STUDIO
from ..config import choices
from ..config.choices import ADAPTER_FORMATS, registered
from ..errors import PackError
from ..files import atomic_folder
from ..packs.manifest import template_kwargs_of
from ..packs.pack import Pack
from ..tensors import check_written
from .external import (
    CONFIG,
    Delta,
    ExternalAdapter,
    StoredAdapter,
    save_folder,
    unsupported,
    verify_numerically,
)
from .gguf import write_gguf
from .merge import merge_pack
from .mlx_lm import MlxLm
from .peft import Peft

MODELS = LM_STUDIO / "mlx-packs"
# The base of a pack that was trained on a model of Ollama. The name may be somebody else's text.
_OF_OLLAMA = re.compile(r"ollama:([\w.\-/:]+)", re.ASCII)


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
        """Return an adapter under a pack's names; a PackError if a tensor cannot be converted."""

    def drop_copies(self, adapter: ExternalAdapter, base: BaseModel, where: Path) -> None:
        """Drop what an adapter stores twice, or raise a PackError where its base lacks a place."""

    def convert(self, pack: Pack, file: Path) -> StoredAdapter:
        """Return a pack as this format stores it, in ``file``; a PackError if it has no place."""

    def deltas(self, stored: StoredAdapter, model_type: str) -> dict[str, Delta]:
        """Return the other tool's delta of each module of a pack, from its own tensors."""


FORMATS: dict[str, AdapterFormat] = registered(ADAPTER_FORMATS, {"mlx-lm": MlxLm(), "peft": Peft()})


def format_of(config: dict, where: Path) -> str:
    for name, form in FORMATS.items():
        if form.recognises(config):
            return name
    raise unsupported(where, f"is not the {CONFIG} of any of {', '.join(FORMATS)}.")


def write_for_lmstudio(pack: Pack, out: Path, start: str | None) -> dict:
    """Merge a pack, quantized as its base is if the merge gate lets that pass.

    ``start`` is the base, where it is not the one that the pack names.
    """
    base = pack.manifest["base"]
    requantize = "same" if base["quantization"] else "none"
    merge = partial(merge_pack, pack, start or base["id"], out)
    report = merge(requantize=requantize)
    notes = []
    if not report["passed"] and report["passes"] in report["tried"]:
        requantize = report["passes"]
        notes.append(
            f"merged with --requantize {requantize}: quantized as the base, it would lose too "
            "much of the pack"
        )
        report = merge(requantize=requantize)

    if not report["passed"]:
        tried = ", ".join(f"{name} {drift:.2g}" for name, drift in report["tried"].items())
        raise unsupported(
            out,
            "not written: merged, the model would differ too much from the base with the pack "
            f"({tried}; at most {report['max_drift']:.2g}). `packs merge` has more choices.",
        )

    notes += [f"compared on: {report['compared_on']}", "LM Studio lists it in My Models"]
    return {"requantize": requantize, "verified": report["verified"], "notes": notes}


def write_for_ollama(pack: Pack, out: Path, start: str | None) -> dict:
    """Write a GGUF adapter for the model ``start``, which `ollama pull` fetched."""
    base = pack.manifest["base"]["id"]
    if start is None and (of_ollama := _OF_OLLAMA.fullmatch(base)):
        start = of_ollama[1]
    if start is None:
        raise PackError(
            f"--to ollama: pass --from MODEL: the Ollama model, or the .gguf file, of {base}.",
            flag="from",
        )

    report = write_gguf(pack, out, start)
    name = re.sub(r"[^a-z0-9_.-]", "-", out.name.lower())
    create = f"(cd {shlex.quote(str(out))} && ollama create {name}) && ollama run {name}"
    if template_kwargs_of(pack.manifest).get("enable_thinking") is False:
        create += " --think=false"
    notes = [note for note in report["notes"] if note.startswith("Ollama")]
    return {**report, "notes": [create, *notes]}


def write_adapter(
    pack: Pack, form: AdapterFormat, stored: StoredAdapter, texts: Mapping[str, str] = {}
) -> dict:
    """Write a pack as a format stores it, verified, with other files beside it."""
    out = stored.file.parent
    deltas = form.deltas(stored, pack.manifest["base"]["model_type"])
    verified = verify_numerically(pack.specs, pack.load_tensors(), deltas, out)

    with atomic_folder(out) as folder:
        save_folder(stored, folder, form.convention)
        check_written(folder / stored.file.name, stored.tensors, out)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")

    count = len(stored.tensors)
    return {
        "tensors": count,
        "verified": {"tensors": count, **verified},
        "notes": list(stored.notes),
    }


def write_for_swift(pack: Pack, out: Path, start: str | None) -> dict:
    """Write the adapter as mlx-lm has it, on linears in blocks only."""
    form = MlxLm()
    stored = form.convert(pack, out / form.tensor_file)
    absolute = stored.config.get("lora_parameters", {}).get("keys", ())
    others = [
        path
        for path, spec in pack.specs.items()
        if spec.kind == "embedding" or spec.experts is not None or path in absolute
    ]
    if others or not pack.specs:
        place = "".join(others[:1]) or "a weight in full"
        raise unsupported(
            pack.name,
            f"{place}: mlx-swift-lm adapts only linear layers inside blocks. Merge the pack.",
        )

    report = write_adapter(pack, form, stored)
    report["notes"].append("docs/elsewhere.md has the Swift code that opens it")
    return report


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
