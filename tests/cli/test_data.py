"""`packs data`: what a data set is, and the splits that it writes."""

import json

import pytest

from mlx_packs import LoRAConfig, TrainConfig
from mlx_packs.config.schema import DataConfig
from mlx_packs.data.rows import load_rows
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
    assert shown.count(f"{common} tokens begin every example, ") == 2


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
    assert "try: packs train --data o --completion-feature 'the end'" in out


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
