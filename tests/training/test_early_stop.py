"""--load-best, --patience and --time: which weights a run ends with, and when."""

import json
from pathlib import Path

import pytest

from mlx_packs import Phase, TrainConfig, train_pack
from mlx_packs.evaluation.answers import AnsweredScore, Exam
from mlx_packs.evaluation.perplexity import PerplexityScore
from mlx_packs.objectives.score import REWARD, StoredScore
from mlx_packs.reading import sha256
from mlx_packs.training import watch
from mlx_packs.training.on_nan import UpdateGuard
from mlx_packs.training.run_folder import RunFolder
from mlx_packs.training.state import ADAPTERS
from mlx_packs.training.watch import EarlyStop, better_earlier
from tests.helpers.errors import raises
from tests.helpers.rows import CHATS, write_rows
from tests.helpers.runs import LORA

LOSSES = (3.0, 2.0, 2.5, 2.4, 2.6, 2.7)  # of validations after batches 1 to 6
BEST = 2
EACH = {"steps_per_eval": 1, "test_batches": 1}  # every batch is validated
ONE = {**EACH, "save_every": 50, "keep_last": 1}  # checkpoints are of the best batch and the last


def adapters(result) -> str:
    return sha256(result.pack.path / ADAPTERS)


@pytest.fixture
def measured(monkeypatch):
    """Validations that measure `LOSSES`."""
    monkeypatch.setattr(
        UpdateGuard, "validate", lambda guard, _: StoredScore(LOSSES[guard._state.batches - 1])
    )


@pytest.mark.usefixtures("measured")
def test_the_pack_is_the_best_step_and_patience_ends_it(train):
    run = train(iters=6, patience=2, **ONE)
    assert run.report["batches"] == BEST + 2 and run.report["best_batch"] == BEST
    assert run.pack.manifest["end"] == {
        "stopped": "no lower validation loss in 2 validations",
        "best_batch": BEST,
        "best_valid_loss": LOSSES[BEST - 1],
    }
    assert any(line.startswith(f"best batch {BEST}: ") for line in train.lines)
    assert adapters(train("until", iters=BEST, **ONE)) == adapters(run)
    again = train(iters=6, patience=2, resume=True, **ONE)
    assert again.report["batches"] == BEST + 2 and adapters(again) == adapters(run)


@pytest.mark.slow
@pytest.mark.usefixtures("measured")
def test_a_better_earlier_batch_is_said_and_a_finished_run_can_take_it(train):
    plain = train(iters=5, keep_last=-1, **EACH)
    (note,) = [line for line in train.lines if line.startswith("note") and "--load-best" in line]
    assert f"at batch {BEST} " in note and "at batch 4:" in note
    assert "end" not in plain.pack.manifest
    resumed = train(iters=5, keep_last=-1, load_best=True, resume=True, **EACH)
    assert resumed.report["best_batch"] == BEST


def test_the_time_that_a_run_was_given_ends_it_with_a_pack(train, monkeypatch):
    clock = iter(range(0, 1000, 5))
    monkeypatch.setattr(watch, "monotonic", lambda: next(clock))
    run = train(iters=6, val_batches=0, time="25s")
    batches = run.report["batches"]
    assert 1 < batches < 6 and run.report["stopped"] == "it trained for 0:25 (--time)"
    assert any(line.startswith("stop batch") for line in train.lines)
    assert RunFolder(run.run).read_identity()["recipe"]["time"] == "25s"
    more = train(iters=batches + 1, val_batches=0, resume=True)
    assert more.report["batches"] == batches + 1


@pytest.mark.parametrize(
    ("flag", "settings", "named"),
    [
        ("load_best", {"load_best": True, "val_batches": 0}, ()),
        ("patience", {"patience": 2, "val_batches": 0}, ()),
        ("time", {"time": "1s", "phases": (Phase("a", data="a"), Phase("b", data="b"))}, ()),
        ("best", {"best": "valid_accuracy"}, ("load-best", "patience")),
        ("best", {"best": "valid_exact", "load_best": True, "pipeline": True}, ("answers",)),
    ],
)
def test_settings_of_an_end_that_do_not_go_together_are_rejected(flag, settings, named):
    with raises("conflict", flag, *named):
        TrainConfig(**settings)


