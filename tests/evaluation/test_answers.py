"""Metrics of answers: what is right, what is asked, what a report says, in training and `packs eval`."""

import json
import math

import pytest

import mlx_packs as mp
from mlx_packs import Pack, TrainConfig, evaluate, load_base, train_pack
from mlx_packs.config.choices import ANSWER_METRICS
from mlx_packs.config.data import DataConfig, metric_of
from mlx_packs.data.formats import TOKEN_FORMATS, format_of
from mlx_packs.data.rows import read_rows
from mlx_packs.evaluation import answers
from mlx_packs.evaluation.answers import Exam, Question, answer_of, questions_of
from mlx_packs.evaluation.metrics import METRICS, own_metric
from mlx_packs.packs.facts import all_changes, answer_line
from mlx_packs.tasks.causal_lm import CausalLMTask
from tests.helpers.errors import check, raises
from tests.helpers.rows import chat, write_rows
from tests.helpers.runs import LORA, TRAIN

WANTED = '{"a": [1, true], "b": "x"}'


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (WANTED, {"exact", "contains", "json"}),
        (f"\n {WANTED}  ", {"exact", "contains", "json"}),
        ('{"b":"x","a":[1.0,true]}', {"json"}),
        (f"Here: {WANTED}.", {"contains"}),
        ('{"a": [1, 1], "b": "x"}', set()),
        ("[" * 5000, set()),
        ("", set()),
    ],
)
def test_when_an_answer_is_right(answer, right):
    assert {name for name in ANSWER_METRICS if METRICS[name].score(answer, WANTED)} == right
    assert not METRICS["json"].score("{", "{")


def test_the_embedded_data_has_a_metric_of_its_own(tmp_path):
    assert metric_of(None, DataConfig()) == "exact" and metric_of("none", DataConfig()) is None
    assert metric_of(None, DataConfig(data=str(tmp_path))) is None


def asked(base, rows, folder, metric="exact", longest=100, most=-1) -> list[Question]:
    rows = read_rows(write_rows(folder, test=rows) / "test.jsonl")
    columns = DataConfig()
    row_format = format_of(rows[0], columns, TOKEN_FORMATS)
    return questions_of(rows, row_format, columns, base, METRICS[metric], longest, most)


def test_examples_without_an_answer_or_too_long_are_not_asked(shared_tiny, tmp_path):
    rows = [chat("a", "1"), chat("b", " "), chat("c " * 80, "3"), chat("d", "4"), chat("e", "5")]
    questions = asked(shared_tiny, rows, tmp_path, longest=60, most=2)
    assert [(q.text, q.wanted) for q in questions] == [("a", "1"), ("d", "4")]


def test_examples_that_a_metric_cannot_ask_are_named(shared_tiny, tmp_path):
    with raises("data", "metric", "test.jsonl:1"):
        asked(shared_tiny, [chat("a", "no JSON")], tmp_path, "json")
    with raises("conflict", "metric", "--max-seq-length"):
        asked(shared_tiny, [chat("word " * 200, "b")], tmp_path)


def exam(base, metric: str, *wanted: str) -> Exam:
    questions = [Question(f"q{i}", [5, 6], text) for i, text in enumerate(wanted)]
    return Exam(base, METRICS[metric], questions, 1000)


def test_report_counts_right_answers_with_their_binomial_error(shared_tiny):
    report = exam(shared_tiny, "json", "1", "2", "3", "4").report(
        ["1", "x", "x", "x"], ["1", "2", "3", "9"]
    )
    assert (report.rows, report.before.share, report.after.share) == (4, 0.25, 0.75)
    assert report.after.se == pytest.approx(math.sqrt(0.75 * 0.25 / 4))
    assert (report.before.valid, report.after.valid) == (0.25, 1.0)
    line = answer_line(report.to_json(), "test examples")
    assert line.startswith("json    25.0 ± 21.7 % → 75.0 ± 21.7 % of 4 test examples")
    assert line.endswith("(valid JSON 25.0 % → 100.0 %)")


def test_the_share_of_a_constant_answer_is_said(shared_tiny):
    four = exam(shared_tiny, "exact", "ham", "ham", "ham", "spam")
    report = four.report(["?", "ham", "ham", "x"], ["ham"] * 4).to_json()
    assert report["commonest_share"] == report["after"]["share"] == 0.75
    assert answer_line(report).endswith("(commonest answer 75.0 %)")


