"""--load-best, --patience and --time: which weights a run ends with, and when."""

import json

import pytest

from mlx_packs import Phase, TrainConfig, train_pack
from mlx_packs.config.common import seconds_of
from mlx_packs.errors import PackError
from mlx_packs.evaluation.answers import AnsweredScore, Exam
from mlx_packs.evaluation.perplexity import PerplexityScore
from mlx_packs.objectives.score import REWARD, StoredScore
from mlx_packs.reading import sha256
from mlx_packs.training import watch
from mlx_packs.training.checkpoint import ADAPTERS
from mlx_packs.training.run_folder import checkpoints, read_identity
from mlx_packs.training.watch import EarlyStop, better_earlier
from tests.helpers.errors import raises
from tests.helpers.rows import CHATS, write_rows
from tests.helpers.runs import LORA, Lines

SETTINGS = {
    **{"batch_size": 2, "max_seq_length": 64, "matmul_path": "dense", "save_every": 50},
    **{"steps_per_report": 2, "steps_per_eval": 2, "lr_schedule": "constant", "keep_last": 1},
}


@pytest.fixture
def trained(dense_tiny, tmp_path):
    """Train on rows that say nothing of those that validate: it soon overfits."""
    other = [{"text": f"{word} " * 12} for word in ("zebra", "quartz")]
    rows = [{"text": text["messages"][-1]["content"]} for text in CHATS]
    data = write_rows(tmp_path / "d", train=rows, valid=other, test=other)

    def run(out: str, iters: int = 12, resume: bool = False, **settings):
        config = TrainConfig(iters=iters, **{**SETTINGS, "learning_rate": 2e-2, **settings})
        lines = Lines()
        result = train_pack(
            dense_tiny, data, LORA, config, tmp_path / out, resume=resume, display=lines
        )
        return result, lines.lines

    return run


def losses(result) -> dict[int, float]:
    return {line["batch"]: line["valid_loss"] for line in result.curve if "valid_loss" in line}


def test_the_pack_is_the_best_step_and_patience_ends_it(trained):
    result, lines = trained("p", iters=40, patience=2)
    measured = losses(result)
    best = min(measured, key=measured.get)
    assert result.report["batches"] == max(measured) == best + 4 < 40
    assert result.report["best_batch"] == best
    assert result.pack.manifest["end"] == {
        "stopped": "no lower validation loss in 2 validations",
        "best_batch": best,
        "best_valid_loss": measured[best],
    }
    assert any(line.startswith(f"best batch {best}: ") for line in lines)
    folder = next(f for f in checkpoints(result.run) if f.name.endswith(f"{best:06d}"))
    assert sha256(result.pack.path / ADAPTERS) == sha256(folder / ADAPTERS)
    until, _ = trained("q", iters=best)
    assert sha256(until.pack.path / ADAPTERS) == sha256(folder / ADAPTERS)


def test_a_better_earlier_batch_is_said(trained):
    result, lines = trained("p", iters=14)
    measured = losses(result)
    best = min(measured, key=measured.get)
    assert best < max(measured)
    (note,) = [line for line in lines if line.startswith("note") and "--load-best" in line]
    assert f"at batch {best} " in note and f"at batch {max(measured)}:" in note
    assert not any("--load-best" in line for line in trained("q", iters=4)[1])


def test_the_last_step_is_validated_too(trained):
    result, _ = trained("p", iters=5, load_best=True, steps_per_eval=3)
    assert list(losses(result)) == [3, 5]
    plain, _ = trained("q", iters=5, steps_per_eval=3)
    assert list(losses(plain)) == [3]
    assert "end" not in plain.pack.manifest


def test_a_run_that_patience_ended_ends_there_again(trained):
    result, _ = trained("p", iters=40, patience=1)
    again, _ = trained("p", iters=40, patience=1, resume=True)
    assert again.report["batches"] == result.report["batches"]
    assert sha256(again.pack.path / ADAPTERS) == sha256(result.pack.path / ADAPTERS)


def test_resumed_it_takes_what_an_unbroken_run_takes(trained):
    trained("p", iters=4, load_best=True)
    resumed, _ = trained("p", iters=7, load_best=True, resume=True)
    uninterrupted, _ = trained("q", iters=7, load_best=True)
    assert resumed.pack.manifest["end"] == uninterrupted.pack.manifest["end"]
    assert sha256(resumed.pack.path / ADAPTERS) == sha256(uninterrupted.pack.path / ADAPTERS)


def test_a_finished_run_can_take_its_best_weights(trained):
    plain, _ = trained("p", iters=10, save_every=2)
    measured = losses(plain)
    resumed, _ = trained("p", iters=10, save_every=2, load_best=True, resume=True)
    assert resumed.report["best_batch"] == min(measured, key=measured.get)


def test_accumulated_batches_are_validated_after_their_update(trained):
    result, _ = trained("p", iters=10, load_best=True, grad_accumulation_steps=3)
    assert list(losses(result)) == [3, 6, 9, 10]


