"""The embedded data set: what its script writes, with held-out wordings and answers."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from mlx_packs.data.rows import tiny_path

SCRIPTS = Path(__file__).parents[2] / "examples" / "tiny"
SPLITS = ("train", "valid", "test")
CLOCK = re.compile(
    r"(?:(\d+)(?::(\d\d))? (am|pm)|(half past )?(\w+)(?: o'clock)? in the (\w+)|(noon))"
)


def script(name: str) -> ModuleType:
    """A script of examples/tiny, imported."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def make_data() -> ModuleType:
    return script("make_data")


@pytest.fixture(scope="module")
def rows() -> dict[str, list[tuple[str, dict]]]:
    """The reminders of each split, and what they say."""
    by_split = {}
    for split in SPLITS:
        lines = (tiny_path() / f"{split}.jsonl").read_text("utf-8").splitlines()
        chats = [[m["content"] for m in json.loads(line)["messages"]] for line in lines]
        by_split[split] = [(asked, json.loads(answer)) for asked, answer in chats]
    return by_split


def time_of(text: str, hours: list[str]) -> str:
    """The time of day that a reminder names, read independently of the script."""
    figure, minutes, half_day, half, word, part, noon = CLOCK.search(text).groups()
    if noon:
        return "12:00"
    hour = int(figure) % 12 if figure else hours.index(word)
    afternoon = half_day == "pm" or part in ("afternoon", "evening")
    return f"{hour + 12 * afternoon:02d}:{minutes or ('30' if half else '00')}"


def test_the_files_are_what_the_script_writes(make_data, tmp_path):
    make_data.write(tmp_path)
    for split in SPLITS:
        name = f"{split}.jsonl"
        assert (tiny_path() / name).read_bytes() == (tmp_path / name).read_bytes()
    assert sum(file.stat().st_size for file in tiny_path().iterdir()) < 650_000


def test_every_answer_is_what_its_reminder_says(make_data, rows):
    for asked, answer in (row for split in SPLITS for row in rows[split]):
        assert answer["task"].lower() in asked.lower() and answer["day"] in asked
        assert time_of(asked, make_data.HOURS) == answer["time"], asked


def test_held_out_rows_share_no_wording_and_no_answer_with_training_rows(make_data, rows):
    wordings = [set(make_data.WORDINGS[split]) for split in SPLITS]
    assert sum(map(len, wordings)) == len(set().union(*wordings))
    trained = {tuple(answer.values()) for _, answer in rows["train"]}
    for split in ("valid", "test"):
        assert not trained & {tuple(answer.values()) for _, answer in rows[split]}
    parts = [set(column) for column in zip(*trained, strict=True)]  # but each part by itself
    for _, answer in rows["test"]:
        assert all(value in part for value, part in zip(answer.values(), parts, strict=True))


def test_the_picture_shows_what_a_report_says():
    accuracy = {"share": 0.0, "se": 0.0}, {"share": 0.955, "se": 0.0147}
    shown = {"prompt": "a < b & c", "wanted": "x", "before": "no " * 40, "after": '{"<": "&"}'}
    report = {
        "pack_mb": 2.1,
        "answers": {"rows": 7, "before": accuracy[0], "after": accuracy[1]},
        "samples": [shown],
    }
    root = ElementTree.fromstring(script("make_picture").picture(report))
    texts = [element.text for element in root.iter() if element.text]
    assert {"0.0 %", "95.5 ± 1.5 %", "“a < b & c”", '{"<": "&"}'} <= set(texts)
    assert any(text.startswith("exact answers to 7 ") for text in texts)
    assert " ".join(text for text in texts if text.startswith("no ")) == shown["before"].strip()
