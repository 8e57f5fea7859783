"""`packs data`: what a data set is, and the splits that it writes."""

import itertools
import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlx_packs import LoRAConfig, TrainConfig
from mlx_packs.config.schema import DataConfig
from mlx_packs.data import json_lines, overview
from mlx_packs.data.overview import look_at
from mlx_packs.data.rows import load_rows
from mlx_packs.tasks.describe import _readers
from tests.helpers.bases import small_base
from tests.helpers.errors import check
from tests.helpers.rows import chat, write_rows
from tests.helpers.tasks import EncodedTask


@pytest.fixture
def report_of(run):
    """What `packs data ARGS --json` prints."""

    def go(*arguments) -> dict:
        code, out, err = run("data", *arguments, "--json")
        assert code == 0, err
        return json.loads(out)

    return go


def text(count: int, seed: int) -> dict:
    return {"text": " ".join(f"w{seed}x{i}" for i in range(count))}


def test_lengths_cuts_bad_rows_and_copies_are_shown(here, run, report_of):
    rows = [text(3, i) for i in range(8)] + [text(60, i) for i in (20, 21)] + [{"text": 5}, {}]
    write_rows(here / "d", train=[*rows, rows[8]], valid=[rows[9], text(3, 50)])

    report = report_of("d", "--max-seq-length", 40)
    train, valid = (report["splits"][split] for split in ("train", "valid"))
    assert report["format"] == "text" and list(report["splits"]) == ["train", "valid"]

    assert (train["rows"], train["cut"], train["dropped"]) == (13, 3, 0)
    assert train["bad_rows"] == {"wrong type": 1, "missing columns": 1}
    assert (train["near_copies"], train["sampled"]) == (2, 13)
    assert sum(count for _, _, count in train["histogram"]) == 11
    assert train["lengths"]["longest"] > 40 > train["lengths"]["p5"] > 0
    assert valid["near_copies"] == 0 and 0.5 < valid["learned"] < 1

    (leak,) = report["notes"]
    assert "1 of 2 valid examples" in leak and "train.jsonl:10" in leak

    shown = run("data", "d", "--max-seq-length", 40)[1]
    for part in ("13 examples", "3 longer than 40, cut", "2 of 13 have a near-duplicate in train"):
        assert part in shown
    assert "2 cannot be used: 1 wrong type, 1 missing columns; the first is" in shown
    assert shown.count("tokens are trained on") == 2 and "▇" in shown
    assert "tokens are trained on" not in run("data", "d", "--samples", 0)[1]


def test_what_every_example_begins_with_is_shown(here, run, report_of):
    system = {"role": "system", "content": "You name one color for every question that is asked."}
    rows = [chat(f"{i} or {i * i}?", "red") for i in range(12)]
    rows = [{"messages": [system, *row["messages"]]} for row in rows]
    write_rows(here / "d", train=rows[:8], valid=rows[8:])
    common = report_of("d")["splits"]["train"]["common"]
    assert common >= 16
    shown = run("data", "d", "--samples", 0)[1]
    assert shown.count(f"every example starts with the same {common} tokens, ") == 2


def test_the_share_of_a_common_beginning_leaves_out_bad_rows(here, run):
    row = chat("Say it " * 9, "b")
    write_rows(here / "d", train=[row] * 3 + [{"messages": 5}] * 9, valid=[row])
    out = run("data", "d", "--samples", 0)[1]
    longest = int(re.search(r"longest (\d+)", out)[1])
    assert f"the same {longest - 1} tokens, {(longest - 1) / longest:.0%} of all" in out