def test_samples_are_wrong_without_the_pack_and_right_with_it(shared_tiny):
    four = exam(shared_tiny, "exact", *"1234")
    samples = four.samples(["1", "x", "y", "x"], ["1", "2", "z", "4"])
    assert [s["prompt"] for s in samples] == ["q1", "q3"]
    assert samples[0] == {"prompt": "q1", "wanted": "2", "before": "x", "after": "2"}
    assert len(four.samples(["x"] * 4, list("1234"))) == 3


@pytest.mark.parametrize(
    ("prompt", "text", "answer"),
    [
        ("Red?{open}\n", "A colour.{end}red", "red"),
        ("Red?{open}\n", "{open}A colour.{end}\n\nred", "red"),
        ("Red?{open}\n", "A colour, and another", ""),
        ("Red?", "{open}A colour.{end}red", "red"),
        ("Red?", "{open}A colour", ""),
        ("Red?", "What does {end} do?", "What does {end} do?"),
        ("{open} {end}", "red", "red"),
    ],
)
def test_thoughts_end_at_their_mark(shared_tiny, monkeypatch, prompt, text, answer):
    tokenizer = shared_tiny.tokenizer
    for name in ("think", "longcat_think"):
        marks = {"open": f"<{name}>", "end": f"</{name}>"}
        monkeypatch.setattr(tokenizer, "_think_start", marks["open"])
        monkeypatch.setattr(tokenizer, "_think_end", marks["end"])
        tokens = tokenizer.encode(prompt.format(**marks))
        assert answer_of(shared_tiny, tokens, text.format(**marks)) == answer.format(**marks)


def test_expected_answers_are_without_thoughts_and_leave_room_for_them_and_more(
    shared_tiny, tmp_path, monkeypatch
):
    """Else a text that merely begins as it should would count."""
    thought = "It is a colour, and I am asked to say its name."
    whole = f"<think>{thought}</think>\n\nred"
    limits = []
    monkeypatch.setattr(answers, "stream_batch", lambda *a: limits.append(a[2]) or iter(()))
    for answer in ({"content": "red", "reasoning_content": thought}, {"content": whole}):
        row = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", **answer}]}
        questions = asked(shared_tiny, [row], tmp_path)
        assert [q.wanted for q in questions] == ["red"]
        for metric in ("contains", "exact"):
            Exam(shared_tiny, METRICS[metric], questions, 1000).answers()
        longer, limit = limits[-2:]
        assert longer > limit >= len(shared_tiny.tokenizer.encode(whole)) + 8


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """Chats with one answer, which a few updates teach."""
    rows = [chat(f"Say {n}.", "yes") for n in range(8)]
    return write_rows(tmp_path_factory.mktemp("letters"), train=rows, test=rows[:5])


@pytest.mark.slow
def test_training_and_eval_report_the_same_answers(letters, dense_tiny, tmp_path, run):
    out = tmp_path / "p"
    learn = {**vars(TRAIN), "iters": 12, "learning_rate": 5e-3, "metric": "exact"}
    result = train_pack(dense_tiny, letters, LORA, TrainConfig(**learn), out)

    answers = result.report["answers"]
    assert answers["rows"] == 5 and answers["before"]["share"] == 0
    assert answers["after"]["share"] == 1

    lines = CausalLMTask.report_lines(result.report)
    assert lines[0] == ("exact   0.0 % → 100.0 % of 5 test examples (commonest answer 100.0 %)")
    assert sum(line.startswith("before") for line in lines) == 3

    manifest = json.loads((out / "pack.json").read_text())
    assert manifest["eval"]["answers"] == answers
    assert len(manifest["samples"]) == 3
    assert [change.after for change in all_changes(manifest["eval"])][0] == 100  # percent
    assert "exact 0.0 % → 100.0 % of 5 examples" in (out / "README.md").read_text()
    assert "answers exact 0.0 % → 100.0 % of 5 examples" in run("inspect", out)[1]

    assert run("eval", out)[0] == 2  # it learned nothing of the bundled examples
    check(run.error, "invalid", "data", str(letters.name))
    code, text, _ = run("eval", out, "--data", letters, "--metric", "exact", "--limit", 3)
    assert code == 0 and text.splitlines()[-1] == (
        "exact   0.0 % → 100.0 % of 3 examples (commonest answer 100.0 %)"
    )


