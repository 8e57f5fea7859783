"""Hashes of files, and of JSON that contains its own, so that reading it notices damage."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from .reading import sha256

SEAL = "sha256"  # the key of the hash in JSON that is sealed


def sealed(content: dict) -> dict:
    """Return JSON content with a hash of itself in place of an earlier one."""
    content = json.loads(json.dumps(without_seal(content)))  # as it will be read
    return {**content, SEAL: _digest(content)}


def check_seal(content: dict) -> None:
    """Raise a ValueError if JSON content differs from its hash; content without one passes."""
    if SEAL in content and content[SEAL] != _digest(without_seal(content)):
        raise ValueError("it differs from its hash: it was changed or damaged")


def without_seal(content: dict) -> dict:
    return {key: value for key, value in content.items() if key != SEAL}


def _digest(content: dict) -> str:
    """Return a hash of the values in JSON content; order and layout do not count."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def file_facts(folder: Path, names: Iterable[str]) -> dict[str, dict]:
    """Return size and SHA-256 of files of a folder by name, as manifests have them."""
    return {
        name: {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
        for name in names
    }


def check_files(folder: Path, facts: dict[str, dict]) -> None:
    """Raise a ValueError that names the first file of a folder that differs from its facts."""
    for name, expected in facts.items():
        size = (folder / name).stat().st_size
        if size != expected["bytes"]:
            raise ValueError(f"{name} has {size} bytes instead of {expected['bytes']}")
        if sha256(folder / name) != expected["sha256"]:
            raise ValueError(f"{name} differs from its hash")
