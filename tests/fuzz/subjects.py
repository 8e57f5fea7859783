"""Small valid subjects: a tokenizer of a few hundred tokens, a base, packs, rows."""

import hashlib
import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_packs import Pack, load_base
from mlx_packs.bases.files import tiny_checkpoint
from mlx_packs.reading import SEAL, sealed
from tests.helpers.models import model_of
from tests.helpers.packs import random_pack
from tests.helpers.rows import CHATS, write_rows

ORDINARY = 300  # tokens; the special ones follow
SIZES = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "max_position_embeddings": 256}


def write_tokenizer(folder: Path) -> int:
    """Write the first tokens of the bundled tokenizer and its template; the number of tokens."""
    source = tiny_checkpoint()
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    vocabulary = {token: i for token, i in model["vocab"].items() if i < ORDINARY}
    model["vocab"] = vocabulary
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in vocabulary]
    for i, token in enumerate(added):
        token["id"] = ORDINARY + i
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((source / name).read_bytes())
    return ORDINARY + len(added)


def write_base(folder: Path, dtype: mx.Dtype = mx.float32, **changes) -> Path:
    """Write a dense Qwen3 of two blocks, with its tokenizer."""
    folder.mkdir(parents=True)
    tokens = write_tokenizer(folder)
    model, config = model_of("qwen3", vocab_size=tokens, **SIZES | changes)
    config["eos_token_id"] = ORDINARY + 2
    tensors = {name: t.astype(dtype) for name, t in tree_flatten(model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_pack_on(base: Path, folder: Path, seed: int = 1, **lora) -> Pack:
    """Write a pack of random adapters on a base."""
    return random_pack(load_base(base), seed, **lora).save(folder)


def write_chats(folder: Path) -> Path:
    """Write a data folder of a few conversations."""
    return write_rows(folder, train=CHATS, valid=CHATS[:2])


def resealed(manifest: bytes, files: dict[str, bytes] | None = None) -> bytes:
    """Return a manifest, record or state with right sizes and hashes, as far as it is one.

    So a mutant comes past the checks for damage, as what a stranger made on purpose does.
    """
    try:
        content = json.loads(manifest)
        for name, data in (files or {}).items():
            digest = hashlib.sha256(data).hexdigest()
            content["files"][name] |= {"bytes": len(data), "sha256": digest}
        if SEAL in content:
            content = sealed(content)
        return json.dumps(content).encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return manifest