def test_the_time_that_a_run_was_given_ends_it_with_a_pack(trained, monkeypatch):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(watch, "monotonic", lambda: next(clock))
    result, lines = trained("p", iters=40, time="45s")
    assert 1 < result.report["batches"] < 40
    assert result.report["stopped"] == "it trained for 0:45 (--time)"
    assert any(line.startswith("stop batch") for line in lines)
    assert read_identity(result.run)["recipe"]["time"] == "45s"
    monkeypatch.undo()
    more, _ = trained("p", iters=result.report["batches"] + 2, resume=True)
    assert more.report["batches"] == result.report["batches"] + 2


def test_no_validation_is_an_error_before_anything_is_loaded(tmp_path):
    for settings in ({"load_best": True}, {"patience": 2}):
        with raises("conflict", next(iter(settings))):
            TrainConfig(val_batches=0, **settings)


def test_without_validation_examples_nothing_is_trained(tmp_path, monkeypatch):
    def loaded(*_, **__):
        raise AssertionError("a base was loaded")

    monkeypatch.setattr("mlx_packs.training.run.load_base", loaded)
    data = write_rows(tmp_path / "d", train=CHATS, test=CHATS[:1])
    for settings in ({"load_best": True}, {"patience": 2}):
        with raises("conflict", next(iter(settings)), "valid"):
            train_pack("tiny", data, LORA, settings, tmp_path / "p")


def test_phases_have_no_time():
    phases = (Phase(name="a", data="a"), Phase(name="b", data="b"))
    with raises("conflict", "time"):
        TrainConfig(time="1s", phases=phases)


def test_phases_are_phases():
    (phase,) = TrainConfig(phases=({"name": "a", "data": "a"},)).phases
    assert phase == Phase(name="a", data="a")
    with raises("invalid", "phases"):
        TrainConfig(phases=("a",))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("6h", 21600),
        ("90m", 5400),
        ("30s", 30),
        ("1h30m", 5400),
        ("45", 45),
        ("0.5h", 1800),
        (90, 90),
    ],
)
def test_times_are_hours_minutes_seconds(text, seconds):
    assert seconds_of(text) == seconds
    assert TrainConfig(time=text).seconds == seconds


@pytest.mark.parametrize(
    "text", ["", "0", "6 days", "h", "-3m", "1h2x", "1h30", "30m1h", "nan", -5, True]
)
def test_what_is_no_time_is_rejected(text):
    with raises("invalid", "time"):
        TrainConfig(time=text)


def test_a_curve_is_continued():
    curve = [{"batch": b, "valid_loss": loss} for b, loss in ((2, 2.0), (4, 1.5), (6, 1.7))]
    early = EarlyStop(patience=2, curve=json.loads(json.dumps(curve)))
    assert (early.batch, early.since, early.reason()) == (4, 1, None)
    assert not early.add(8, StoredScore(float("nan")))
    resumed = EarlyStop(patience=2, curve=[*curve, {"batch": 8, "valid_loss": None}])
    assert (resumed.batch, resumed.since) == (early.batch, early.since)
    assert early.reason() == "no lower validation loss in 2 validations"


@pytest.mark.parametrize(
    ("losses", "batch"),
    [
        ([2.0, 1.0, 1.5], 2),
        ([2.0, 1.5, 1.5], None),
        ([0.0, 0.5], 1),
        ([0.5, 0.0], None),
        ([-0.1, -0.336], None),  # the best is the last: nothing to advise
        ([-0.5, -0.2], 1),
        ([-0.5, -0.499], None),
        ([None, 1.0], None),
    ],
)
def test_an_earlier_batch_is_better_by_losses_of_any_sign(losses, batch):
    curve = [{"batch": i, "valid_loss": loss} for i, loss in enumerate(losses, 1)]
    note = better_earlier(curve)
    assert (note is not None) == (batch is not None)
    assert note is None or f"at batch {batch} " in note


def test_of_rewards_a_higher_one_is_better():
    curve = [{"batch": b, "valid_reward": r} for b, r in ((2, 0.2), (4, 0.5), (6, 0.3))]
    early = EarlyStop(patience=1, curve=curve)
    assert (early.batch, early.since) == (4, 1)
    assert early.reason() == "no higher validation reward in a validation"
    assert early.add(8, StoredScore(0.6, REWARD)) and early.reason() is None


@pytest.mark.parametrize("earlier_version", [False, True])
def test_of_rewards_the_reward_is_compared(earlier_version):
    curve = [{"batch": i, "valid_reward": reward} for i, reward in enumerate((0.5, 0.2), 1)]
    for line in curve if earlier_version else ():
        line["valid_loss"] = -line["valid_reward"]
    assert better_earlier(curve).startswith("the validation reward was 0.500 at batch 1 and 0.200")
    assert better_earlier(curve[::-1][:1]) is None


