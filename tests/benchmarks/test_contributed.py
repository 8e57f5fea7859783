"""Records that users contributed: whole, undisturbed and without names."""

import json
import re
from pathlib import Path

from benchmarks.apple_gpu import goals
from benchmarks.history import Record
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


def predicted(shape: str, name: str, metric: str, value: float, **changes) -> Record:
    fields = dict.fromkeys(Record.__dataclass_fields__, "")
    fields |= {"task": "graph", "shape": shape, "implementation": name, "metric": metric}
    return Record(**fields | {"p50": value, "date": "2026-11-22", "commit": "abc"} | changes)


def test_goals_take_the_best_path_and_the_worst_shape():
    one, four = goals.GOALS[0].shapes
    time = "time over mlx-lm"
    records = [
        predicted(one, "mlx_packs quantized", time, 0.95),
        predicted(one, "mlx_packs transient", time, 0.99, date="2026-11-01"),
        predicted(one, "mlx_packs transient", time, 0.91),
        predicted(four, "mlx_packs quantized", time, 0.85),
        predicted(one, "mlx-lm", "peak activations", 10.0),
        predicted(four, "mlx-lm", "peak activations", 8.0),
        predicted(one, "mlx_packs quantized", "peak activations", 5.0),
        predicted(four, "mlx_packs quantized", "peak activations", 5.0),
        predicted(one, "mlx_packs quantized", "primitives", 4438.0),
    ]

    rows = goals.table(records).splitlines()
    assert len(rows) == 2 + len(goals.GOALS)
    assert rows[2].endswith("| 0.9 x mlx-lm | 0.910 | transient | **missed** | abc |")
    assert rows[3].endswith("| 0.7 x mlx-lm | 0.625 | quantized | met | abc |")
    assert rows[4].endswith("| 0.9 x mlx-lm | not recorded |  |  |  |")
    assert rows[-1].endswith("| 5,000 | 4,438 | quantized | met | abc |")

    assert goals.table([]) == ""