def test_times_are_hours_minutes_seconds_and_what_is_none_is_rejected():
    times = {"1.5h": 5400, "30s": 30, "45": 45, "0.5h": 1800, 90: 90}
    assert {text: TrainConfig(time=text).seconds for text in times} == times
    for text in ("", "0", "6 days", "-3m", "1h30m", "1h30", "30m1h", "nan", -5, True):
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

    curve = [{"batch": b, "valid_reward": r} for b, r in ((2, 0.2), (4, 0.5), (6, 0.3))]
    rewarded = EarlyStop(patience=1, curve=curve)
    assert rewarded.reason() == "no higher validation reward in a validation"
    assert rewarded.add(8, StoredScore(0.6, REWARD)) and rewarded.reason() is None


def test_an_earlier_batch_is_better_by_losses_of_any_sign():
    for losses, batch in (
        ([2.0, 1.0, 1.5], 2),
        ([0.0, 0.5], 1),
        ([-0.1, -0.336], None),  # the best is the last: nothing to advise
        ([-0.5, -0.2], 1),
        ([None, 1.0], None),
    ):
        note = better_earlier([{"batch": i, "valid_loss": x} for i, x in enumerate(losses, 1)])
        assert (note is None) if batch is None else (f"at batch {batch} " in note)


ANSWERS = [{"prompt": f"Item {i} is", "completion": ("red", "green")[i % 2]} for i in range(12)]


def test_the_number_that_is_named_decides(train, monkeypatch):
    shares = iter((0.25, 0.5, 0.5, 0.25, 1.0))
    monkeypatch.setattr(
        Exam, "validated", lambda exam, score: AnsweredScore(score, exam.metric.name, next(shares))
    )
    write_rows(Path("d"), train=ANSWERS, valid=ANSWERS[:2], test=ANSWERS[:1])

    run = train(iters=9, metric="none", patience=2, best="valid_exact", **ONE)
    assert run.pack.manifest["end"] == {
        "stopped": "no higher validation exact in 2 validations",
        "best_batch": 2,  # the first of those that are equal
        "best_valid_exact": 0.5,
    }

    measured = [line for line in run.curve if "valid_exact" in line]
    assert all({"valid_loss", "valid_ppl", "valid_accuracy"} <= set(line) for line in measured)
    # the checkpoint of the best weights stays, beside the last one
    assert [f.name for f in RunFolder(run.run).checkpoints()] == ["step-000002", "step-000004"]

    resumed = EarlyStop(patience=2, best_by="valid_exact", curve=run.curve)
    assert resumed.batch == 2 and resumed.reason() == run.pack.manifest["end"]["stopped"]


def test_a_score_is_compared_by_its_entries():
    assert StoredScore(1.0, "worst_loss").is_better_than(StoredScore(2.0, "worst_loss"))
    score = PerplexityScore(ppl=4.0, ppl_se=None, accuracy=0.5, nll=1.4, rows=2, targets=8)
    better = PerplexityScore(ppl=3.0, ppl_se=None, accuracy=0.4, nll=1.1, rows=2, targets=8)
    assert better.by(None).is_better_than(score.by(None))
    assert better.by("valid_ppl").is_better_than(score.by("valid_ppl"))
    assert score.by("valid_accuracy").is_better_than(better.by("valid_accuracy"))
    answered = AnsweredScore(score, "exact", 0.75)
    assert answered.by("valid_exact").entries == {"valid_exact": 0.75}
    assert answered.value == 1.4 and answered.text.endswith(", exact 75.0%")
    with raises("conflict", "best", "valid_exact", "valid_accuracy"):
        score.by("valid_exact")


def test_a_number_that_is_not_measured_is_rejected_before_a_base_is_read(here, nothing_is_loaded):
    write_rows(here / "no-valid", train=CHATS, test=CHATS[:1])
    write_rows(here / "answers", train=ANSWERS, valid=ANSWERS)
    for data, settings, *named in (
        ("no-valid", {"load_best": True}, "load_best", "valid"),
        ("no-valid", {"patience": 2}, "patience", "valid"),
        ("answers", {"best": "accuracy"}, "best", "--best accuracy", "valid_exact"),
        ("answers", {"best": "valid_exact", "task": "dpo"}, "best", "valid_reward_margin"),
        (*("answers", {"best": "valid_loss", "task": "grpo", "reward": "exact"}), "best", "reward"),
    ):
        with raises("conflict", *named):
            train_pack("tiny", data, LORA, {"load_best": "best" in settings, **settings}, "p")


def test_answers_that_the_examples_do_not_have_are_rejected(train):
    write_rows(Path("d"), train=[{"text": "a b"}] * 4, valid=[{"text": "c d"}] * 2)
    with raises("conflict", "best", "--best valid_exact", "no wanted answers"):
        train(load_best=True, best="valid_exact")
