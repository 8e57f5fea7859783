"""Small data sets on disk."""

import json
from pathlib import Path


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
