"""`packs data`: what a data set is, and the splits that it writes."""

import json
import shutil

import pytest

from mlx_packs.bases.files import tiny_checkpoint
from mlx_packs.config.schema import DataConfig
from mlx_packs.data.rows import load_rows
from tests.helpers.errors import check
from tests.helpers.rows import chat, write_rows


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def text(count: int, seed: int) -> dict:
    return {"text": " ".join(f"w{seed}x{i}" for i in range(count))}


def test_lengths_cuts_bad_rows_and_copies_are_shown(here, run):
    rows = [text(3, i) for i in range(8)] + [text(60, i) for i in (20, 21)] + [{"text": 5}, {}]
    write_rows(here / "d", train=[*rows, rows[8]], valid=[rows[9], text(3, 50)])
    code, out, err = run("data", "d", "--max-seq-length", 40, "--json")
    assert code == 0, err
    report = json.loads(out)
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


def test_what_every_example_begins_with_is_shown(here, run):
    system = {"role": "system", "content": "You name one color for every question that is asked."}
    rows = [chat(f"{i} or {i * i}?", "red") for i in range(12)]
    rows = [{"messages": [system, *row["messages"]]} for row in rows]
    write_rows(here / "d", train=rows[:8], valid=rows[8:])
    report = json.loads(run("data", "d", "--json")[1])["splits"]["train"]
    repeats = report["repeats"]
    assert report["common"] >= repeats["tokens"] >= 16 and 0.3 < repeats["saved"] < 0.75
    assert (repeats["merged"], repeats["groups"], repeats["batch_size"]) == (0, 0, 4)
    shown = run("data", "d", "--samples", 0)[1]
    assert f"{repeats['tokens']} tokens begin every example: --share-prefix computes" in shown
    assert f"saves {repeats['saved']:.0%} of all inputs at --batch-size 4" in shown
    assert f"{report['common']} tokens begin every example" in shown.split("valid")[1]


def test_chats_that_begin_others_and_groups_are_shown(here, run):
    """The first answer of each chat begins its second; questions on two texts are two groups."""
    turns = [(f"{i} or {i * i}?", "red", "And then?", f"blue {i}") for i in range(8)]
    chats = [chat(*each[:stop]) for each in turns for stop in (2, 4)]
    texts = [" ".join(f"{word} {i}" for i in range(20)) for word in ("tide", "price")]
    questions = [
        {"prompt": f"{each} Day {i}?", "completion": str(i)} for each in texts for i in range(8)
    ]
    write_rows(here / "c", train=chats, valid=chats[:2])
    write_rows(here / "q", train=questions, valid=questions[:2])
    chains, groups = (
        json.loads(run("data", each, "--json")[1])["splits"]["train"]["repeats"] for each in "cq"
    )
    assert chains["merged"] == 8 and 0.15 < chains["merged_share"] <= chains["saved"] < 0.75
    assert groups["groups"] == 2 and groups["tokens"] >= 40 and groups["saved"] > 0.3
    assert "8 examples begin others: --share-prefix merges them, which saves" in run("data", "c")[1]
    assert "begin the examples of each of 2 groups: --share-prefix on puts" in run("data", "q")[1]
    command = ("data", "q", "--json", "--samples", 0, "--max-seq-length", 8)
    cut = json.loads(run(*command)[1])["splits"]["train"]
    assert cut["dropped"] == 16 and cut["repeats"] is None


def test_preferences_have_no_groups(here, run):
    rows = [{"prompt": f"Say {i}.", "chosen": f"{i}", "rejected": "no"} for i in range(6)]
    write_rows(here / "p", train=rows, valid=rows[:2])
    assert json.loads(run("data", "p", "--json")[1])["splits"]["train"]["repeats"] is None


def test_targets_beyond_the_maximum_are_counted(here, run):
    write_rows(here, only=[chat("word " * 90, "yes"), chat("a", "b")] * 4)
    code, out, _ = run("data", "only.jsonl", "--max-seq-length", 32, "--json")
    splits = json.loads(out)["splits"].values()
    assert sum(s["cut"] for s in splits) == sum(s["dropped"] for s in splits) == 4


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
    flags = ("--prompt-feature", "prompt", "--completion-feature", "the end")
    write_rows(
        here, other=[{"prompt": row["prompt"], "the end": row["completion"]} for row in rows]
    )
    out = run("data", "other.jsonl", "--out", "o", *flags, "--samples", 0)[1]
    assert "try: packs train --data o --completion-feature 'the end'" in out
    (here / "s" / "notes.txt").write_text("mine")
    assert run("data", "only.jsonl", "--out", "s", "--overwrite")[0] == 2
    check(run.error, "exists", "out", "notes.txt")
    assert (here / "s" / "notes.txt").read_text() == "mine"


