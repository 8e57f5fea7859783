"""Pictures and rows that have them, and what mlx-vlm and transformers are given of them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from mlx_packs.packs.base import Base
from mlx_packs.runtime import mx
from tests.helpers.rows import chat, write_rows

NAMES = ("red", "blue", "dark", "light")


def picture(seed: int, height: int = 56, width: int = 56):
    """An image of random pixels."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def images(folder: Path) -> list[str]:
    """Write four pictures; their names."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(NAMES):
        picture(number).save(folder / f"{name}.png")
    return [f"{name}.png" for name in NAMES]


def chats(folder: Path) -> Path:
    """Two questions on each of four images, and one without."""
    rows = [
        {"image": name, **chat(f"What is it, {number}?", name[:3])}
        for name in images(folder)
        for number in (1, 2)
    ]
    return write_rows(folder, train=[*rows, chat("Hello", "You")], valid=rows[:2])


def write_asked(folder: Path, **columns: str) -> Path:
    """A question on each of four images, with other columns."""
    rows = [{"image": name, "prompt": "What is it?", **columns} for name in images(folder)]
    return write_rows(folder, train=rows, valid=rows[:2])


def _colored(number: int) -> dict:
    return chat("Which color is it?", f"It is color {number}.")


def write_image_rows(
    folder: Path, images: int = 1, row: Callable[[int], dict] = _colored, **counts: int
) -> Path:
    """A data folder with the given number of rows for each split; each row has its own images."""
    folder.mkdir(parents=True, exist_ok=True)
    splits: dict[str, list] = {}
    number = 0
    for split, count in counts.items():
        splits[split] = []
        for _ in range(count):
            names = [f"{number + i}.png" for i in range(images)]
            for name in names:
                picture(int(name.removesuffix(".png"))).save(folder / name)
            number += images
            splits[split].append({"images": names, **row(number)})
    return write_rows(folder, **splits)


def inputs_of_mlx_vlm(
    base: Base, processor, text: str, pictures: list
) -> tuple[mx.array, mx.array, dict]:
    """The tokens and pixels of a rendered text, and other arguments of the model."""
    is_llava = base.config["model_type"] == "llava"
    options = {} if is_llava else {"add_special_tokens": False}
    inputs = dict(processor(text=[text], images=pictures, **options))
    inputs.pop("attention_mask")
    tokens = inputs.pop("input_ids")
    if is_llava:  # its processor begins a text, which its chat template does not
        tokens = tokens[:, 1:]
    return tokens, inputs.pop("pixel_values"), inputs


def inputs_of_transformers(base: Base, tokens, pictures: list) -> dict:
    """The arguments of torch's model; its own image processor prepares the pictures."""
    import torch
    from transformers import AutoImageProcessor

    arrays = AutoImageProcessor.from_pretrained(base.path, backend="pil")(
        images=[pictures], return_tensors="pt"
    )
    for counts in ("num_crops", "num_soft_tokens_per_image"):
        arrays.pop(counts, None)

    ids = torch.tensor(np.array(tokens)).long()
    kinds = {"gemma3": "token_type_ids", "idefics3": None, "smolvlm": None}
    if name := kinds.get(base.config["model_type"], "mm_token_type_ids"):
        arrays[name] = (ids == base.tokenizer._images.token).long()
    return {"input_ids": ids, **arrays}
