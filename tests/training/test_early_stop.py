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
from mlx_packs.training.update_guard import UpdateGuard
from mlx_packs.training.watch import EarlyStop, better_earlier
from tests.helpers.errors import raises
from tests.helpers.rows import CHATS, write_rows
from tests.helpers.runs import LORA, Lines

SETTINGS = {
    **{"batch_size": 2, "max_seq_length": 64, "matmul_path": "dense", "save_every": 50},
    **{"steps_per_eval": 1, "lr_schedule": "constant", "keep_last": 1, "test_batches": 1},
}
LOSSES = (3.0, 2.0, 2.5, 2.4, 2.6, 2.7)  # of validations after batches 1 to 6
BEST = 2


@pytest.fixture
def train(small, tmp_path, monkeypatch):
    """Train on a few rows, with `LOSSES`; the run and its lines on the terminal."""
    data = write_rows(tmp_path / "d", train=CHATS, valid=CHATS[:1])
    monkeypatch.setattr(
        UpdateGuard, "validate", lambda guard, _: StoredScore(LOSSES[guard._state.batches - 1])
    )

    def run(out: str, iters: int, resume: bool = False, **settings):
        config, lines = TrainConfig(iters=iters, **{**SETTINGS, **settings}), Lines()
        result = train_pack(small, data, LORA, config, tmp_path / out, resume=resume, display=lines)
        return result, lines.lines

    return run


def adapters(result) -> str:
    return sha256(result.pack.path / ADAPTERS)


def test_the_pack_is_the_best_step_and_patience_ends_it(train):
    result, lines = train("p", iters=6, patience=2)
    assert result.report["batches"] == BEST + 2 and result.report["best_batch"] == BEST
    assert result.pack.manifest["end"] == {
        "stopped": "no lower validation loss in 2 validations",
        "best_batch": BEST,
        "best_valid_loss": LOSSES[BEST - 1],
    }
    assert any(line.startswith(f"best batch {BEST}: ") for line in lines)
    until, _ = train("q", iters=BEST)
    assert adapters(until) == adapters(result)
    again, _ = train("p", iters=6, patience=2, resume=True)
    assert again.report["batches"] == BEST + 2 and adapters(again) == adapters(result)


def test_a_better_earlier_batch_is_said_and_a_finished_run_can_take_it(train):
    plain, lines = train("p", iters=5, save_every=1, keep_last=-1)
    (note,) = [line for line in lines if line.startswith("note") and "--load-best" in line]
    assert (
        f"at batch {BEST} " in note and "at batch 4:" in note and "end" not in plain.pack.manifest
    )
    resumed, _ = train("p", iters=5, save_every=1, keep_last=-1, load_best=True, resume=True)
    assert resumed.report["best_batch"] == BEST


def test_resumed_it_takes_what_an_unbroken_run_takes(train):
    train("p", iters=3, load_best=True)
    resumed, _ = train("p", iters=5, load_best=True, resume=True)
    uninterrupted, _ = train("q", iters=5, load_best=True)
    assert resumed.pack.manifest["end"] == uninterrupted.pack.manifest["end"]
    assert adapters(resumed) == adapters(uninterrupted)


def test_the_time_that_a_run_was_given_ends_it_with_a_pack(train, monkeypatch):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(watch, "monotonic", lambda: next(clock))
    result, lines = train("p", iters=6, val_batches=0, time="25s")
    batches = result.report["batches"]
    assert 1 < batches < 6 and result.report["stopped"] == "it trained for 0:25 (--time)"
    assert any(line.startswith("stop batch") for line in lines)
    assert read_identity(result.run)["recipe"]["time"] == "25s"
    more, _ = train("p", iters=batches + 1, val_batches=0, resume=True)
    assert more.report["batches"] == batches + 1


@pytest.mark.parametrize("settings", [{"load_best": True}, {"patience": 2}])
def test_without_validation_nothing_is_loaded(tmp_path, nothing_is_loaded, settings):
    (flag,) = settings
    with raises("conflict", flag):
        TrainConfig(val_batches=0, **settings)
    data = write_rows(tmp_path / "d", train=CHATS, test=CHATS[:1])
    with raises("conflict", flag, "valid"):
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
    ("text", "seconds"), [("1h30m", 5400), ("30s", 30), ("45", 45), ("0.5h", 1800), (90, 90)]
)
def test_times_are_hours_minutes_seconds(text, seconds):
    assert seconds_of(text) == seconds
    assert TrainConfig(time=text).seconds == seconds


@pytest.mark.parametrize(
    "text", ["", "0", "6 days", "-3m", "1h2x", "1h30", "30m1h", "nan", -5, True]
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


ANSWERS = [{"prompt": f"Item {i} is", "completion": ("red", "green")[i % 2]} for i in range(12)]


def test_the_number_that_is_named_decides(small, tmp_path, monkeypatch):
    shares = iter((0.25, 0.5, 0.5, 0.25, 1.0))
    monkeypatch.setattr(
        Exam, "validated", lambda exam, score: AnsweredScore(score, exam.metric, next(shares))
    )
    data = write_rows(tmp_path / "d", train=ANSWERS, valid=ANSWERS[:2], test=ANSWERS[:1])
    named = {"metric": "none", "patience": 2, "best": "valid_exact"}
    config = TrainConfig(iters=9, **SETTINGS, **named)
    result = train_pack(small, data, LORA, config, tmp_path / "p")
    assert result.pack.manifest["end"] == {
        "stopped": "no higher validation exact in 2 validations",
        "best_batch": 2,  # the first of those that are equal
        "best_valid_exact": 0.5,
    }
    measured = [line for line in result.curve if "valid_exact" in line]
    assert all({"valid_loss", "valid_ppl", "valid_accuracy"} <= set(line) for line in measured)
    # the checkpoint of the best weights stays, beside the last one
    assert [f.name for f in checkpoints(result.run)] == ["step-000002", "step-000004"]
    resumed = EarlyStop(patience=2, best_by="valid_exact", curve=result.curve)
    assert resumed.batch == 2 and resumed.reason() == result.pack.manifest["end"]["stopped"]


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
    tmp_path, nothing_is_loaded, settings, named
):
    data = write_rows(tmp_path / "d", train=ANSWERS, valid=ANSWERS)
    with raises("conflict", "best", *named):
        train_pack("tiny", data, LORA, TrainConfig(load_best=True, **settings), tmp_path / "p")


def test_lower_is_better_of_losses_and_perplexities_alone():
    for measure in ("loss", "ppl", "worst_loss"):
        assert StoredScore(1.0, measure).is_better_than(StoredScore(2.0, measure))
    for measure in ("reward", "accuracy"):
        assert StoredScore(2.0, measure).is_better_than(StoredScore(1.0, measure))


def test_answers_that_the_examples_do_not_have_are_rejected(small, tmp_path):
    data = write_rows(tmp_path / "d", train=[{"text": "a b"}] * 4, valid=[{"text": "c d"}] * 2)
    config = TrainConfig(iters=2, load_best=True, best="valid_exact")
    with raises("conflict", "best", "--best valid_exact", "no wanted answers"):
        train_pack(small, data, LORA, config, tmp_path / "p")
