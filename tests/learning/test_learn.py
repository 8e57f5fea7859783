"""`packs learn`: rows of rated answers, candidates that must win, and versions that are put back."""

import errno
import json
import math
import os

import numpy as np
import pytest

from mlx_packs.config.data import DataConfig
from mlx_packs.errors import PackError
from mlx_packs.evaluation.perplexity import ExampleScores
from mlx_packs.learning import learn
from mlx_packs.learning.comparison import GAINS, Comparison
from mlx_packs.learning.folder import LearningFolder
from mlx_packs.learning.rows import Answer, is_held_out, key_of, read_rows, rows_of, write_rows
from mlx_packs.packs.base import load_base, load_base_for
from mlx_packs.packs.pack import Pack
from mlx_packs.training.run import train_pack
from tests.helpers.bases import saved_base, small_base
from tests.helpers.errors import check, raises
from tests.helpers.packs import random_pack
from tests.helpers.variants import slow_except

ROWS = 45  # of which 11 prompts are held out


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return load_base(saved_base(small_base(), tmp_path_factory.mktemp("bases") / "base"))


@pytest.fixture
def folder(base, tmp_path):
    """A folder in which every answer was corrected, and rated: half of them up."""
    folder = LearningFolder.begin(tmp_path / "d", "learned", base, None)
    for number in range(ROWS):
        rating = "up" if number % 2 else "down"
        text = {"up": f"It is {number}.", "down": "I cannot."}[rating]
        answer = answer_to(f"Say {number}.", text)
        correction = json.dumps({"say": number})
        write_rows(folder.path, rows_of(answer, str(number), rating, correction))
    return folder


def stop(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("task", slow_except(GAINS, "kto"))
def test_a_candidate_that_wins_is_served_and_put_back(task, folder, run, rejected, monkeypatch):
    flags = ("--task", task, "--iters", 4, "--learning-rate", "1e-3", "--max-seq-length", 64)
    with monkeypatch.context() as patch:
        patch.setattr(learn, "compare", stop)
        assert run("learn", folder.path, *flags)[0] == 130
    assert folder.current == 0 and (folder.candidate / "data").exists()

    with monkeypatch.context() as patch:
        patch.setattr(learn, "train_request", stop)  # the pack is there already
        patch.setattr(LearningFolder, "add_version", stop)
        assert run("learn", folder.path, *flags)[0] == 130
    assert folder.current == 0

    code, out, _ = run("learn", folder.path, *flags, "--json")
    result = json.loads(out)
    assert code == 0 and result["won"] and result["gain"] > 2 * result["error"] > 0
    assert result["rows"] + result["held_out"] == ROWS
    assert folder.current == result["version"] == 1
    assert not folder.candidate.exists()
    names = {f.name for f in folder.version_folder(1).iterdir()}
    assert names == {"figures.json", "job.json", "pack"}
    Pack.open(result["pack"]).verify()

    _, out, _ = run("learn", folder.path, "--list")
    first, second = out.splitlines()
    assert first.startswith("  0 ") and second.startswith("* 1 ") and task in second
    listed = json.loads(run("learn", folder.path, "--list", "--json")[1])
    assert listed["current"] == 1 and listed["rows"][task] == ROWS and listed["missing"] is None
    assert run("learn", folder.path, "--use", 0)[0] == 0
    assert folder.current == 0 and folder.pack_of(0) is None
    check(rejected("learn", folder.path, "--use", 2), "not-found", "use", "version 2", "--use N")

    for number in (0, 1):  # neither put back by itself, nor trained further on the same rows
        folder.serve(number)
        check(rejected("learn", folder.path, *flags), "data", None, "versions/0001")


def test_a_candidate_that_does_not_win_changes_nothing(folder, run, rejected, monkeypatch):
    def fail(_: object) -> None:
        raise PackError("a row is wrong", "data")

    flags = ("--task", "dpo", "--iters", 1, "--learning-rate", "1e-12", "--max-seq-length", 64)
    with monkeypatch.context() as patch:
        patch.setattr(learn, "train_request", fail)
        assert run("learn", folder.path, *flags)[0] == 2

    file = folder.path / "dpo.jsonl"  # a run that failed at its start reads the rows anew
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-2]))
    code, out, _ = run("learn", folder.path, *flags)
    assert code == 0 and out.startswith("not swapped: ")
    assert folder.current == 0 and len(folder.versions()) == 1
    assert not (folder.candidate / "data").exists()
    figures = json.loads((folder.candidate / "figures.json").read_text())
    assert figures["rows"] + figures["held_out"] == ROWS - 2
    check(rejected("learn", folder.path, *flags), "data", None, "candidate", "same rows")


