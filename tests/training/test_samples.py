"""samples.jsonl of a run folder: the same prompts, answered while a run stays the same."""

import errno
import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_packs import LoRAConfig, Phase, TrainConfig, train_pack
from mlx_packs.errors import RunStopped
from mlx_packs.files import write_errors
from mlx_packs.inference.generate import chat_prompt, complete
from mlx_packs.training import samples
from mlx_packs.training.run_folder import RunFolder
from tests.helpers.bases import small_base
from tests.helpers.errors import raises
from tests.helpers.preferences import preference, rated
from tests.helpers.rows import chat, write_rows
from tests.helpers.runs import LORA, TRAIN, Lines
from tests.tasks.test_grpo import SETTINGS as GRPO
from tests.tasks.test_grpo import shorter
from tests.training.conftest import ROWS, files_of, interrupt_at, untimed_metrics

RUN = Path("p-run")
FILE = RUN / "samples.jsonl"
EVERY_TWO = {"iters": 5, "sample_every": 2, "lora": replace(LORA, dropout=0.2)}
SIX = [chat(f"Say {word}.", f"{word}!") for word in "one two three four five six".split()]


def read_samples(run: Path) -> list[dict]:
    return RunFolder(run).samples()


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """Answers are short, so that tests are."""
    monkeypatch.setattr(samples, "_TOKENS", (4, 8))


@pytest.fixture
def sampled(train, here):
    """As `train`, with six validation examples, answered before the first batch and every two."""
    write_rows(here / "d", train=ROWS, valid=SIX)
    return lambda out="p", **changes: train(out, **{**EVERY_TWO, **changes})


def test_a_run_with_samples_is_the_run_without(sampled, small):
    runs = [
        sampled(name, sample_every=every, grad_accumulation_steps=steps)
        for name, every, steps in (("p1", 2, 1), ("p2", None, 1), ("p3", 1, 2), ("p4", None, 2))
    ]
    for one, other in (runs[:2], runs[2:]):
        assert untimed_metrics(one.run) == untimed_metrics(other.run)
        assert files_of(one.run) == files_of(other.run)
        assert not (other.run / "samples.jsonl").exists()

    lines = read_samples(runs[0].run)
    assert [line["batch"] for line in lines] == 5 * [0] + 5 * [2] + 5 * [4]
    assert {tuple(line) for line in lines} == {("batch", "prompt", "expected", "answer")}
    asked = [(line["prompt"], line["expected"]) for line in lines]
    expected = [tuple(turn["content"] for turn in row["messages"]) for row in SIX[:5]]
    assert asked == 3 * expected
    for row, line in zip(SIX, lines[:5], strict=False):
        prompt = chat_prompt(small, row["messages"][:1])
        limit = len(small.tokenizer.encode(line["expected"])) + 8
        assert line["answer"] == complete(small, prompt, min(8, limit)).strip()
    assert Counter(line["batch"] for line in read_samples(runs[2].run)) == {
        batch: 5 for batch in range(6)
    }


def test_answers_change_as_the_model_does(sampled):
    last = sampled(iters=30, sample_every=30, learning_rate=0.02, lora=LoRAConfig(rank=4)).run
    lines = read_samples(last)
    before, after = ([x["answer"] for x in lines if x["batch"] == n] for n in (0, 30))
    assert all(a != b for a, b in zip(before, after, strict=True))


def test_a_resumed_run_has_each_line_once(sampled, monkeypatch):
    whole = sampled("whole").run / "samples.jsonl"
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3)
        with pytest.raises(RunStopped):
            sampled(save_every=100)
    assert {line["batch"] for line in read_samples(RUN)} == {0, 2}
    # as after a kill: what is later than the checkpoint, and a line that was cut
    later = json.dumps(read_samples(RUN)[-1] | {"batch": 4})
    FILE.write_text(f"{FILE.read_text()}{later}\n{later[:40]}")
    sampled(resume=True)
    assert FILE.read_bytes() == whole.read_bytes()
    sampled(resume=True)  # it had ended
    assert FILE.read_bytes() == whole.read_bytes()