ANSWERS = [{"prompt": f"Item {i} is", "completion": ("red", "green")[i % 2]} for i in range(12)]


@pytest.fixture
def answering(dense_tiny, tmp_path):
    """Train on prompts with one of two answers."""
    data = write_rows(tmp_path / "d", train=ANSWERS, valid=ANSWERS[:4], test=ANSWERS[:2])

    def run(**settings):
        config = TrainConfig(**{**SETTINGS, "learning_rate": 1e-2, "metric": "none", **settings})
        return train_pack(dense_tiny, data, LORA, config, tmp_path / "p", overwrite=True)

    return run


def test_the_best_is_found_by_the_number_that_is_named(answering):
    result = answering(iters=8, load_best=True, best="valid_exact")
    measured = {line["batch"]: line for line in result.curve if "valid_exact" in line}
    assert list(measured) == [2, 4, 6, 8]
    shares = {batch: line["valid_exact"] for batch, line in measured.items()}
    best = max(shares, key=shares.get)  # the first of those that are equal
    assert result.pack.manifest["end"] == {"best_batch": best, "best_valid_exact": shares[best]}
    assert all({"valid_loss", "valid_ppl", "valid_accuracy"} <= set(m) for m in measured.values())
    # the checkpoint of the best weights stays, beside the last one
    assert [f.name for f in checkpoints(result.run)] == sorted({f"step-{best:06d}", "step-000008"})


def test_patience_counts_by_the_number_that_is_named(answering, monkeypatch):
    shares = iter((0.25, 0.5, 0.5, 0.25, 1.0))
    monkeypatch.setattr(
        Exam, "validated", lambda exam, score: AnsweredScore(score, exam.metric, next(shares))
    )
    result = answering(iters=40, patience=2, best="valid_exact")
    assert result.pack.manifest["end"] == {
        "stopped": "no higher validation exact in 2 validations",
        "best_batch": 4,
        "best_valid_exact": 0.5,
    }
    resumed = EarlyStop(patience=2, best_by="valid_exact", curve=result.curve)
    assert resumed.batch == 4 and resumed.reason() == result.pack.manifest["end"]["stopped"]


def test_a_score_is_compared_by_its_entries():
    score = PerplexityScore(ppl=4.0, ppl_se=None, accuracy=0.5, nll=1.4, rows=2, targets=8)
    better = PerplexityScore(ppl=3.0, ppl_se=None, accuracy=0.4, nll=1.1, rows=2, targets=8)
    assert better.by(None).is_better_than(score.by(None))
    assert better.by("valid_ppl").is_better_than(score.by("valid_ppl"))
    assert score.by("valid_accuracy").is_better_than(better.by("valid_accuracy"))
    answered = AnsweredScore(score, "exact", 0.75)
    assert answered.by("valid_exact").entries == {"valid_exact": 0.75}
    assert answered.value == answered.nll == 1.4 and answered.text.endswith(", exact 75.0%")
    with raises("conflict", "best", "valid_exact", "valid_accuracy"):
        score.by("valid_exact")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"best": "valid_accuracy"}, ("load_best", "patience")),
        ({"best": "valid_exact", "load_best": True, "pipeline": True}, ("answers", "pipeline")),
    ],
)
def test_a_number_that_cannot_be_had_is_rejected(settings, words):
    with pytest.raises(PackError) as caught:
        TrainConfig(**settings)
    assert caught.value.flag == "best" and all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"best": "accuracy"}, ("--best accuracy", "valid_accuracy", "valid_exact")),
        ({"best": "valid_exact", "task": "dpo"}, ("--best valid_exact", "valid_reward_margin")),
        ({"best": "valid_loss", "task": "grpo", "reward": "exact"}, ("valid_reward",)),
    ],
)
def test_a_number_that_a_task_does_not_have_is_rejected_before_a_base_is_read(
    tmp_path, monkeypatch, settings, named
):
    monkeypatch.setattr("mlx_packs.training.run.load_base", None)
    data = write_rows(tmp_path / "d", train=ANSWERS, valid=ANSWERS)
    with raises("conflict", "best", *named):
        train_pack("tiny", data, LORA, TrainConfig(load_best=True, **settings), tmp_path / "p")


def test_lower_is_better_of_losses_and_perplexities_alone():
    for measure in ("loss", "ppl", "worst_loss"):
        assert StoredScore(1.0, measure).is_better_than(StoredScore(2.0, measure))
    for measure in ("reward", "exact", "accuracy"):
        assert StoredScore(2.0, measure).is_better_than(StoredScore(1.0, measure))


def test_answers_that_the_examples_do_not_have_are_rejected(tmp_path):
    data = write_rows(tmp_path / "d", train=[{"text": "a b"}] * 4, valid=[{"text": "c d"}] * 2)
    config = TrainConfig(iters=2, load_best=True, best="valid_exact")
    with raises("conflict", "best", "--best valid_exact", "no wanted answers"):
        train_pack("tiny", data, LORA, config, tmp_path / "p")