def test_pairs_are_measured_in_characters(here, run):
    write_rows(here / "d", train=[{"anchor": "a" * i, "positive": "b"} for i in range(1, 41)])
    report = json.loads(run("data", "d", "--json")[1])
    train = report["splits"]["train"]
    assert report["format"] == "pairs" and train["unit"] == "characters"
    assert train["lengths"]["longest"] in (38, 39, 40) and train["learned"] is None
    assert "characters: median" in run("data", "d")[1]


def test_scored_pairs_of_a_table_are_checked_as_they_train(here, run):
    scores = ["0.8"] * 39 + ["high", "", "nan", "0.5"]
    lines = [f"first {i},second {i},{score}\n" for i, score in enumerate(scores)]
    (here / "pairs.csv").write_text("sentence1,sentence2,score\n" + "".join(lines))
    code, out, err = run("data", "pairs.csv", "--hold-out", "last", "--json")
    assert code == 0, err
    train, valid = (json.loads(out)["splits"][split] for split in ("train", "valid"))
    assert (train["rows"], train["bad_rows"]) == (41, {"wrong type": 2})
    assert (valid["rows"], valid["bad_rows"]) == (2, {"wrong type": 1})


def test_pairs_of_empty_texts_are_counted(here, run):
    empty, pair = {"anchor": "", "positive": ""}, {"anchor": "a", "positive": "b"}
    write_rows(here / "d", train=[empty] * 3, valid=[empty, pair])
    code, out, err = run("data", "d", "--json")
    assert code == 0, err
    train, valid = (json.loads(out)["splits"][split] for split in ("train", "valid"))
    assert train["histogram"] == [[0, 0, 3]]
    assert valid["histogram"] == [[0, 0, 1], [1, 16, 1]]
    assert "0 to 0" in run("data", "d")[1]


@pytest.mark.parametrize(
    ("lines", "written"),
    [
        (['{"text": "a b"}', '{"text": "c d"}'], {"train": 1, "valid": 1}),
        (['{"text": "a b"}', "{", '{"text": "c d"}'], {"train": 1, "valid": 1}),
        (["{", '{"text": "a b"}', '{"text": "c d"}'], {"train": 1, "valid": 1}),
        ([f'{{"text": "a b {i}"}}' for i in range(3)], {"train": 1, "valid": 1, "test": 1}),
    ],
)
def test_training_rows_are_left_where_splits_are_written(here, run, lines, written):
    (here / "few.jsonl").write_text("\n".join(lines) + "\n")
    code, out, err = run("data", "few.jsonl", "--hold-out", "last", "--out", "w", "--json")
    assert code == 0, err
    assert json.loads(out)["written"] == written
    assert {f.name for f in (here / "w").iterdir()} == {f"{split}.jsonl" for split in written}
    assert load_rows(DataConfig(data="w")).present() == list(written)


@pytest.mark.parametrize(
    ("arguments", "code", "flag"),
    [
        (("nope",), "not-found", "data"),
        (("bad.jsonl",), "data", None),
        (("tiny", "--overwrite"), "conflict", "overwrite"),
        (("tiny", "--loss-on", "nothing"), "unknown", "loss_on"),
    ],
)
def test_what_cannot_be_shown_is_one_line(here, run, arguments, code, flag):
    (here / "bad.jsonl").write_text('{"x": 1}\n')
    assert run("data", *arguments)[0] == 2
    check(run.error, code, flag)


def test_a_template_without_an_end_is_named(here, run):
    base = shutil.copytree(tiny_checkpoint(), here / "base")
    template = "{% for m in messages %}{{ '### ' + m.role + ': ' + m.content + '\n' }}{% endfor %}"
    (base / "chat_template.jinja").write_text(template)
    write_rows(here, only=[chat("a", "b")] * 4)
    code, out, err = run("data", "only.jsonl", "--model", base, "--json")
    assert code == 0, err
    assert any("<|im_end|> is put behind it" in note for note in json.loads(out)["notes"])
    few = ("--iters", 1, "--batch-size", 1, "--test-batches", 1)
    code, out, err = run("train", "--data", "only.jsonl", "--model", base, "--out", "p", *few)
    assert code == 0 and "<|im_end|> is put behind it" in out + err
