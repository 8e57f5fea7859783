"""Scores of completions: of their last tokens, whatever shares their batch or their sequence."""

import numpy as np
import pytest

from mlx_packs import LoRAConfig, TrainConfig
from mlx_packs.adapters.score_head import fresh_score_head
from mlx_packs.adapters.trainable import find_method
from mlx_packs.config.schema import DataConfig
from mlx_packs.data.encoding import EncodingOptions
from mlx_packs.data.formats import Row
from mlx_packs.data.labelled_batches import preference_set
from mlx_packs.data.preferences import encode_scored
from mlx_packs.data.sampler import GroupedSampler
from mlx_packs.evaluation.preferences import score_pairs
from mlx_packs.objectives.objective import arrays_of
from mlx_packs.objectives.reader import head_reader, hidden_states
from mlx_packs.objectives.reward_model import RewardModel, reward_losses
from mlx_packs.runtime import mx
from tests.helpers.bases import small_base
from tests.helpers.errors import raises
from tests.helpers.preferences import preference

OPTIONS = EncodingOptions(max_seq_length=96)


class Small:
    """The tiny base with a head, and an objective over eight pairs."""

    def __init__(self, length: int = 192) -> None:
        self.base = small_base()
        train = TrainConfig(task="reward", batch_size=4, max_seq_length=length)
        lora = LoRAConfig(rank=2, target_modules=("q_proj",))
        self.trainable = find_method("lora").attach(self.base, lora, train, "dense")

        rows = [Row(f"f:{i + 1}", preference(i)) for i in range(8)]
        self.examples = encode_scored(rows, self.base.tokenizer, DataConfig(), OPTIONS)
        self.sampler = GroupedSampler(self.examples.lengths, 8, length - 1, 1)

        self.score = fresh_score_head(self.base, 0)
        reader = head_reader(self.base.model, self.score, "small", "reward")
        self.states = reader.states
        self.objective = RewardModel(reader, 0.1)

        self.data = preference_set(self.examples, self.sampler, is_scored=True)

    def batches(self):
        return self.data.once()

    def sums(self, batches) -> np.ndarray:
        losses = [self.objective.loss(arrays_of(batch), batch.layout) for batch in batches]
        return np.array([[value.item() for value in pair] for pair in losses]).sum(axis=0)


def test_a_completion_is_scored_at_its_last_token():
    small = Small()
    batch = small.batches()[0]
    _, rewards = small.objective.outcome(arrays_of(batch), batch.layout)
    for example, (chosen, rejected) in zip(batch.examples[::2], np.array(rewards), strict=True):
        for side, reward in enumerate((chosen, rejected)):
            tokens = small.examples.items[example + side].tokens[:-1]  # the last one has no input
            state = small.states(mx.array(tokens)[None])[0, -1]
            assert reward == pytest.approx((small.score.weight[0] @ state).item(), abs=1e-4)


def test_the_head_is_that_of_the_seed_and_of_the_deviation_of_the_config():
    base = small_base(hidden_size=256, initializer_range=0.05)
    weight = fresh_score_head(base, 0).weight
    assert weight.shape == (1, 256) and weight.std().item() == pytest.approx(0.05, rel=0.2)
    assert mx.array_equal(weight, fresh_score_head(base, 0).weight)
    assert not mx.array_equal(weight, fresh_score_head(base, 1).weight)


def test_pieces_add_up_to_their_batch():
    small = Small()
    batch = small.batches()[0]
    pieces = small.data.collate.split(batch, 2)
    assert len(pieces) == 2
    np.testing.assert_allclose(small.sums(pieces), small.sums([batch]), rtol=1e-5)


def test_padding_rows_count_for_nothing():
    small = Small()
    order = np.arange(6)  # three pairs of four
    batch = small.data.collate(small.examples, order)
    whole = small.sums([batch])
    assert whole[1] == 3
    score = score_pairs(small.objective, [batch])
    assert score.rows == 3 and score.loss == pytest.approx(whole[0] / 3, rel=1e-5)


def test_losses_are_those_of_the_formula():
    rewards = mx.array([[1.0, -1.0], [0.5, 0.5], [-2.0, 1.0]])
    margins, sums = np.array([2.0, 0.0, -3.0]), np.array([0.0, 1.0, -1.0])
    plain = np.log1p(np.exp(-margins))
    np.testing.assert_allclose(reward_losses(rewards, 0.0), plain, rtol=1e-5)
    np.testing.assert_allclose(reward_losses(rewards, 0.5), plain + 0.5 * sums**2, rtol=1e-5)


def test_pairs_that_do_not_fit_are_dropped_and_not_cut(tokenizer):
    values = [preference(0), preference(1)]
    values[1]["rejected"] += " and on" * 40
    rows = [Row(f"f:{i + 1}", value) for i, value in enumerate(values)]
    examples = encode_scored(rows, tokenizer, DataConfig(), EncodingOptions(max_seq_length=48))
    assert (len(examples), examples.dropped, examples.cut) == (2, 1, 0)
    with raises("data", "max_seq_length", "f:2"):
        encode_scored(rows[1:], tokenizer, DataConfig(), EncodingOptions(max_seq_length=48))


def test_a_model_that_changes_its_logits_is_rejected(monkeypatch):
    base = small_base()
    monkeypatch.setattr(type(base.model), "__call__", lambda self, x, **_: 2 * self.model(x))
    with raises("unsupported", "task", "small"):
        hidden_states(base.model, "small", "reward")