@pytest.mark.slow  # three trainings: 3 s
def test_a_candidate_that_is_worse_on_rows_of_nobody_else_is_not_served(
    folder, run, rejected, tmp_path
):
    rows = [{"prompt": f"Say {i}.", "completion": "Why not? " * 8} for i in range(12)]
    for name, count in (("few", 4), ("own", 12)):
        (tmp_path / name).mkdir()
        lines = [json.dumps(row) + "\n" for row in rows[:count]]
        (tmp_path / name / "valid.jsonl").write_text("".join(lines))
        (tmp_path / name / "train.jsonl").write_text(lines[0])

    flags = ("--task", "lm", "--learning-rate", "1e-2", "--max-seq-length", 64, "--iters")
    check(rejected("learn", folder.path, *flags, 8, "--data", tmp_path / "none"), "not-found")
    assert not folder.candidate.exists()

    for name, iters in (("own", 20), ("few", 21)):
        code, out, err = run("learn", folder.path, *flags, iters, "--data", tmp_path / name)
        assert code == 0 and "worse on --data" in out, (out, err)
        figures = json.loads((folder.candidate / "figures.json").read_text())
        assert figures["gain"] > 2 * figures["error"] and not figures["won"]
    assert folder.current == 0

    code, out, _ = run("learn", folder.path, *flags, 22)  # by rows of the raters alone
    assert code == 0 and out.startswith("swapped"), out


def test_a_candidate_that_won_against_another_version_is_not_served(folder, monkeypatch):
    folder.candidate.mkdir()
    figures = {"won": True, "continues": 0}
    (folder.candidate / "figures.json").write_text(json.dumps(figures))
    assert learn._has_won(folder)
    (folder.path / "current").write_text("1\n")  # `packs learn --use 1` came between
    assert not learn._has_won(folder)


def test_what_tells_good_from_bad_needs_both(folder, run, rejected):
    file = folder.path / "kto.jsonl"
    rows = [line for line in file.read_text().splitlines(keepends=True) if '"label": false' in line]
    file.write_text("".join(rows) + "".join(rows).replace("Say", "Do"))
    check(rejected("learn", folder.path, "--task", "kto"), "data", None, "0 good answers", "4 of")
    assert read_rows(folder.path, "kto").count > read_rows(folder.path, "lm").count
    assert learn._new_job(folder, "auto", {}).task != "kto"  # it takes one that has enough


def scores(nll, targets=None) -> ExampleScores:
    nll = np.array(nll, float)
    if targets is None:
        targets = np.ones(len(nll))
    return ExampleScores(nll, np.array(targets), np.zeros(len(nll)))


def test_gains_are_paired_by_prompt():
    served = scores([1.0, 5.0, 2.0, 7.0])
    better = scores([0.5, 5.5, 1.0, 7.0])
    each = np.arange(4)
    pairs = GAINS["dpo"](served, better, np.ones(2, bool), each[:2])
    assert (pairs.gain, pairs.error, pairs.held_out) == (1.0, 0.0, 2)  # of (1.0, 1.0)

    good = np.array([True, False, True, True])
    ratings = GAINS["kto"](served, better, good, each)
    assert ratings.gain == pytest.approx((0.5 + 1.0 + 0.0) / 3 + 0.5)
    assert ratings.error is None  # of one bad answer
    assert GAINS["kto"](served, better, ~good, each).gain == pytest.approx(-ratings.gain)

    texts = GAINS["lm"](scores([1.0, 5.0], [1, 2]), scores([0.5, 3.0], [1, 2]), good[:2], each[:2])
    assert texts.gain == pytest.approx(2.5 / 3)
    targets = [1, 0, 1, 1]  # the second completion is longer than the maximum
    pairs = GAINS["dpo"](scores([1.0] * 4, targets), scores([0.5] * 4, targets), good, each[:2])
    assert pairs.held_out == 1 and pairs.error is None


@pytest.mark.parametrize("task", GAINS)
def test_rows_of_one_prompt_are_no_evidence_of_their_own(task):
    sides = 2 if task == "dpo" else 1
    labels = np.arange(6) % 2 == 0
    prompts = np.array([0, 0, 1, 1, 2, 2])
    before = scores(np.arange(6.0 * sides))
    after = scores(before.nll - np.sin(before.nll))
    once = GAINS[task](before, after, labels, prompts)
    assert once.held_out == 3

    twice = [scores(np.tile(part.nll, 2)) for part in (before, after)]
    again = GAINS[task](*twice, np.tile(labels, 2), np.tile(prompts, 2))
    assert (again.gain, again.error) == pytest.approx((once.gain, once.error))

    none = scores([1.0] * 6 * sides, [0] * 6 * sides)
    assert not GAINS[task](none, none, labels, prompts).is_above(0.0)


