"""Small rows of preferences."""

WORDS = "red blue green black white brown grey pink".split()


def preference(i: int) -> dict:
    """The right answer repeats the word of the prompt."""
    word, other = WORDS[i % 8], WORDS[(i + 3) % 8]
    prompt = f"Say {word} and nothing else{' please' * (i % 3)}."
    return {"prompt": prompt, "chosen": f"{word}.", "rejected": f"{other}, {other}."}


def rated(i: int) -> dict:
    """Every second completion is a wrong one."""
    row = preference(i)
    side = "chosen" if i % 2 == 0 else "rejected"
    return {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
