"""Draw bar charts, and write rows that ask for the month of the highest bar.

python examples/images/make_charts.py charts

Writes charts/{train,valid,test}.jsonl and a folder of PNG files. Every row asks the same question,
so that only the image tells the answer. Needs pillow, which mlx-packs[vision] installs.
"""

import argparse
import json
import random
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
COLORS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3")
SPLITS = {"train": 600, "valid": 60, "test": 120}
QUESTION = "Which month has the highest bar?"

WIDTH, HEIGHT = 336, 252
LEFT, BASELINE, HIGHEST = 24, 216, 176  # pixels


def draw(months: list[str], values: list[int], color: str) -> Image.Image:
    """Return a bar chart; values are percentages of the highest possible bar."""
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    canvas = ImageDraw.Draw(image)
    font = ImageFont.load_default(18)
    canvas.line((LEFT, BASELINE, WIDTH - LEFT, BASELINE), "black", 2)

    step = (WIDTH - 2 * LEFT) / len(months)
    for i, (month, value) in enumerate(zip(months, values, strict=True)):
        middle = LEFT + (i + 0.5) * step
        top = BASELINE - HIGHEST * value // 100
        canvas.rectangle((middle - step / 3, top, middle + step / 3, BASELINE), color)
        canvas.text((middle, BASELINE + 16), month, "black", font, anchor="mm")
    return image


def write_split(folder: Path, split: str, count: int, draws: random.Random) -> None:
    """Write the rows of a split, and an image for each."""
    with open(folder / f"{split}.jsonl", "w", encoding="utf-8") as file:
        for number in range(count):
            months = [MONTHS[i] for i in sorted(draws.sample(range(12), 4))]
            values = draws.sample(range(10, 101, 10), 4)
            name = f"png/{split}-{number:03}.png"
            draw(months, values, draws.choice(COLORS)).save(folder / name)

            answer = months[values.index(max(values))]
            row = {"image": name, "prompt": QUESTION, "completion": answer}
            file.write(json.dumps(row) + "\n")


def main() -> None:
    """Write all splits into the folder that the command line names."""
    parser = argparse.ArgumentParser(description="Draw bar charts, and write rows about them.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    (options.folder / "png").mkdir(parents=True, exist_ok=True)
    draws = random.Random(options.seed)
    for split, count in SPLITS.items():
        write_split(options.folder, split, count, draws)
    print(f"{options.folder}: {', '.join(f'{n} {split}' for split, n in SPLITS.items())} examples")


if __name__ == "__main__":
    main()
