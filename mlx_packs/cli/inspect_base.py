"""What `packs inspect` shows of a base model: format, fingerprint and chat template."""

import os
from pathlib import Path
from typing import Any

from ..bases.files import TINY
from ..bases.fingerprint import short_fingerprint
from ..bases.loading import lazy_base
from ..bases.local_models import is_local_model
from ..bases.model import BaseModel
from ..bases.readers import reader_of
from ..bases.tokenizer import load_tokenizer
from ..bases.turns import answer_end
from ..packs.manifest import MANIFEST


def is_base(name: Path) -> bool:
    """Return whether a name is a base model on this machine; a pack is none."""
    if os.path.isfile(name):
        return reader_of(name) is not None
    if os.path.isdir(name):
        return (name / "config.json").is_file() and not (name / MANIFEST).is_file()
    return str(name) == TINY or is_local_model(str(name))


def describe_base(name: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the facts of a base model and the lines that show them. No weights are read.

    Raises: PackError, if it is no base model that can be read.
    """
    base = lazy_base(name)
    facts = {
        "base": base.public_name,
        "model_type": base.config["model_type"],
        "architecture": base.architecture,
        "quantization": base.quantization,
        "fingerprint": base.fingerprint,
        "vocab_size": base.vocab_size,
    }
    lines = [
        f"base    {base.summary()}",
        f"weights fingerprint {short_fingerprint(base.fingerprint)}",
    ]

    if base.architecture == "decoder":
        facts |= _text_facts(base)
        lines.append(_text_line(facts))
    return facts, lines


def _text_facts(base: BaseModel) -> dict[str, Any]:
    """Return whether a decoder has a chat template, and what ends an answer in it."""
    tokenizer = load_tokenizer(base.path, base.config, False)
    end = answer_end(tokenizer)
    text = end.text
    if not text and end.token is not None:
        text = tokenizer.decode([end.token])
    return {"has_chat_template": tokenizer.has_chat_template, "answer_end": text or None}


def _text_line(facts: dict[str, Any]) -> str:
    parts = [f"{facts['vocab_size']:,} tokens", "no chat template"]
    if facts["has_chat_template"]:
        parts[1] = "with a chat template"
    if facts["answer_end"]:
        parts.append(f"an answer ends with {facts['answer_end']}")
    return "text    " + " · ".join(parts)