def test_a_base_is_evaluated_without_a_pack(dense_tiny, letters, run):
    few = ("--data", letters, "--limit", 3, "--metric", "exact")
    code, text, _ = run("eval", "--model", dense_tiny.name, *few)
    assert code == 0
    assert text.splitlines()[-1].startswith("exact   0.0 % of 3 examples")
    assert "pack" not in text
    assert run("eval", *few)[0] == 2
    check(run.error, "invalid", "pack", "--model and --data")


def test_a_metric_that_has_no_meaning_is_one_line(letters, encoder, tmp_path, here, run):
    texts = write_rows(tmp_path / "t", train=[{"text": "hello there, you"}] * 4)
    few = ("--iters", 1, "--batch-size", 2, "--out", "p", "--matmul-path", "dense")
    assert run("train", "--data", texts, "--metric", "exact", *few)[:2] == (2, "")
    check(run.error, "conflict", "metric", "text")
    assert run("train", "--data", letters, "--metric", "rouge", *few)[0] == 2
    check(run.error, "unknown", "metric", "exact")
    assert run("train", "--task", "embedding", "--data", texts, "--metric", "json")[0] == 2
    check(run.error, "conflict", "metric", "--task lm")
    with raises("conflict", "metric"):
        evaluate(load_base(encoder), None, letters, metric="exact")
    assert not (here / "p").exists()


OWN = """
def half(answer, expected):
    return 0.5 if answer else False

def text(answer, expected):
    return "right"

def broken(answer, expected):
    return 1 / 0
"""


def half(answer, expected):
    return 0.5 if answer else False


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def test_a_function_scores_answers_in_training_and_evaluation(own):
    """From a file as from Python; the mean of its scores has their standard error."""
    rows = [chat(f"Say {i}.", str(i)) for i in range(8)]
    train = TrainConfig(**{**vars(TRAIN), "metric": "own.py:half"})
    named = train_pack("tiny", rows, LORA, train, "named")
    given = train_pack("tiny", rows, LORA, TRAIN, "given", metric=half)
    for run in (named, given):
        answers = Pack.open(run.pack.path).manifest["eval"]["answers"]
        assert answers["metric"] == "half"
        assert answers["after"] == {"share": 0.5, "se": 0.0, "valid": None}
    for metric in ("own.py:half", half):
        report = evaluate("tiny", "named", rows, split="train", metric=metric).answers
        assert report.metric == "half" and report.before.share == 0.5

    mixed = Exam(load_base("tiny"), own_metric(half), [Question("q", [5], "a")] * 4, 1000)
    accuracy = mixed.report(["", "", "x", "x"]).before
    assert accuracy.share == 0.25 and accuracy.se == pytest.approx(0.25 / math.sqrt(4))


@pytest.mark.parametrize(
    ("metric", "code", "named"),
    [
        ("own.py:none", "not-found", "own.py has no function none"),
        ("none.py:half", "not-found", "none.py is no file"),
        ("half", "unknown", "FILE.py:NAME"),
        ("own.py:text", "data", "returned 'right'"),
        ("own.py:broken", "data", "ZeroDivisionError"),
        (lambda answer: 1.0, "data", "TypeError"),
    ],
)
def test_a_function_that_cannot_score_is_named(own, metric, code, named):
    rows = [chat(f"Say {i}.", str(i)) for i in range(4)]
    with raises(code, "metric", named):
        evaluate("tiny", None, rows, split="train", metric=metric)
    if code != "data":
        with raises(code, "metric", named):
            mp.train("tiny", rows, metric=metric, out="pack")
        assert not (own / "pack-run").exists()


@pytest.mark.parametrize("settings", [{"metric": "exact"}, {"pipeline": True}])
def test_a_function_that_would_not_be_used_is_rejected(own, settings):
    rows = [chat(f"Say {i}.", str(i)) for i in range(4)]
    with raises("conflict", "metric"):
        train_pack("tiny", rows, LORA, {"iters": 1, **settings}, "pack", metric=half)
    assert not (own / "pack-run").exists()
