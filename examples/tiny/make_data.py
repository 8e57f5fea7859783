"""Makes the bundled data set of mlx_packs: reminders in plain words, and their content as JSON.

    Ring me at noon on Friday, I have to call Anna.
    {"task": "call Anna", "day": "Friday", "time": "12:00"}

An answer is right or wrong, so a run can count. A held-out row shares its wording with no training row,
and no training row has its task, day and time together, or many of its runs of words. The same seed gives
the same bytes.

    python make_data.py

Needs Python alone.
"""

import argparse
import json
import random
import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "mlx_packs" / "tiny" / "data"
ROWS = {"test": 200, "valid": 100, "train": 2400}  # drawn in this order
RUN, SHARED = 5, 0.4  # words in a row; share of its runs that a held-out row may have in common

VERBS = ("call", "email", "visit", "thank")
PEOPLE = (
    *("Anna", "Ben", "Carla", "David", "Emma", "Paul", "Grandma"),
    *("the dentist", "the bank", "the landlord"),
)
CHORES = (
    *("pay the rent", "pay the phone bill", "water the plants", "feed the cat", "walk the dog"),
    *("buy milk", "buy bread", "book a table", "book the train", "pick up the kids"),
    *("pick up the parcel", "clean the kitchen", "wash the car", "take out the trash"),
    *("send the invoice", "renew the passport", "return the library books"),
)
TASKS = (*(f"{verb} {who}" for verb in VERBS for who in PEOPLE), *CHORES)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
TIMES = tuple((hour, minute) for hour in range(8, 20) for minute in (0, 30))
HOURS = "twelve one two three four five six seven eight nine ten eleven".split()
FIGURES = 0.35  # share of the times that are written as 3:30 pm

WORDINGS = {
    "train": (
        "Remind me to {task} on {day} at {time}.",
        "Remind me on {day} at {time} to {task}.",
        "Don't let me forget to {task} on {day} at {time}.",
        "On {day} at {time} I have to {task}.",
        "I need to {task} on {day} at {time}.",
        "Please make a note: {task}, {day}, {time}.",
        "Could you remind me to {task}? It is for {day} at {time}.",
        "{day}, {time}: {task}.",
        "At {time} on {day} I want to {task}.",
        "I must not forget to {task} at {time} on {day}.",
        "Set a reminder for {day} at {time}: {task}.",
        "Put it in my calendar: {task} on {day} at {time}.",
        "I promised to {task} on {day}, at {time} if possible.",
        "Next {day} I should {task}, at {time}.",
        "It is important that I {task} at {time} next {day}.",
        "We said {day} at {time}. I will {task} then.",
        "New reminder. What: {task}. When: {day} at {time}.",
        "Tell me to {task} when it is {time} on {day}.",
        "My plan for {day}: {task} at {time}.",
        "Add to my list: {task}, on {day}, at {time}.",
        "I have to {task}. Tell me on {day} at {time}.",
        "{task} - {day} {time}",
        "This week I want to {task}. Say, {day} at {time}.",
        "I have some time on {day}. At {time} I will {task}.",
    ),
    "valid": (
        "Note for {day}, {time}: {task}.",
        "I would like to {task} on {day} at {time}, remind me.",
        "Before I forget: {task}, {time}, {day}.",
    ),
    "test": (
        "Help me remember to {task} on {day} at {time}.",
        "Hey, on {day} at {time} I really need to {task}.",
        "Make sure that I {task} at {time} on {day}.",
        "Ring me at {time} on {day}, I have to {task}.",
        "To do on {day}: {task}, at {time}.",
        "I keep forgetting things, so tell me to {task} on {day} at {time}.",
    ),
}


def time_in_words(hour: int, minute: int, rng: random.Random) -> str:
    """Return a time of day as people say it: noon, 3:30 pm, half past three in the afternoon."""
    if (hour, minute) == (12, 0):
        return "noon"
    if rng.random() < FIGURES:
        minutes = f":{minute}" if minute else ""
        return f"{hour % 12 or 12}{minutes} {'am' if hour < 12 else 'pm'}"
    part = "morning" if hour < 12 else "afternoon" if hour < 18 else "evening"
    word = HOURS[hour % 12]
    clock = f"half past {word}" if minute else f"{word} o'clock"
    return f"{clock} in the {part}"


def make_row(wordings: tuple[str, ...], rng: random.Random) -> tuple[str, str]:
    """Return a reminder in one of the wordings, and its answer."""
    task, day, (hour, minute) = rng.choice(TASKS), rng.choice(DAYS), rng.choice(TIMES)
    spoken = time_in_words(hour, minute, rng)
    asked = rng.choice(wordings).format(task=task, day=day, time=spoken)
    answer = {"task": task, "day": day, "time": f"{hour:02d}:{minute:02d}"}
    return asked[0].upper() + asked[1:], json.dumps(answer)


def runs_of(asked: str, answer: str) -> set[tuple[str, ...]]:
    """Return every run of words of a row."""
    words = re.findall(r"\w+", f"{asked} {answer}".lower())
    return {tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1)}


def replace_near_copies(
    rows: dict[str, list[tuple[str, str]]], asked_before: set[str], rng: random.Random
) -> None:
    """Draw held-out rows anew until each has few runs of words in common with any training row."""
    trained = [runs_of(*row) for row in rows["train"]]
    answers = {answer for _, answer in rows["train"]}
    for split in ("test", "valid"):
        for i, row in enumerate(rows[split]):
            while row[1] in answers or row[0] in asked_before or is_near(row, trained):
                row = make_row(WORDINGS[split], rng)
            asked_before.add(row[0])
            rows[split][i] = row


def is_near(row: tuple[str, str], trained: list[set[tuple[str, ...]]]) -> bool:
    """Return whether a training row has many of the runs of words of a row."""
    own = runs_of(*row)
    return any(len(own & other) > SHARED * len(own) for other in trained)


def make_rows(seed: int) -> dict[str, list[tuple[str, str]]]:
    """Return the rows of each split; no reminder occurs twice, and no held-out answer in ``train``."""
    rng = random.Random(seed)
    rows: dict[str, list[tuple[str, str]]] = {}
    asked_before, held_out = set(), set()
    for split, count in ROWS.items():
        rows[split] = []
        while len(rows[split]) < count:
            asked, answer = make_row(WORDINGS[split], rng)
            if asked not in asked_before and (split != "train" or answer not in held_out):
                asked_before.add(asked)
                rows[split].append((asked, answer))
        held_out |= {answer for _, answer in rows[split]}
    replace_near_copies(rows, {asked for asked, _ in rows["train"]}, rng)
    return rows


def to_line(asked: str, answer: str) -> str:
    """Return a row as a line of JSON: a chat of two messages."""
    messages = [("user", asked), ("assistant", answer)]
    row = {"messages": [{"role": role, "content": content} for role, content in messages]}
    return json.dumps(row) + "\n"


def write(folder: Path, seed: int = 0) -> None:
    """Write the files of the splits."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in make_rows(seed).items():
        (folder / f"{split}.jsonl").write_text("".join(to_line(*row) for row in rows), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write(args.out, args.seed)


if __name__ == "__main__":
    main()
