"""Tiny random checkpoints of vision-language families, in the form in which they are published.

Tensor names, the fields of config.json, the special tokens, the chat template and the files of the
processor are a published checkpoint's; sizes are small. Both transformers and mlx-vlm open them.
Writing one needs torch and transformers, which know the tensors of each class.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from mlx_packs.bases.files import tiny_checkpoint
from tests.helpers.vision_families.family import Family
from tests.helpers.vision_families.gemma import GEMMA3, GEMMA4
from tests.helpers.vision_families.idefics import IDEFICS3, SMOLVLM
from tests.helpers.vision_families.llama import LLAVA, MISTRAL3
from tests.helpers.vision_families.qwen import QWEN2_5_VL, QWEN2_VL, QWEN3_VL

SHARE_OF_NOISE = 0.05  # of a weight around 0, and of a norm around its neutral value
FACTORS = ("weight", "scalar", "scale")  # names of tensors of one axis end so


_FAMILIES = {
    "smolvlm": SMOLVLM,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen3_vl": QWEN3_VL,
    "idefics3": IDEFICS3,
    "gemma3": GEMMA3,
    "gemma4": GEMMA4,
    "qwen2_vl": QWEN2_VL,
    "llava": LLAVA,
    "mistral3": MISTRAL3,
}


def write_vision_base(family: str, folder: Path, seed: int = 0, **changes: dict) -> Path:
    """Write a checkpoint of `family` into `folder`, and return the folder.

    Args:
        family: one of `_FAMILIES`, the `model_type` of its config.json.
        folder: made if it does not exist.
        seed: of the weights, which are float32.
        changes: other sizes by part of config.json, such as ``text_config``.
    """
    facts = _changed(_FAMILIES[family], changes)
    folder.mkdir(parents=True, exist_ok=True)

    ids = _write_tokenizer(folder, facts)
    _write_json(folder / "config.json", facts.config(ids))
    for name, content in facts.files.items():
        _write_json(folder / name, content)

    (folder / "chat_template.jinja").write_text(facts.template)
    weights = _random_weights(folder, facts, np.random.default_rng(seed))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _changed(facts: Family, changes: dict[str, dict]) -> Family:
    def config(ids: dict[str, int]) -> dict:
        own = facts.config(ids)
        return {**own, **{part: {**own[part], **sizes} for part, sizes in changes.items()}}

    return replace(facts, config=config)


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _write_tokenizer(folder: Path, facts: Family) -> dict[str, int]:
    """A token for each byte, without merges, and the special tokens after them; returns all ids."""
    tokenizer = json.loads((tiny_checkpoint() / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    letters = sorted(vocabulary, key=vocabulary.get)[:256]
    special = [*facts.first_tokens, *facts.tokens]
    ids = {
        token: number for number, token in enumerate([*facts.first_tokens, *letters, *facts.tokens])
    }

    in_the_model = [*facts.first_tokens, *letters]  # others have the ids after them in any case
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
        for token in special
    ]
    if facts.begins:
        _begin_texts(tokenizer["post_processor"], facts.begins, ids[facts.begins])

    _write_json(folder / "tokenizer.json", tokenizer)
    settings = {"model_max_length": 4096, "clean_up_tokenization_spaces": False}
    _write_json(folder / "tokenizer_config.json", settings | facts.tokenizer)
    return ids


def _begin_texts(template: dict, token: str, number: int) -> None:
    for kind in ("single", "pair"):
        template[kind].insert(0, {"SpecialToken": {"id": token, "type_id": 0}})
    template["special_tokens"] = {token: {"id": token, "ids": [number], "tokens": [token]}}


def _random_weights(folder: Path, facts: Family, numbers) -> dict[str, np.ndarray]:
    """Weights for the tensors of transformers' class, under their published names."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)

    tied = set(model.all_tied_weights_keys)
    return {
        _published(name, facts.renamed): _random(name, tuple(tensor.shape), facts, numbers)
        for name, tensor in model.state_dict().items()
        if name not in tied
    }


def _published(name: str, renamed: dict[str, str]) -> str:
    for beginning, published in renamed.items():
        if name.startswith(beginning):
            return published + name.removeprefix(beginning)
    return name


def _random(name: str, shape: tuple[int, ...], facts: Family, numbers) -> np.ndarray:
    """Small numbers; a norm's weight and a factor are near 1, or near 0 if 1 is added to them."""
    if name.endswith(("_min", "_max")):  # the bounds of a clipped linear: some numbers are clipped
        return np.array(-3 if name.endswith("_min") else 3, np.float32)

    noise = SHARE_OF_NOISE * numbers.standard_normal(shape)
    is_factor = len(shape) == 1 and name.endswith(FACTORS)
    if is_factor and not facts.norms_from_zero(name):
        noise += 1
    return noise.astype(np.float32)
