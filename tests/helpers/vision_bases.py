"""Tiny random checkpoints of vision-language families, in the form in which they are published.

Tensor names, the fields of config.json, the special tokens, the chat template and the files of the
processor are a published checkpoint's; sizes are small. Both transformers and mlx-vlm open them.
Writing one needs torch and transformers, which know the tensors of each class.

Each family has a folder in `vision_families` with these files. `made_of.json` is not published: the
special tokens before and after the 256 bytes in the vocabulary, the token that begins every text, and
the beginnings of tensor names in transformers' class with those that are published.
"""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from mlx_packs.bases.files import tiny_checkpoint

FAMILIES = Path(__file__).with_name("vision_families")
MADE_OF = "made_of.json"
SHARE_OF_NOISE = 0.05  # of a weight around 0, and of a norm around its neutral value
FACTORS = ("weight", "scalar", "scale")  # names of tensors of one axis end so


def write_vision_base(family: str, folder: Path, seed: int = 0, **changes: dict) -> Path:
    """Write a checkpoint of `family` into `folder`, and return the folder.

    Args:
        family: a folder of `vision_families`, the `model_type` of its config.json.
        folder: made if it does not exist.
        seed: of the weights, which are float32.
        changes: other sizes by part of config.json, such as ``text_config``.
    """
    shutil.copytree(FAMILIES / family, folder, dirs_exist_ok=True)
    facts = json.loads((folder / MADE_OF).read_text())
    (folder / MADE_OF).unlink()
    _write_tokenizer(folder, facts)

    config = json.loads((folder / "config.json").read_text())
    for part, sizes in changes.items():
        config[part] |= sizes
    _write_json(folder / "config.json", config)

    weights = _random_weights(folder, facts.get("renamed", {}), np.random.default_rng(seed))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _write_tokenizer(folder: Path, facts: dict) -> None:
    """A token for each byte, without merges, and the special tokens before and after them."""
    tokenizer = json.loads((tiny_checkpoint() / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    letters = sorted(vocabulary, key=vocabulary.get)[:256]
    first, last = facts["before_bytes"], facts["after_bytes"]
    ids = {token: number for number, token in enumerate([*first, *letters, *last])}

    in_the_model = [*first, *letters]  # others have the ids after them in any case
    tokenizer["model"] |= {"vocab": {token: ids[token] for token in in_the_model}, "merges": []}
    tokenizer["added_tokens"] = [
        {
            "id": ids[token],
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token in (*first, *last)
    ]
    if begins := facts.get("begins"):
        _begin_texts(tokenizer["post_processor"], begins, ids[begins])
    _write_json(folder / "tokenizer.json", tokenizer)


def _begin_texts(template: dict, token: str, number: int) -> None:
    for kind in ("single", "pair"):
        template[kind].insert(0, {"SpecialToken": {"id": token, "type_id": 0}})
    template["special_tokens"] = {token: {"id": token, "ids": [number], "tokens": [token]}}


def _random_weights(folder: Path, renamed: dict[str, str], numbers) -> dict[str, np.ndarray]:
    """Weights for the tensors of transformers' class, under their published names."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)

    tied = set(model.all_tied_weights_keys)
    return {
        _published(name, renamed): _random(
            name, tuple(tensor.shape), numbers, config.model_type == "gemma3"
        )
        for name, tensor in model.state_dict().items()
        if name not in tied
    }


def _published(name: str, renamed: dict[str, str]) -> str:
    for beginning, published in renamed.items():
        if name.startswith(beginning):
            return published + name.removeprefix(beginning)
    return name


def _random(name: str, shape: tuple[int, ...], numbers, adds_1: bool) -> np.ndarray:
    """Small numbers; a norm's weight and a factor are near 1, or near 0 if 1 is added to them.

    adds_1: whether the language model adds 1 to the weights of its norms.
    """
    if name.endswith(("_min", "_max")):  # the bounds of a clipped linear: some numbers are clipped
        return np.array(-3 if name.endswith("_min") else 3, np.float32)

    noise = SHARE_OF_NOISE * numbers.standard_normal(shape)
    is_factor = len(shape) == 1 and name.endswith(FACTORS)
    if is_factor and not (adds_1 and "vision_tower" not in name):
        noise += 1
    return noise.astype(np.float32)
