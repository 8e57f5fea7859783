"""Small rows of texts and chats with labels."""

from tests.helpers.rows import chat

WORDS = "red blue green".split()


def labelled(i: int) -> dict:
    """The label is a word of the text."""
    word = WORDS[i % 3]
    return {"text": f"the {word} car number {i} is here", "label": word}


def labelled_chat(i: int) -> dict:
    row = labelled(i)
    return {**chat(row["text"]), "label": row["label"]}


def several(i: int) -> dict:
    """Each of the words of the text is a label."""
    words = [word for bit, word in enumerate(WORDS) if (i + 1) >> bit & 1]
    return {"text": f"cars in {' and '.join(words) or 'none'} at {i}", "labels": words}


def scored(i: int) -> dict:
    word = WORDS[i % 3]
    return {"text": f"the {word} car number {i} is here", "score": float(i % 3)}


def starred(i: int) -> dict:
    """The label is on a scale of 1 to 3."""
    return {**labelled(i), "label": i % 3 + 1}


def splits_of(make, count: int = 42) -> dict[str, list[dict]]:
    """Return rows for training, validation and test."""
    rows = [make(i) for i in range(count)]
    return {"train": rows[:-12], "valid": rows[-12:-6], "test": rows[-6:]}
