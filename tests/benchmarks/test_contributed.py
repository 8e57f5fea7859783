"""Records that users contributed: whole, undisturbed and without names."""

import json
import re
from pathlib import Path

from mlx_packs.bench.record import FORMAT, file_name

FOLDER = Path(__file__).parents[2] / "benchmarks" / "contributed"
KEYS = {"format", "date", "machine", "conditions", "settings", "seconds", "rates", "steps"}
KEYS |= {"kernels", "calibrated", "notes"}


def faults(text: str, name: str) -> list[str]:
    """What is wrong with the file of a record."""
    record = json.loads(text)
    if record.get("format") != FORMAT or set(record) != KEYS:
        return ["is no record"]
    timed = [step for step in record["steps"] if not step["fault"]]
    checks = {
        "is not named as its content": name == file_name(record),
        "was disturbed": not record["conditions"]["disturbances"],
        "has no speed": bool(timed),
        "has losses that differ": not any("differ" in (s["fault"] or "") for s in record["steps"]),
        "has a path": not re.search(r'"[^"]*(?:/Users/|/home/|\\\\Users)', text),
    }
    return [fault for fault, right in checks.items() if not right]


def test_contributed_records_are_whole():
    files = sorted(FOLDER.glob("*.json"))
    found = {file.name: faults(file.read_text(encoding="utf-8"), file.name) for file in files}
    assert not any(found.values()), found
    assert (FOLDER / "README.md").is_file()


def test_a_wrong_record_is_seen():
    good = dict.fromkeys(KEYS) | {
        "format": FORMAT,
        "date": "2026-11-22T19:40:00Z",
        "machine": {"device": "Apple M3 Max (metal)"},
        "conditions": {"disturbances": []},
        "steps": [{"fault": None, "ratio": {"p50": 1.1}}],
    }

    for changes, expected in (
        ({}, []),
        ({"more": 1}, ["is no record"]),
        ({"date": "2026-11-23T19:40:00Z"}, ["is not named as its content"]),
        ({"conditions": {"disturbances": ["runs on battery"]}}, ["was disturbed"]),
        ({"steps": []}, ["has no speed"]),
        ({"notes": ["see /Users/anna/x"]}, ["has a path"]),
    ):
        assert faults(json.dumps(good | changes), "apple-m3-max-2026-11-22T1940.json") == expected
