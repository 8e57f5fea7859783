"""Runs on rewards: the model generates, learns from the better completions, and can be resumed."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from mlx_packs import LoRAConfig, Pack, TrainConfig, train_pack
from mlx_packs.config.data import DataConfig
from mlx_packs.config.functions import load_function
from mlx_packs.data.formats import Row
from mlx_packs.data.prompts import encode_prompts
from mlx_packs.objectives.grpo import advantages, policy_loss
from mlx_packs.runtime import mx
from mlx_packs.tasks.grpo import GRPOTask, Reward
from tests.helpers.bases import small_base
from tests.helpers.errors import raises
from tests.helpers.preferences import preference
from tests.helpers.rows import write_rows
from tests.helpers.tasks import SHORT

SETTINGS = SHORT | {"task": "grpo", "batch_size": 2, "num_generations": 4, "max_seq_length": 64}
SETTINGS |= {"max_completion_length": 12, "learning_rate": 2e-3, "val_batches": 0, "beta": 0.0}
LORA = LoRAConfig(rank=4)


def shorter(completions, **_):
    """More for fewer characters."""
    return [-len(text) / 20 for text in completions]


PREFERENCES = [preference(i) for i in range(12)]
PROMPTS = [{"prompt": r["prompt"], "completion": r["chosen"], "n": 3} for r in PREFERENCES]
DATA = {"train": PROMPTS[:8], "valid": PROMPTS[8:]}


def settings(**changes) -> TrainConfig:
    return TrainConfig(**(SETTINGS | {"iters": 4} | changes))


def test_advantages_and_losses_are_those_of_the_paper():
    rewards = np.array([[1.0, 2.0, 4.0], [3.0, 3.0, 3.0]], np.float32)
    gains = advantages(rewards)
    expected = (rewards[0] - rewards[0].mean()) / (rewards[0].std(ddof=1) + 1e-4)
    np.testing.assert_allclose(gains[0], expected, rtol=1e-5)
    assert gains[1].tolist() == [0, 0, 0]

    partly = advantages(np.array([[1, np.nan, 2, 4], [np.nan, 3, np.nan, np.nan]], np.float32))
    np.testing.assert_allclose(partly[0], [gains[0][0], 0, *gains[0][1:]], rtol=1e-5)
    assert partly[1].tolist() == [0, 0, 0, 0]

    log_probs, reference = mx.array([-1.0, -2.0, -3.0, -9.0]), mx.array([-1.5, -2.0, -2.0, 0.0])
    owners, of_two = mx.array([0, 0, 1, -1]), mx.array([2.0, -1.0])
    plain = policy_loss(log_probs, None, owners, of_two, 0.0)
    assert np.array(plain).tolist() == [-2.0, 1.0]

    kept = np.array(policy_loss(log_probs, reference, owners, of_two, 0.5))
    apart = np.exp([-0.5, 0, 1]) - np.array([-0.5, 0, 1]) - 1
    np.testing.assert_allclose(kept, [-2 + 0.5 * apart[:2].mean(), 1 + 0.5 * apart[2]], rtol=1e-5)

    gradient = mx.grad(lambda x: policy_loss(x, None, owners, of_two, 0.0).sum())(log_probs)
    assert np.array(gradient).tolist() == [-1.0, -1.0, 1.0, 0.0]


@pytest.mark.slow
def test_a_run_earns_more_reward(tmp_path):
    train = settings(iters=6, bias_correction=False)  # six updates are small with it
    run = train_pack(small_base(), DATA, LORA, train, tmp_path / "p", reward=shorter)
    report = run.report
    assert report["reward_after"] > report["reward_before"] + 0.1
    assert {"reward", "reward_std", "tokens_per_s"} <= set(run.curve[0])
    manifest = Pack.open(tmp_path / "p").manifest
    assert manifest["objective"] == {"task": "grpo", "reward": "shorter", "beta": 0.0}
    assert manifest["data"]["rows"] == {"train": 8, "valid": 4}


def test_a_reward_sees_the_columns_of_its_rows(tmp_path):
    calls = []

    def reward(prompts, completions, expected, n, **others):
        calls.append((prompts, completions, expected, n, others))
        return np.arange(len(completions), dtype=np.float32)

    few = settings(iters=1, max_completion_length=3)
    train_pack(small_base(), DATA, LORA, few, tmp_path / "p", reward=reward)
    prompts, completions, expected, n, others = calls[1]  # the first is of the held-out prompts
    assert len(prompts) == len(completions) == len(expected) == len(n) == 8
    assert prompts[0] == prompts[3] != prompts[4] and set(n) == {3}
    assert expected[0] == f"{prompts[0].split()[1]}." and set(others) == {"completion"}


TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say 2."}]
ROWS = [
    {"prompt": "Say 1.", "completion": "1."},
    {"prompt": TURNS, "completion": [{"role": "assistant", "content": "2."}]},
]


@pytest.fixture(scope="module")
def prompts(tokenizer):
    """A text and messages, each with its answer."""
    rows = [Row(f"f:{i + 1}", row) for i, row in enumerate(ROWS)]
    return encode_prompts(rows, tokenizer, DataConfig(), 64)


def test_a_completion_has_the_form_of_its_prompt(prompts):
    seen = []

    def reward(prompts, completions, **_):
        seen.extend(zip(prompts, completions, strict=True))
        return [0.0] * len(completions)

    Reward(reward, DataConfig())(prompts, [0, 1], ["a", "b"])
    assert seen == [("Say 1.", "a"), (TURNS, [{"role": "assistant", "content": "b"}])]
    partly = Reward(lambda **_: [None, 2], DataConfig())(prompts, [0, 1], ["a", "b"])
    assert np.isnan(partly[0]) and partly[1] == 2
    exact = Reward("exact", DataConfig())
    exact.check(prompts)
    assert exact(prompts, [0, 1, 1], ["1.", "2.", "3."]).tolist() == [1, 1, 0]


def test_a_metric_compares_answers_without_thoughts(small_tiny, prompts):
    """Functions see completions with their thoughts, as in TRL."""
    seen = []
    tokens = small_tiny.tokenizer.encode("A number.</think>1.")
    opened = replace(prompts, tokens=[[4092], [4092]])
    for reward in ("exact", lambda completions, **_: seen.extend(completions) or [0.0]):
        task = SimpleNamespace(base=small_tiny, reward=Reward(reward, DataConfig()))
        rewards = GRPOTask._rewards(task, opened, [0], [tokens])
        assert rewards.tolist() == [float(reward == "exact")]
    assert seen == ["A number.</think>1."]


@pytest.mark.parametrize(
    ("reward", "fault"),
    [
        (lambda **_: 1 / 0, "raised ZeroDivisionError: division by zero for the completions of"),
        (lambda **_: [1.0, float("nan")], "returned nan for a completion of f:2"),
        (lambda **_: ["x", "y"], "returned 'x' for a completion of f:1"),
        (lambda **_: [1.0], "returned 1 values, but must return a list of 2 finite numbers"),
        (lambda **_: None, "returned a NoneType, but must return a list of 2 finite numbers"),
    ],
)
def test_a_reward_that_is_none_is_named_in_one_line(prompts, reward, fault):
    with raises("data", "reward", fault) as error:
        Reward(reward, DataConfig())(prompts, [0, 1], ["a", "b"])
    assert "\n" not in error.value.message


@pytest.mark.parametrize(
    ("reward", "code", "fault"),
    [
        (None, "invalid", "--reward: --task grpo needs one"),
        (
            "best",
            "unknown",
            "--reward best: must be FILE.py:NAME, or one of exact, contains, json.",
        ),
        ("none.py:f", "not-found", "--reward none.py:f: none.py is no file."),
        ("r.py:g", "not-found", "--reward r.py:g: r.py has no function g."),
        ("broken.py:f", "unreadable", "broken.py cannot be executed (SyntaxError"),
    ],
)
def test_a_reward_that_is_not_there_is_named(here, reward, code, fault):
    (here / "r.py").write_text("def f(completions, **_):\n    return [0.0] * len(completions)\n")
    (here / "broken.py").write_text("def f(:\n")
    with raises(code, "reward", fault):
        train_pack(small_base(), DATA, LORA, settings(reward=reward), "p")
    assert load_function("reward", "r.py:f")(["a"]) == [0.0] and not (here / "p").exists()


def test_rows_that_give_no_prompt_or_answer_are_named(tmp_path):
    rows = [{"prompt": "Say red.", "answer": "red"}, {"prompt": "Say " * 80}]
    short = write_rows(tmp_path / "a", train=rows[:1] * 4, valid=rows[:1])
    with raises("data", "reward", "train.jsonl:1", "needs the expected completion in 'completion'"):
        train_pack(small_base(), short, LORA, settings(reward="exact"), tmp_path / "p")
    long = write_rows(tmp_path / "b", train=rows[:1] * 3 + rows[1:], valid=rows[:1])
    with raises("data", "max_seq_length", "train.jsonl:4", "leaves no room for a completion"):
        train_pack(small_base(), long, LORA, settings(), tmp_path / "p", reward=shorter)
    with raises("data", None, "train.jsonl:1", "--completion-feature answer"):
        train_pack(small_base(), short, LORA, TrainConfig(), tmp_path / "p")


def test_a_reward_of_no_completion_is_named(tmp_path):
    def reward(completions, **_):
        return [None] * len(completions)

    with raises("data", "reward", "returned None for all 4 completions of an evaluation"):
        train_pack(small_base(), DATA, LORA, settings(), tmp_path / "p", reward=reward)
