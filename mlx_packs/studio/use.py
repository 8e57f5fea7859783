"""The screens Use, Ratings and Export: what they show, and the command that each form starts."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..bases.files import TINY
from ..errors import PackError
from ..learning.folder import LearningFolder
from ..packs.folder import list_packs
from .access import RUNS, check_name

_LEARNED = "learned"  # the folder of the home with rated answers
_MERGED = "merged"
_TARGETS = {
    "ollama": "Ollama",
    "lmstudio": "LM Studio",
    "gguf": "llama.cpp",
    "mlx-lm": "mlx-lm",
    "peft": "PEFT",
    "swift": "Swift",
    _MERGED: "merged model",
}
Form = Mapping[str, str]


def facts_of(home: Path) -> dict[str, Any]:
    """Return what the screens show of a home."""
    folder = home / RUNS
    entries = list_packs(folder) if folder.is_dir() else []
    packs = [entry for entry in entries if entry["error"] is None]
    return {
        "home": str(home),
        "packs": packs,
        "bases": list(dict.fromkeys([*(pack["base"] for pack in packs), TINY])),
        "targets": _TARGETS,
        "free": shutil.disk_usage(home).free,
        "ratings": lambda: [rated_in(path) for path in sorted((home / _LEARNED).glob("*"))],
    }


def rated_in(path: Path) -> dict[str, Any]:
    try:
        return {"folder": path.name, "fault": "", **LearningFolder.at(path).to_json()}
    except PackError as error:
        return {"folder": path.name, "fault": error.message}


def serve(form: Form) -> list[str]:
    """Return the command that answers with a base model and packs."""
    packs = [key.removeprefix("pack:") for key in form if key.startswith("pack:")]
    command = ["serve", "--port=0", f"--model={form.get('model') or TINY}"]
    command += [f"--pack={_pack(name)}" for name in packs]
    if "learn" in form:
        command.append(f"--learn={_LEARNED}/{packs[0] if packs else 'base'}")
    return command


def learn(form: Form) -> list[str]:
    """Return the command that trains on ratings, or serves another version."""
    command = ["learn", f"{_LEARNED}/{check_name(form.get('folder', ''))}"]
    if number := form.get("version"):
        command.append(f"--use={number}")
    return command


def export(form: Form) -> list[str]:
    """Return the command that writes a pack for a program, into a folder of the home."""
    target = form.get("to", "")
    pack = _pack(form.get("pack", ""))
    out = f"--out={check_name(form.get('out', ''))}"
    if target == _MERGED:
        return ["merge", pack, out, f"--requantize={'same' if 'same' in form else 'none'}"]
    if target == "lmstudio":  # which finds models only in its own folder
        return ["export", pack, f"--to={target}"]

    command = ["export", pack, f"--to={target}", out]
    if start := form.get("from"):
        command.append(f"--from={start}")
    return command


def _pack(name: str) -> str:
    return f"{RUNS}/{check_name(name)}"


# What the form of each screen starts.
COMMANDS: dict[str, Callable[[Form], list[str]]] = {
    "use": serve,
    "ratings": learn,
    "export": export,
}
