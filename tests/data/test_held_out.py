"""The examples that a run is evaluated on by default."""

import json

import numpy as np
import pytest

from mlx_packs import evaluate, load_base, train_pack
from mlx_packs.tasks.phases import HELD_OUT_SHARE, sample
from mlx_packs.training.fit import Fit
from tests.helpers.encoders import all_pairs
from tests.helpers.preferences import preference
from tests.helpers.rows import write_rows
from tests.helpers.runs import LORA


def test_a_sample_takes_a_share_of_the_run_but_no_more_than_gives_two_digits():
    lengths = np.full(3080, 50)
    assert len(sample(lengths, 120 * 50)) == 32
    assert len(sample(lengths, 4000 * 50)) == HELD_OUT_SHARE * 4000
    assert len(sample(lengths, 10**9)) == 400


def test_a_sample_of_few_or_long_examples():
    assert sorted(sample(np.full(20, 50), 0)) == list(range(20))
    assert len(sample(np.full(100, 2048), 2048)) == 2
    assert len(sample(np.full(1, 9000), 0)) == 1


def test_a_longer_run_is_evaluated_on_more_after_the_same_examples():
    lengths = np.random.default_rng(1).integers(10, 90, 3080)
    short, long = sample(lengths, 40_000), sample(lengths, 200_000)
    assert len(short) < len(long)
    np.testing.assert_array_equal(short, long[: len(short)])
    assert len(set(long.tolist())) == len(long)
    assert not np.array_equal(np.sort(long), np.arange(len(long)))


@pytest.fixture
def many_rows(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    for split, count in (("train", 60), ("valid", 4), ("test", 40)):
        rows = [{"prompt": f"Say {i}.", "completion": f"It is {i}."} for i in range(count)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _settings(**changes):
    settings = {"iters": 2, "batch_size": 2, "matmul_path": "dense", "val_batches": 0}
    return {**settings, "test_batches": None, **changes}


def _run(data, out, **settings):
    lora = None if settings.get("method") == "full" else LORA
    return train_pack("tiny", data=str(data), lora=lora, train=_settings(**settings), out=out)


@pytest.mark.slow
def test_a_run_evaluates_a_sample_says_so_and_resumes_with_it(many_rows, tmp_path):
    """Before and after are of the same examples, whose number and that of all are recorded."""
    run = _run(many_rows, tmp_path / "p", metric="exact")
    held_out, result = run.report["held_out"], run.pack.manifest["eval"]
    assert (held_out["rows"], held_out["available"]) == (32, 40)
    assert (result["rows"], result["available"]) == (32, 40)
    assert result["ppl_before_se"] > 0 < result["ppl_after_se"]
    assert result["answers"]["rows"] == 32

    resumed = train_pack(
        "tiny",
        data=str(many_rows),
        lora=LORA,
        train=_settings(metric="exact"),
        out=tmp_path / "p",
        resume=True,
    )
    again = resumed.pack.manifest["eval"]
    assert again["rows"] == 32
    assert again["ppl_before"] == result["ppl_before"]
    assert again["ppl_after"] == result["ppl_after"]


def test_all_rows_are_evaluated_on_request(many_rows, tmp_path):
    assert _run(many_rows, tmp_path / "p", test_batches=-1).report["held_out"]["rows"] == 40
    assert _run(many_rows, tmp_path / "q", test_batches=3).report["held_out"]["rows"] == 6


def test_a_run_that_evaluated_all_rows_still_does_when_resumed(many_rows, tmp_path):
    """Runs of versions before the sample have -1, their default, in the recipe."""
    _run(many_rows, tmp_path / "p", test_batches=-1)
    out, train = tmp_path / "p", _settings()
    resumed = train_pack("tiny", data=str(many_rows), lora=LORA, train=train, out=out, resume=True)
    assert resumed.report["held_out"]["rows"] == 40


def test_the_base_is_scored_as_before_whenever_it_is_scored(many_rows, tmp_path):
    """Scored after the training, the base's perplexity is the same as without any training."""
    run = _run(many_rows, tmp_path / "p", test_batches=-1)
    report = evaluate(load_base("tiny"), data=str(many_rows), batch_size=2, matmul_path="dense")
    assert run.report["ppl_before"] == pytest.approx(report.base.ppl, rel=1e-5)


@pytest.fixture
def scored_first(monkeypatch):
    """Runs score the base before their training too; each gives these scores and itself."""
    runs, train = [], Fit.train

    def train_after_scoring(fit: Fit, before=None) -> None:
        assert before is None
        with fit.trainable.disabled():
            runs.append((fit.score(), fit))
        train(fit, before)

    monkeypatch.setattr(Fit, "train", train_after_scoring)
    return runs


def _check_scores(runs: list) -> None:
    """Check that the base has the same scores before and after its training, and the pack others."""
    ((before, fit),) = runs
    assert fit.scores[0] == before
    assert fit.scores[-1] != before


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "lora"},
        {"method": "dora"},
        pytest.param({"method": "pissa"}, marks=pytest.mark.slow),
        pytest.param({"method": "olora"}, marks=pytest.mark.slow),
        pytest.param({"method": "full"}, marks=pytest.mark.slow),
        {"neftune_noise_alpha": 5.0},
        {"matmul_path": "quantized"},
    ],
    ids=lambda settings: next(iter(settings.values())),
)
def test_training_leaves_the_scores_of_the_base(many_rows, tmp_path, scored_first, settings):
    _run(many_rows, tmp_path / "p", learning_rate=1e-2, test_batches=4, **settings)
    _check_scores(scored_first)


@pytest.mark.parametrize("task", ["dpo", "orpo", "reward"])
def test_training_on_preferences_leaves_the_scores_of_the_base(tmp_path, scored_first, task):
    rows = [preference(i) for i in range(12)]
    data = write_rows(tmp_path / "d", train=rows[:8], valid=rows[8:])
    _run(data, tmp_path / "p", task=task, learning_rate=1e-2, iters=3)
    _check_scores(scored_first)


def test_training_an_encoder_leaves_the_scores_of_the_base(encoder, tmp_path, scored_first):
    rows = all_pairs()[:36]  # of words that the encoder knows: other texts are all alike to it
    data = write_rows(tmp_path / "d", train=rows[:24], valid=rows[24:])
    train = {"task": "embedding", "iters": 3, "batch_size": 4, "learning_rate": 1e-2}
    train_pack(str(encoder), data=str(data), train=train, out=tmp_path / "p")
    _check_scores(scored_first)