@pytest.mark.slow
def test_samples_that_are_asked_for_later_begin_with_the_base(sampled, monkeypatch):
    first = read_samples(sampled("whole").run)[:5]
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3)
        with pytest.raises(RunStopped):
            sampled(sample_every=None)
    assert not FILE.exists()
    resumed = sampled(resume=True).run
    assert read_samples(resumed)[:5] == first
    assert [line["batch"] for line in read_samples(resumed)] == 5 * [0] + 5 * [4]
    sampled(overwrite=True, sample_every=None)
    assert not FILE.exists()


def test_a_file_that_cannot_be_written_is_a_note(sampled, train, monkeypatch):
    whole = files_of(sampled("whole").run)

    def full(path, *_):
        with write_errors(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(samples, "append_line", full)
    monkeypatch.setattr(samples, "atomic_write", full)
    assert files_of(sampled().run) == whole
    notes = [line for line in train.lines if "samples.jsonl: cannot be written" in line]
    assert len(notes) == 4 and "No space left" in notes[0]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["dpo", "kto", "grpo"])
def test_tasks_with_completions_have_samples(task, here):
    rows = [(rated if task == "kto" else preference)(i) for i in range(12)]
    settings = {"max_seq_length": 96, "sample_every": 2, "matmul_path": "dense"}
    options = {}
    if task == "grpo":
        rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
        settings, options = {**GRPO, **settings}, {"reward": shorter}
    data = write_rows(here / "d", train=rows[:8], valid=rows[8:])
    train = TrainConfig(**{**settings, "task": task, "iters": 2})
    run = train_pack(small_base(), data, LORA, train, "p", progress=Lines(), **options).run
    lines = read_samples(run)
    assert [line["batch"] for line in lines] == 4 * [0] + 4 * [2]
    assert [line["prompt"] for line in lines[:4]] == [row["prompt"] for row in rows[8:]]
    assert all(line["expected"] for line in lines[:4]) or task == "kto"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"task": "embedding"}, "--task lm"),
        ({"task": "classify"}, "or distill"),
        ({"phases": [Phase(iters=2)]}, "phases"),
        ({"pipeline": True}, "--pipeline"),
        ({"objective": "projection-stack"}, "--objective"),
    ],
)
def test_runs_without_answers_have_no_samples(settings, named):
    with raises("conflict", "sample_every", named):
        TrainConfig(sample_every=5, **settings)


def test_samples_need_validation_examples(train, here):
    write_rows(here / "e", train=ROWS, test=ROWS[:2])
    with raises("conflict", "sample_every", "validation"):
        train(data="e", sample_every=2)


@pytest.mark.slow
def test_a_base_on_disk_takes_no_samples(small_folder, here):
    write_rows(here / "d", train=ROWS, valid=SIX)
    display = Lines()
    train = replace(TRAIN, sample_every=1, offload_base="on", recompute="block")
    train_pack(small_folder, "d", LORA, train, "p", progress=display)
    assert not FILE.exists()
    assert [line for line in display.lines if "--sample-every: no samples" in line]


def test_a_task_without_prompts_says_so():
    display = Lines()
    run = SimpleNamespace(train=TrainConfig(sample_every=1), display=display)
    task = SimpleNamespace(followed=())
    assert samples.Samples.of(SimpleNamespace(run=run, task=task)) is None
    assert "no samples are taken, since this task" in display.lines[0]


def test_lines_of_others_are_left_out(tmp_path):
    good = {"batch": 1, "prompt": "a", "expected": None, "answer": ""}
    bad = [{**good, "batch": True}, {**good, "answer": None}, {**good, "expected": 3}, [], 1]
    texts = [json.dumps(each) for each in (good, *bad)]
    (tmp_path / "samples.jsonl").write_bytes("\n".join([*texts, "{", "\xff"]).encode("latin-1"))
    assert read_samples(tmp_path) == [good]
    assert read_samples(tmp_path / "none") == []
