"""Saved models: packs below one folder, with the optimizer's state where training continues.

``FOLDER/RUN/weights/NAME`` is a pack with ``optimizer.safetensors`` and ``training.json``,
``FOLDER/RUN/sampler_weights/NAME`` one for sampling. Their paths in the protocol are
``tinker://RUN/weights/NAME``; no other path is ever opened.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...errors import file_errors
from ...files import to_json
from ...filesystem import discard
from ...packs.manifest import MANIFEST
from ...packs.pack import Pack
from ...reading import check_files, file_facts, read_json
from ...runtime import mx
from ...tensors import read_tensors, save_tensors
from ..fields import field_error, not_found, value_error

SCHEME = "tinker://"
OPTIMIZER = "optimizer.safetensors"
FACTS = "training.json"
Kind = Literal["weights", "sampler_weights"]
_KINDS = ("weights", "sampler_weights")
_STEP = "step"  # of the optimizer; an integer, which a file of tensors has not
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)


@dataclass(frozen=True)
class Saved:
    """A saved model.

    Attributes:
        run: the id of the model that was saved; ``kind`` and ``name`` complete its path.
        facts: ``training.json``: what a client said of it, empty for a pack from elsewhere.
    """

    run: str
    kind: str
    name: str
    folder: Path
    facts: Mapping[str, Any]

    @property
    def uri(self) -> str:
        return f"{SCHEME}{self.run}/{self.kind}/{self.name}"


def new_saved(top: Path, model_id: str, kind: Kind, name: str, facts: Mapping[str, Any]) -> Saved:
    """Return what a model will be saved as below ``top``; its name is checked."""
    if not _NAME.fullmatch(name):
        text = "cannot name a saved model. Use up to 64 letters, digits and . _ -"
        raise value_error("path", name, text)
    run = run_of(model_id)
    return Saved(run, kind, name, top / run / kind / name, facts)


def save_model(
    saved: Saved,
    pack: Pack,
    optimizer: Mapping[str, mx.array] | None = None,
    overwrite: bool = False,
) -> None:
    """Save a pack atomically, with the state of an ``optimizer`` if there is one.

    A PackError if the path is in use and is not to be overwritten, or the disk is full.
    """
    if saved.folder.exists() and not overwrite:
        text = f"'{saved.name}' is saved already. Choose another name or pass overwrite."
        raise field_error("path", text, "exists")

    def write_more(partial: Path) -> None:
        content = dict(saved.facts)
        if optimizer is not None:
            moments = {key: value for key, value in optimizer.items() if key != _STEP}
            save_tensors(partial / OPTIMIZER, moments)
            content |= {"files": file_facts(partial, [OPTIMIZER])}
            content |= {"step": optimizer[_STEP].item()}
        (partial / FACTS).write_text(to_json(content), encoding="utf-8")

    pack._save_with(write_more, saved.folder, overwrite)


def find_saved(top: Path, uri: str) -> Saved:
    """Return what is saved under a path; a PackError if there is nothing."""
    run, kind, name = _parts(uri)
    folder = top / run / kind / name

    is_below = top.resolve() in folder.resolve().parents
    if not is_below or not (folder / MANIFEST).is_file():
        raise not_found("path", uri, "nothing is saved there.")
    file = folder / FACTS  # which a pack that was copied here lacks
    facts = read_json(file) if file.is_file() else {}
    return Saved(run, kind, name, folder, facts)


def optimizer_of(saved: Saved) -> dict[str, mx.array]:
    if "step" not in saved.facts:
        reason = "has no optimizer state. Load only the weights."
        raise not_found("path", saved.uri, reason)

    with file_errors(saved.folder):
        check_files(saved.folder, saved.facts.get("files", {}))

    moments = read_tensors(saved.folder / OPTIMIZER)
    return {**moments, _STEP: mx.array(saved.facts["step"], mx.uint64)}


def remove_saved(saved: Saved) -> None:
    discard(saved.folder, saved.folder)


def run_of(model_id: str) -> str:
    """Return the name of the folder of a model: its id, in which Finder shows no colon."""
    return model_id.replace(":", "-")


def _parts(uri: str) -> tuple[str, str, str]:
    run, _, rest = uri.removeprefix(SCHEME).partition("/")
    kind, _, name = rest.partition("/")
    run = run_of(run)

    is_path = uri.startswith(SCHEME) and kind in _KINDS
    if not is_path or not _NAME.fullmatch(run) or not _NAME.fullmatch(name):
        text = "must be tinker://RUN/weights/NAME or tinker://RUN/sampler_weights/NAME."
        raise value_error("path", uri, text)
    return run, kind, name