@pytest.mark.parametrize(
    ("gain", "error", "rows", "is_won", "is_lost"),
    [
        (0.21, 0.1, 9, True, False),
        (0.19, 0.1, 9, False, False),  # within two errors
        (-0.1, 0.06, 9, False, False),
        (-0.1, 0.04, 9, False, True),
        (math.nan, 0.1, 9, False, True),
        (1.0, None, 9, False, True),
        (1.0, 0.1, 7, False, True),  # others were longer than the maximum
    ],
)
def test_a_gain_wins_beyond_two_errors(gain, error, rows, is_won, is_lost):
    comparison = Comparison("nats", gain, error, rows)
    assert (comparison.is_above(2.0), not comparison.is_above(-2.0)) == (is_won, is_lost)


@pytest.mark.slow
def test_a_candidate_continues_the_served_pack(base, folder, tmp_path, run, rejected):
    pack = random_pack(base, 3, 4, ("q_proj", "v_proj"), size=0.02)
    start = pack.save(tmp_path / "start")
    own = LearningFolder.begin(tmp_path / "own", "start", base, start)
    for file in folder.path.glob("*.jsonl"):
        (own.path / file.name).write_bytes(file.read_bytes())

    check(rejected("learn", own.path, "--rank", 8), "conflict", "rank")
    flags = ("--task", "lm", "--iters", 1, "--learning-rate", "1e-12", "--max-seq-length", 64)
    assert run("learn", own.path, *flags)[0] == 0
    trained = Pack.open(own.candidate / "pack")
    for name, tensor in start.load_tensors().items():
        assert (abs(trained.load_tensors()[name] - tensor) < 1e-6).all(), name
    assert trained.specs == start.specs
    own.pack_of(0).verify()  # a copy: the pack itself may go


@pytest.mark.slow
def test_a_candidate_has_the_quantization_and_the_template_of_what_it_continues(tmp_path):
    model = saved_base(small_base(), tmp_path / "base")
    train = {"iters": 1, "quantize": "nf4", "val_batches": 0, "max_seq_length": 64}
    columns = DataConfig(template_kwargs={"enable_thinking": False})
    rows = [{"prompt": "Say 1.", "completion": "1"}] * 4
    data = {"train": rows, "valid": rows}
    run = train_pack(model, data, train=train, columns=columns, out=tmp_path / "q", progress=False)
    base = load_base_for(run.pack, model)

    folder = LearningFolder.begin(tmp_path / "d", "q", base, run.pack)
    job = learn.Job("lm", 0, 1, 1)
    recipe = learn._recipe(folder, job, {"model": folder.model, "out": "x"})
    assert (recipe.train.quantize, recipe.train.double_quant) == ("nf4", True)
    assert recipe.lora.rank == 16
    assert recipe.data.template_kwargs == {"enable_thinking": False}


def test_what_is_wrong_is_one_line(folder, tmp_path, rejected):
    check(rejected("learn", tmp_path / "none"), "not-found", None, "none")
    check(rejected("learn", folder.path, "--list", "--use", 1), "conflict", None, "--list", "--use")
    for flags in (("--task", "lm"), ("--model", "tiny"), ("--trust-remote-code",), ("--iters", 1)):
        check(rejected("learn", folder.path, "--use", 0, *flags), "conflict", None, flags[0])
    check(rejected("learn", folder.path, "--epochs", -1), "invalid", "epochs")
    check(rejected("learn", folder.path, "--task", "lm", "--beta", 0.3), "conflict", "beta")
    with learn.versions_locked(folder):
        check(rejected("learn", folder.path), "busy", None, "another `packs learn`")
        check(rejected("learn", folder.path, "--use", 0), "busy")

    lines = (folder.path / "dpo.jsonl").read_text().splitlines(keepends=True)
    (folder.path / "dpo.jsonl").write_text("".join(lines[:10]))
    check(rejected("learn", folder.path, "--task", "dpo"), "data", None, "16 and 8 are needed")
    (folder.path / "current").write_text("new\n")
    check(rejected("learn", folder.path, "--list"), "unreadable", None, "current")


