"""Small data sets on disk."""

import json
from pathlib import Path

from mlx_packs.config.schema import DataConfig
from mlx_packs.data.formats import Row, format_of
from mlx_packs.data.rows import Splits
from mlx_packs.data.sources import as_rows


def write_rows(folder: Path, **splits: list) -> Path:
    """A data folder with the given rows for each split."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(text)
    return folder


def chat(*turns: str) -> dict:
    """Return a chat row in which user and assistant alternate."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(turns)]}


CHATS = [chat("Say hi.", "Hi there, friend."), chat("Say yes.", "Yes, I will.")] * 2


def train_split(values: list[dict]) -> Splits:
    """Return rows in memory as the training split of a run."""
    rows = [Row(f"rows[{i}]", value) for i, value in enumerate(values)]
    return Splits({"train": as_rows(rows)}, "rows", format_of(rows[0], DataConfig()))


COLORS = "red blue green".split()


def labelled(i: int) -> dict:
    """The label is a word of the text."""
    word = COLORS[i % 3]
    return {"text": f"the {word} car number {i} is here", "label": word}


def labelled_chat(i: int) -> dict:
    row = labelled(i)
    return {**chat(row["text"]), "label": row["label"]}


def several(i: int) -> dict:
    """Each of the words of the text is a label."""
    words = [word for bit, word in enumerate(COLORS) if (i + 1) >> bit & 1]
    return {"text": f"cars in {' and '.join(words) or 'none'} at {i}", "labels": words}


def scored(i: int) -> dict:
    word = COLORS[i % 3]
    return {"text": f"the {word} car number {i} is here", "score": float(i % 3)}


def starred(i: int) -> dict:
    """The label is on a scale of 1 to 3."""
    return {**labelled(i), "label": i % 3 + 1}


def splits_of(make, count: int = 42) -> dict[str, list[dict]]:
    """Return rows for training, validation and test."""
    rows = [make(i) for i in range(count)]
    return {"train": rows[:-12], "valid": rows[-12:-6], "test": rows[-6:]}
