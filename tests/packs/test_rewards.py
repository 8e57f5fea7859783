"""A reward model as a pack: what it scores, that it leaves the base alone, and what it refuses."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from mlx_packs import Pack, PackError, evaluate, load_base
from mlx_packs.cli.main import packs
from mlx_packs.packs.facts import card_command, model_card
from mlx_packs.packs.making import attach_pack, check_fit
from mlx_packs.runtime import mx
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.errors import raises
from tests.helpers.packs import random_pack
from tests.helpers.preferences import preference
from tests.helpers.rows import write_rows

ROWS = [preference(i) for i in range(6)]
COMPLETIONS = [{"prompt": r["prompt"], "completion": r[s]} for r in ROWS for s in ("chosen", "rejected")]  # fmt: skip


def reward_pack(base, width: int = 64) -> Pack:
    pack = random_pack(base)
    weight = 0.1 * mx.random.normal((1, width), key=mx.random.key(5))
    pack.tensors |= {"score.weight": weight}
    pack.manifest["adapters"]["replaced"] = [{"name": "score.weight", "shape": [1, width]}]
    return pack


def scores_of(base, pack, **options) -> np.ndarray:
    return base.rewards(COMPLETIONS, pack, matmul_path="dense", **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def base(folder):
    return load_base(folder)


@pytest.fixture(scope="module")
def saved(base, tmp_path_factory):
    return reward_pack(base).save(tmp_path_factory.mktemp("packs") / "reward")


def test_a_completion_longer_than_in_training_has_no_reward(base):
    pack = reward_pack(base)
    pack.manifest["recipe"] = {"max_seq_length": 64}
    rows = [COMPLETIONS[0], {**COMPLETIONS[0], "completion": "filler " * 100}]
    assert len(base.rewards(rows[:1], pack)) == 1
    with raises("data", "completions", "tokens", "fewer than 64"):
        base.rewards(rows, pack)


def test_a_saved_pack_gives_the_same_scores(base, saved):
    scores = scores_of(base, reward_pack(base))
    assert scores.shape == (12,) and scores.dtype == np.float32 and scores.std() > 0.01
    assert np.array_equal(scores_of(base, Pack.open(saved.path)), scores)
    np.testing.assert_allclose(scores_of(base, saved.path, batch_size=5), scores, atol=1e-4)
    roles = {"prompt": "user", "completion": "assistant"}
    messages = [
        {key: [{"role": role, "content": row[key]}] for key, role in roles.items()}
        for row in COMPLETIONS
    ]
    as_messages = base.rewards(messages, saved, matmul_path="dense")
    np.testing.assert_allclose(as_messages, scores, atol=1e-4)


def test_the_head_is_beside_the_base_and_goes_with_the_pack(base, saved):
    modules = dict(base.model.named_modules())
    attached = attach_pack(base, saved)
    assert np.array_equal(attached.score.weight, saved.load_tensors()["score.weight"])
    assert "score" not in dict(base.model.named_modules())
    attached.detach()

    with base.applied(random_pack(base, seed=2)):
        active = base.active.pack
        base.rewards(COMPLETIONS[:1], saved)
        assert base.active.pack is active
    assert dict(base.model.named_modules()) == modules


def test_what_cannot_be_scored_is_named(base, saved):
    with raises("unsupported"):
        scores_of(base, random_pack(base))
    for completions in ([], "tiny", [{"prompt": "x"}]):
        with pytest.raises(PackError):
            base.rewards(completions, saved)


def test_a_head_of_another_width_does_not_fit(base, folder, saved, tmp_path):
    pack = reward_pack(base, width=128)
    with raises("mismatch", None, "score.weight", "[1, 128]", "[1, 64]"):
        attach_pack(base, pack)
    with raises("mismatch", None, "score.weight", "[1, 128]", "[1, 64]"):
        check_fit(pack.save(tmp_path / "p"), str(folder))
    assert "score" not in dict(base.model.named_modules())
    assert check_fit(Pack.open(saved.path), str(folder))["full_tensors"] == 1


def test_held_out_accuracy_and_margin_are_those_of_the_scores(base, saved, tmp_path):
    data = write_rows(tmp_path / "d", train=ROWS[:1], valid=ROWS)
    report = SimpleNamespace(**evaluate(base, saved, data, matmul_path="dense").to_json())
    pairs = scores_of(base, saved).reshape(-1, 2)
    gains = pairs[:, 0] - pairs[:, 1]
    assert report.rows == 6 and report.dropped == 0
    assert report.pack["preference_accuracy"] == pytest.approx((gains > 0).mean())
    assert report.pack["reward_margin"] == pytest.approx(gains.mean(), abs=1e-4)
    assert report.loss == pytest.approx(np.log1p(np.exp(-gains)).mean(), abs=1e-4)
    assert report.pack["reward_margin_se"] == pytest.approx(gains.std(ddof=1) / 6**0.5, abs=1e-4)
    for setting in ({"metric": "exact"}, {"loss_on": "all"}):
        with raises("conflict", next(iter(setting))):
            evaluate(base, saved, data, **setting)


def test_a_card_names_the_head_and_how_to_use_it(saved):
    card = model_card(saved.manifest, "reward")
    assert "reward model" in card and "pipeline_tag: text-classification" in card
    assert card_command(saved.manifest).startswith("packs eval .")
    run = CliRunner().invoke(packs, ["inspect", str(saved.path)])
    assert run.exit_code == 0 and "score.weight" in run.output