def write_bad(folder: Path) -> None:
    """Rows of which those in lines 3, 5 and 6 are bad; line 2 is blank."""
    good = json.dumps(chat("a", "b"))
    lines = [good, "", '{"messages": [{"role": "us', good, '{"words": "\x9bc"}', '{"messages": 5}']
    (folder / "d").mkdir()
    for split in ("train", "valid"):
        (folder / "d" / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


BAD = [(3, "not JSON"), (5, "missing columns"), (6, "wrong type")]


def test_bad_rows_are_listed_with_line_reason_and_text(here, run):
    write_bad(here)
    code, out, err = run("data", here / "d", "--json", "--bad-rows")
    listed = [bad for split in json.loads(out)["splits"].values() for bad in split["bad"]]
    assert code == 0 and [json.loads(line) for line in err.splitlines()] == listed
    for split, bad in (("train", listed[:3]), ("valid", listed[3:])):
        assert [(each["line"], each["reason"]) for each in bad] == BAD
        assert [each["where"] for each in bad] == [f"{split}.jsonl:{line}" for line, _ in BAD]
    assert [bad["text"] for bad in listed[:3]] == [
        '{"messages": [{"role": "us',
        '{"words": "?c"}',
        '{"messages": 5}',
    ]
    assert "column 24" in listed[0]["message"] and "words" in listed[1]["message"]
    assert str(here) not in str(listed)

    err = run("data", "d", "--bad-rows", "--samples", 0)[2]
    assert [line.partition(": ")[0] for line in err.splitlines()] == [
        f"bad     {split}.jsonl:{line}" for split in ("train", "valid") for line, _ in BAD
    ]
    assert run("data", "d", "--samples", 0)[2] == ""


def test_the_first_bad_rows_are_listed_and_all_are_counted(here, report_of, monkeypatch):
    monkeypatch.setattr(overview, "_MOST_LISTED", 2)
    write_bad(here)
    train = report_of("d")["splits"]["train"]
    assert [bad["line"] for bad in train["bad"]] == [3, 5]
    assert sum(train["bad_rows"].values()) == 3


@pytest.mark.parametrize(
    ("name", "content", "bad"),
    [
        (
            "q.csv",
            'sentence1,sentence2,score\n"a\nb",c,1\nd,e,high\nf,g,0.5\n',
            ("q.csv:4", 4, "wrong type", '{"sentence1": "d", "sentence2": "e", "score": "high"}'),
        ),
        (
            "q.json",
            json.dumps([{"text": "a b"}, {"text": 5}, {"text": "e"}]),
            ("q.json[1]", None, "wrong type", '{"text": 5}'),
        ),
    ],
)
def test_bad_rows_of_other_files_are_listed(here, report_of, name, content, bad):
    (here / name).write_text(content)
    (listed,) = report_of(name, "--hold-out", "last")["splits"]["train"]["bad"]
    assert tuple(listed[key] for key in ("where", "line", "reason", "text")) == bad


@pytest.mark.slow
def test_bad_rows_are_told_while_others_are_read(here, monkeypatch):
    rows = [chat(f"Say {i}.", "Yes.") for i in range(3000)]
    write_rows(here / "d", train=[rows[0], {"text": "x"}, *rows], valid=rows[:1])
    read = []
    parse = json_lines.parse_line
    monkeypatch.setattr(json_lines, "parse_line", lambda *args: read.append(1) or parse(*args))

    columns = DataConfig(data="d", on_bad_row="skip")
    splits, readers = _readers(TrainConfig(), None, columns, "tiny", False)
    told = []
    look_at(splits.rows["train"], readers["train"], on_bad=lambda bad: told.append(len(read)))
    assert len(told) == 1 and told[0] < 500


def test_every_row_is_read_where_that_is_asked(here, report_of, monkeypatch):
    monkeypatch.setattr(overview, "MOST_COMPARED", 100)
    rows = [chat(f"Say {i}.", "Yes.") for i in range(300)]
    bad = [{"text": str(i)} for i in range(60)]
    mixed = [row for i in range(60) for row in (*rows[5 * i : 5 * i + 5], bad[i])]
    write_rows(here / "d", train=mixed, valid=rows[:2])
    few = report_of("d")["splits"]["train"]
    every = report_of("d", "--every-row")["splits"]["train"]
    assert (few["rows"], few["looked_at"]) == (360, 100) and len(few["bad"]) < 60
    assert (every["rows"], every["looked_at"]) == (360, 360)
    assert [bad["line"] for bad in every["bad"]] == [6 * i for i in range(1, 61)]


@pytest.mark.nightly
def test_bad_rows_of_a_large_file_are_said_as_they_are_seen(here):
    words = [
        f"{a}{b}" for a in ("ba", "ce", "di", "fo", "gu") for b in ("ran", "sel", "tin", "mok")
    ]
    rng = random.Random(0)
    lines = [
        json.dumps(chat(" ".join(rng.choices(words, k=25)), "yes " * 20)) for _ in range(20_000)
    ]
    bad = sorted(rng.sample(range(20_000), 37))
    for number, kind in zip(
        bad, itertools.cycle((lines[0][:90], '{"words": 5}', "[]")), strict=False
    ):
        lines[number] = kind
    (here / "big.jsonl").write_text("\n".join(lines) + "\n")

    command = [sys.executable, "-m", "mlx_packs", "data", "big.jsonl", "--every-row", "--bad-rows"]
    start = time.monotonic()
    with subprocess.Popen(
        [*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        first = json.loads(run.stderr.readline())
        until_first = time.monotonic() - start
        report = json.loads(run.communicate()[0])
    share = until_first / (time.monotonic() - start)

    listed = [each for split in report["splits"].values() for each in split["bad"]]
    assert sorted(each["line"] for each in listed) == [number + 1 for number in bad]
    assert first in listed and share < 0.5  # said while it reads, not at the end


def test_samples_are_those_of_show_mask(here, run, report_of):
    write_bad(here)
    samples = report_of("d", "--samples", 2)["samples"]
    mask = ("train", "--data", here / "d", "--show-mask", "--json")
    shown = json.loads(run(*mask, "--rows", "1,3")[1])["examples"]
    assert samples == shown and [each["where"] for each in shown] == [
        "train.jsonl:1",
        "train.jsonl:3",
    ]
    assert report_of("d", "--samples", 0)["samples"] == []


def test_show_mask_shows_chosen_rows_and_says_why_others_are_bad(here, run):
    write_bad(here)
    mask = ("train", "--data", here / "d", "--show-mask")
    shown = json.loads(run(*mask, "--json")[1])
    assert [each["where"].rpartition(":")[2] for each in shown["examples"]] == list("13456")
    assert [each.get("reason") for each in shown["examples"]] == [
        *(None, "not JSON", None),
        *("missing columns", "wrong type"),
    ]

    shown = json.loads(run(*mask, "--rows", "6,4,2", "--json")[1])
    assert [each["where"] for each in shown["examples"]] == ["train.jsonl:4", "train.jsonl:6"]
    assert shown["missing"] == [2]
    code, out, err = run(*mask, "--rows", "2,6")
    assert code == 0 and out.startswith("train.jsonl:6: 'messages' must be a list")
    assert "no training examples: 2" in err


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--rows", "1"), "conflict"),
        (("--show-mask", "--rows", "1,x"), "invalid"),
        (("--show-mask", "--rows", "2,99"), "not-found"),
    ],
)
def test_rows_that_cannot_be_shown_are_one_line(here, rejected, flags, code):
    write_bad(here)
    check(rejected("train", "--data", here / "d", *flags), code, "rows")


@pytest.mark.parametrize(
    ("task", "row", "bad", "examples"),
    [
        ("kto", {"completion": "yes", "label": True}, {"completion": "no", "label": "?"}, 1),
        ("dpo", {"chosen": "yes", "rejected": "no"}, {"chosen": "a", "rejected": "a"}, 2),
    ],
)
def test_bad_preferences_are_shown_between_others(here, run, task, row, bad, examples):
    """A rated row has one example: its prompt with another row's completion is not trained on."""
    rows = [{"prompt": "a", **each} for each in (row, bad, row)]
    write_rows(here / "d", train=rows, valid=rows[:1])
    shown = run("train", "--data", "d", "--task", task, "--show-mask", "--json")[1]
    places = [each["where"] for each in json.loads(shown)["examples"]]
    assert places == [f"train.jsonl:{i}" for i in [1] * examples + [2] + [3] * examples]


def test_a_row_that_is_too_long_for_a_target_is_shown_as_bad(here, run):
    rows = [chat("long " * 60, "Yes."), chat("a", "b")]
    write_rows(here / "d", train=rows, valid=rows)
    mask = ("train", "--data", "d", "--show-mask", "--max-seq-length", 40, "--json")
    first, second = json.loads(run(*mask)[1])["examples"]
    assert (first["where"], first["reason"]) == ("train.jsonl:1", "no target")
    assert "spans" in second


def test_splits_are_written_and_train_alike(here, run):
    rows = [{"prompt": f"say {i} é", "completion": "x" * i} for i in range(1, 61)]
    write_rows(here, only=rows)
    file = here / "only.jsonl"
    file.write_text(file.read_text() + "{broken\n")

    code, out, err = run("data", "only.jsonl", "--out", "s", "--samples", 0)
    assert code == 0 and "wrote   s: 55 train · 3 valid · 2 test" in out, err

    whole = load_rows(DataConfig(data="only.jsonl", on_bad_row="skip"))
    splits = load_rows(DataConfig(data="s"))
    assert [r.value for r in splits.rows["valid"]] == [r.value for r in whole.rows["valid"]]
    written = [r.value for split in splits.rows.values() for r in split]
    assert sorted(map(str, written)) == sorted(map(str, rows))
    assert "é" in (here / "s" / "train.jsonl").read_text(encoding="utf-8")

    assert run("data", "only.jsonl", "--out", "s")[0] == 2
    check(run.error, "exists", None, "s: ")

    assert run("data", "only.jsonl", "--out", "s", "--overwrite", "--hold-out", "last")[0] == 0
    last = json.loads((here / "s" / "valid.jsonl").read_text().splitlines()[-1])
    assert last == rows[-1]

    (here / "s" / "notes.txt").write_text("mine")
    assert run("data", "only.jsonl", "--out", "s", "--overwrite")[0] == 2
    check(run.error, "exists", "out", "notes.txt")
    assert (here / "s" / "notes.txt").read_text() == "mine"


def test_the_command_that_trains_names_other_columns(here, run):
    flags = ("--prompt-feature", "prompt", "--completion-feature", "the end")
    write_rows(here, other=[{"prompt": f"say {i}", "the end": "x" * i} for i in range(1, 61)])
    out = run("data", "other.jsonl", "--out", "o", *flags, "--samples", 0)[1]
    assert "try: packs train --model tiny --data o --completion-feature 'the end'" in out


def test_pairs_are_measured_in_tokens_of_their_longest_text(here, run, report_of):
    write_rows(here / "d", train=[{"anchor": "7 " * i, "positive": "b"} for i in range(1, 41)])
    report = report_of("d")
    train = report["splits"]["train"]
    assert report["format"] == "pairs" and train["learned"] is None
    assert 40 < train["lengths"]["longest"] <= 81
    assert "tokens of tiny: median" in run("data", "d")[1]
    assert train == report_of("d", "--task", "embedding")["splits"]["train"]


def test_scored_pairs_of_a_table_are_checked_as_they_train(here, report_of):
    scores = ["0.8"] * 39 + ["high", "", "nan", "0.5"]
    lines = [f"first {i},second {i},{score}\n" for i, score in enumerate(scores)]
    (here / "pairs.csv").write_text("sentence1,sentence2,score\n" + "".join(lines))
    splits = report_of("pairs.csv", "--hold-out", "last")["splits"]
    train, valid = splits["train"], splits["valid"]
    assert (train["rows"], train["bad_rows"]) == (41, {"wrong type": 2})
    assert (valid["rows"], valid["bad_rows"]) == (2, {"wrong type": 1})


@pytest.mark.parametrize(
    ("lines", "written"),
    [
        (['{"text": "a b"}', '{"text": "c d"}'], {"train": 1, "valid": 1}),
        ([f'{{"text": "a b {i}"}}' for i in range(3)], {"train": 1, "valid": 1, "test": 1}),
    ],
)
def test_training_rows_are_left_where_splits_are_written(here, report_of, lines, written):
    (here / "few.jsonl").write_text("\n".join(lines) + "\n")
    assert report_of("few.jsonl", "--hold-out", "last", "--out", "w")["written"] == written
    assert {f.name for f in (here / "w").iterdir()} == {f"{split}.jsonl" for split in written}
    assert load_rows(DataConfig(data="w")).present() == list(written)


ROWS_OF_TASKS = {
    "classify": lambda i: {"text": "a note " * (i + 1), "label": "abc"[i % 3]},
    "kto": lambda i: {"prompt": f"Say {i}.", "completion": "x " * i + "y", "label": i % 3 == 0},
    "embedding": lambda i: {"anchor": f"n {i}", "positive": "p " * (i + 1), "negative_1": "z"},
    "rerank": lambda i: {"query": f"q {i}", "documents": ["d", "e " * i + "f"], "labels": [0, 1]},
    "grpo": lambda i: {"prompt": f"Say {i}.", "answer": f"{i}"},
    "dpo": lambda i: {"prompt": f"Say {i}.", "chosen": "x " * i + "y", "rejected": "no"},
}
LABELS = {
    "classify": {"a": 8, "b": 8, "c": 8},
    "kto": {"false": 16, "true": 8},
    "rerank": {"0": 24, "1": 24},
}


@pytest.mark.parametrize("task", ROWS_OF_TASKS)
def test_rows_are_read_as_the_task_reads_them(here, report_of, task):
    """As its run encodes them: how many examples there are, and how many are cut or dropped."""
    rows = [ROWS_OF_TASKS[task](i) for i in range(24)]
    write_rows(here / "d", train=rows, valid=rows)
    train = TrainConfig(task=task, max_seq_length=24)
    run = EncodedTask(small_base(), here / "d", train, LoRAConfig(), lambda **_: [0.0])
    encoded = run.data[0].splits["train"]

    report = report_of("d", "--task", task, "--max-seq-length", 24, "--samples", 0)
    split = report["splits"]["train"]
    assert split["labels"] == LABELS.get(task, {})
    assert split["cut"] - split["dropped"] == getattr(encoded, "cut", 0)
    assert split["dropped"] == getattr(encoded, "dropped", 0)
    assert not split["bad_rows"] and report["task"] == task
    assert not any("not used" in note for note in report["notes"])


def test_without_a_task_the_columns_suggest_one(here, run, report_of):
    write_rows(here / "t", train=[ROWS_OF_TASKS["classify"](i) for i in range(6)])
    write_rows(here / "p", train=[ROWS_OF_TASKS["dpo"](i) for i in range(6)])
    write_rows(here / "c", train=[{**chat("a"), "label": "b"}] * 6)
    assert any("--task classify" in note for note in report_of("t")["notes"])
    assert "preferences, for --task dpo, orpo" in run("data", "p")[1]
    code, _, err = run("data", "c")
    assert code == 2 and "--task classify" in err
    code, _, err = run("train", "--model", "tiny", "--data", "c", "--out", "out")
    assert code == 2 and "--task classify" in err and not (here / "out-run").exists()


def test_pairs_have_the_tokens_of_an_encoder(here, report_of, encoder):
    rows = [{"anchor": f"n {i}", "positive": "please " * i} for i in range(1, 20)]
    write_rows(here / "d", train=rows, valid=rows[:2])
    arguments = ("--task", "embedding", "--model", encoder, "--max-seq-length", 8)
    split = report_of("d", *arguments)["splits"]["train"]
    assert split["lengths"]["longest"] == 21
    assert split["cut"] == 13  # 7 words and more, between [CLS] and [SEP]


def test_columns_that_a_file_has_are_in_the_error(run, here):
    (here / "table.csv").write_text("question,answer\na,b\n")
    code, out, _ = run("data", here / "table.csv", "--json")
    assert code == 2 and json.loads(out)["error"]["columns"] == ["answer", "question"]
