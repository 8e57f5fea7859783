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