def test_a_folder_is_made_as_a_whole(base, tmp_path, monkeypatch):
    pack = random_pack(base).save(tmp_path / "p")
    path = tmp_path / "d"
    path.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("shutil.copytree", stop)
        with pytest.raises(KeyboardInterrupt):
            LearningFolder.begin(path, "p", base, pack)
    assert not any(path.iterdir())

    def busy(*_: object) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    with monkeypatch.context() as patch:
        patch.setattr("mlx_packs.files.replace_folder", busy)  # a mounted volume
        with raises("unwritable", "learn", "busy", "name a folder inside it"):
            LearningFolder.begin(path, "p", base, pack)

    folder = LearningFolder.begin(path, "p", base, pack)
    assert {f.name for f in path.iterdir()} == {"README.txt", "learning.json", "versions"}
    assert path.stat().st_mode & 0o777 == 0o700
    folder.pack_of(0).verify()


def test_a_folder_is_of_one_pack_of_one_base(folder, base, tmp_path):
    pack = random_pack(base).save(tmp_path / "p")
    assert LearningFolder.begin(folder.path, "learned", base, None) == folder
    for name, own in (("other", None), ("learned", pack)):
        with raises("conflict", "learn"):
            LearningFolder.begin(folder.path, name, base, own)
    with raises("exists", "learn"):
        LearningFolder.begin(tmp_path, "learned", base, None)


ABOUT = {"model": "notes", "version": 0, "pack": None}


def answer_to(question: str, text: str = "No.", **more) -> Answer:
    message = {"role": "assistant", "content": text, **more}
    return Answer([{"role": "user", "content": question}], message, {}, ABOUT)


def add(folder, questions, **said) -> None:
    for question in questions:
        answer = answer_to(question)
        write_rows(folder, rows_of(answer, f"id of {question}", **said))


def test_a_prompt_stays_held_out_whatever_else_is_rated(tmp_path):
    add(tmp_path, map(str, range(400)), rating="down")
    first = read_rows(tmp_path, "kto")
    assert first.count == 400 and 50 < len(first.held_out) < 110
    assert all(is_held_out(row["prompt"]) for row in first.held_out)
    assert {"prompt", "completion", "label"} == set(first.train[0])

    add(tmp_path, map(str, range(400, 500)), rating="down")
    later = read_rows(tmp_path, "kto")
    assert [row for row in later.held_out if row in first.held_out] == list(first.held_out)


def test_a_prompt_is_held_out_as_a_text_and_as_a_message(tmp_path):
    questions = [f"Question {number}" for number in range(60)]
    add(tmp_path, questions, rating="down")
    with (tmp_path / "kto.jsonl").open("a") as file:
        for question in questions:  # by hand
            file.write(json.dumps({"prompt": question, "completion": "x", "label": True}) + "\n")

    split = read_rows(tmp_path, "kto")
    train, held_out = (
        {key_of(row["prompt"]) for row in rows} for rows in (split.train, split.held_out)
    )
    assert len(train) + len(held_out) == 60 and not train & held_out and held_out


def test_an_empty_answer_has_no_rows_that_cannot_be_trained_on():
    rows = rows_of(answer_to("a", " "), "1", correction="Yes.")
    assert set(rows) == {"chat.jsonl"}
    call = answer_to("a", "", tool_calls=[{"function": {"name": "f", "arguments": {}}}])
    assert set(rows_of(call, "1", correction="Yes.")) == {"chat.jsonl", "dpo.jsonl"}


def test_a_line_that_a_crash_cut_off_is_removed_and_a_complete_one_stays(tmp_path):
    add(tmp_path, "ab", rating="down")
    file = tmp_path / "kto.jsonl"
    lines = file.read_text().splitlines()
    file.write_text(lines[0] + "\n" + lines[1][:30])
    assert read_rows(tmp_path, "kto").count == 1
    add(tmp_path, "c", rating="down")
    identities = [json.loads(line)["id"] for line in file.read_text().splitlines()]
    assert identities == ["id of a", "id of c"]

    file.write_text(json.dumps({"prompt": "by hand", "completion": "x", "label": True}))
    add(tmp_path, "d", rating="down")
    assert read_rows(tmp_path, "kto").count == 2

    for last in (json.dumps({"prompt": "by hand", "completion": "y", "label": True}), '{"torn'):
        with file.open("a") as opened:
            opened.write(last)  # a second feedback on d
        rows = rows_of(answer_to("d"), "id of d", "down")
        write_rows(tmp_path, rows, replaced="id of d")
        assert read_rows(tmp_path, "kto").count == 3


def test_a_damaged_line_is_named(tmp_path):
    add(tmp_path, "a", rating="down")
    for line, fault in (("{oops", "not valid JSON"), ('"text"', "an object with a prompt")):
        (tmp_path / "kto.jsonl").write_text(line + "\n")
        with pytest.raises(PackError, match=rf"kto.jsonl:1: .*{fault}"):
            read_rows(tmp_path, "kto")
