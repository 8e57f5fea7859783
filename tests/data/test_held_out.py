"""The examples that a run is evaluated on by default."""

import numpy as np
import pytest

from mlx_packs import train_pack
from mlx_packs.tasks import phases
from mlx_packs.tasks.phases import HELD_OUT_SHARE, sample
from mlx_packs.training.fit import Fit
from tests.helpers.preferences import preference
from tests.helpers.rows import write_rows
from tests.helpers.runs import LORA
from tests.helpers.variants import slow_except


def test_a_sample_takes_a_share_of_the_run_but_no_more_than_gives_two_digits():
    lengths = np.full(3080, 50)
    assert len(sample(lengths, 120 * 50)) == 32
    assert len(sample(lengths, 4000 * 50)) == HELD_OUT_SHARE * 4000
    assert len(sample(lengths, 10**9)) == 400
    assert sorted(sample(lengths[:20], 0)) == list(range(20))
    assert len(sample(np.full(100, 2048), 2048)) == 2
    assert len(sample(np.full(1, 9000), 0)) == 1
    short, long = sample(lengths, 40_000).tolist(), sample(lengths, 200_000).tolist()
    assert short == long[: len(short)] and len(short) < len(set(long)) == len(long)
    assert sorted(long) != list(range(len(long)))


def _run(data, out, *, resume=False, **settings):
    train = {"iters": 1, "batch_size": 2, "matmul_path": "dense", "val_batches": 0}
    train |= {"warmup_steps": 0, "test_batches": None, "learning_rate": 1e-2}  # not the recipe's
    return train_pack("tiny", str(data), LORA, train | settings, out, resume=resume)


@pytest.fixture
def scored_first(monkeypatch):
    """Runs score the base before their training too; the base must have these scores after it."""
    fits, train = [], Fit.train

    def train_after_scoring(fit: Fit) -> None:
        with fit.trainable.disabled():
            fits.append((fit.score(), fit))
        train(fit)

    monkeypatch.setattr(Fit, "train", train_after_scoring)
    yield
    before, fit = fits[0]
    assert fit.scores[0] == before != fit.scores[-1]


@pytest.mark.slow
@pytest.mark.usefixtures("scored_first")
def test_a_run_evaluates_a_sample_says_so_and_resumes_with_it(tmp_path, monkeypatch):
    """Before and after are of the same examples, whose number and that of all are recorded."""
    monkeypatch.setattr(phases, "LEAST_HELD_OUT", 4)  # of six
    rows = [{"prompt": f"Say {i}.", "completion": f"It is {i}."} for i in range(9)]
    data = write_rows(tmp_path / "rows", train=rows, valid=rows[:4], test=rows[:6])
    noisy = {"neftune_noise_alpha": 5.0}
    run = _run(data, tmp_path / "p", **noisy)
    result = run.pack.manifest["eval"]
    for counts in (run.report["held_out"], result):
        assert (counts["rows"], counts["available"]) == (4, 6)
    assert result["ppl_before_se"] > 0 < result["ppl_after_se"]

    again = _run(data, tmp_path / "p", **noisy, resume=True).pack.manifest["eval"]
    assert [again[key] == result[key] for key in ("rows", "ppl_before", "ppl_after")] == [True] * 3


@pytest.mark.usefixtures("scored_first")
@pytest.mark.parametrize("task", slow_except(["dpo", "reward"], "reward"))
def test_training_on_preferences_leaves_the_scores_of_the_base(tmp_path, task):
    rows = [preference(i) for i in range(8)]
    data = write_rows(tmp_path / "d", train=rows[:6], valid=rows[6:])
    _run(data, tmp_path / "p", task=task)
