"""Small data sets whose rows have images."""

from pathlib import Path

import numpy as np

from tests.helpers.rows import chat, write_rows


def write_image(file: Path, seed: int, width: int = 56, height: int = 56) -> Path:
    """A PNG of random pixels."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file)
    return file


def write_image_rows(folder: Path, images: int = 1, **counts: int) -> Path:
    """A data folder with the given number of rows for each split; each row has its own images."""
    folder.mkdir(parents=True, exist_ok=True)
    splits: dict[str, list] = {}
    number = 0
    for split, count in counts.items():
        splits[split] = []
        for _ in range(count):
            names = [f"{number + i}.png" for i in range(images)]
            for name in names:
                write_image(folder / name, int(name.removesuffix(".png")))
            number += images
            row = chat("Which color is it?", f"It is color {number}.")
            splits[split].append({"images": names, **row})
    return write_rows(folder, **splits)
