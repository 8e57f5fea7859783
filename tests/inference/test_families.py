"""A batch of prompts equals each alone, in every family: by mlx-lm's batches, or one at a time."""

from types import SimpleNamespace

import pytest
from mlx_lm.generate import generate_step

from mlx_packs.bases import supported
from mlx_packs.errors import warn_once
from mlx_packs.inference.generate import sample_batch, stream_batch
from mlx_packs.runtime import mx
from tests.helpers.families import ONE_BY_ONE, family_base
from tests.helpers.family_sweep import FAMILIES, REPRESENTATIVE, sweep

LONG = [(5 * i + 3) % 120 for i in range(37)]
PROMPTS = ([5, 9, 3], [7, 2], LONG)  # other lengths, and two rows: as many as KV heads
COMMON = [(7 * i + 2) % 120 for i in range(21)]
CASES = {
    "three": PROMPTS,
    "two": (LONG, [7, 2]),
    "shared": ([*COMMON, 5, 9], [*COMMON, 3], [*COMMON, *LONG]),  # a beginning that is read once
    "repeated": ([*COMMON, 5, 9], [*COMMON, *LONG], [*COMMON, *LONG], [*COMMON, 5, 9]),
}
# mlx-lm cannot batch the cache of llama4, and cannot generate with gear at all.
BATCHED = [f for f in FAMILIES if f not in ONE_BY_ONE | {"llama4"}]
ALONE = [f for f in FAMILIES if f in ONE_BY_ONE - {"gear"}]


def base_of(family: str):
    base = family_base(family)
    base.tokenizer = SimpleNamespace(eos_token_ids={0})
    base.config.setdefault("vocab_size", 128)  # phixtral's own config has another name for it
    return base


def swept(*cases: str, of_all: tuple[str, ...]) -> list:
    """Families with cases: the representative ones with each, the others with those ``of_all``."""
    return [
        pytest.param(*family.values, case, marks=family.marks)
        for family in sweep(BATCHED)
        for case in (cases if family.values[0] in REPRESENTATIVE else of_all)
    ]


@pytest.mark.parametrize(
    ("family", "case"),
    [
        *swept(*CASES, of_all=("three", "repeated")),
        *(pytest.param(*family.values, "three", marks=family.marks) for family in sweep(ALONE)),
    ],
)
def test_a_batch_equals_each_alone(family, case):
    base, prompts = base_of(family), CASES[case]
    texts = [[] for _ in prompts]
    for i, token, _ in stream_batch(base, prompts, 4, len(prompts), stop=False):
        texts[i].append(token)
    for prompt, tokens in zip(prompts, texts, strict=True):
        steps = generate_step(mx.array(prompt), base.model, max_tokens=4)
        assert tokens == [int(token) for token, _ in steps]


@pytest.mark.parametrize(("family", "case"), swept("shared", "repeated", of_all=("repeated",)))
def test_prompts_that_are_read_once_have_the_log_probabilities_of_each(family, case):
    """Of five tokens, the same ones, in the same order of samples."""
    base, steps = base_of(family), []
    base.tokenizer.eos_token_ids = set()
    for shares in (False, True):
        rows = []

        def sampler(log_probs, rows=rows):
            rows.append(log_probs)
            return mx.array([7] * len(log_probs))

        prompts = CASES[case]
        sample_batch(base, prompts, [5] * len(prompts), len(prompts), sampler, shares)
        steps.append(rows)

    whole, once = steps
    assert [rows.shape for rows in once] == [rows.shape for rows in whole]
    for one, other in zip(once, whole, strict=True):
        assert distance(one, other) < 1e-3


def distance(one: mx.array, other: mx.array) -> float:
    """The largest difference of log-probabilities, but where a token cannot be."""
    finite = mx.isfinite(one) & mx.isfinite(other)
    return mx.abs(mx.where(finite, one - other, 0)).max().item()


@pytest.mark.parametrize("family", ["gemma2", "mamba", "qwen3"])
def test_one_at_a_time_ends_at_the_end_and_samples(family, caplog):
    warn_once.cache_clear()
    base = base_of(family)
    first = sample_batch(base, PROMPTS, [5, 5, 5], 3)
    assert ("one at a time" in caplog.text) == (family in ONE_BY_ONE)
    base.tokenizer.eos_token_ids = {first[0][1]}
    again = sample_batch(base, PROMPTS, [5, 2, 5], 3)
    assert again[0] == first[0][: first[0].index(first[0][1]) + 1] and len(again[1]) <= 2
    base.tokenizer.eos_token_ids = set()
    assert (
        sample_batch(base, PROMPTS, [3] * 3, 3, lambda x: mx.array([7] * len(x))) == [[7] * 3] * 3
    )


def test_training_says_that_a_family_generates_as_another_model(caplog):
    warn_once.cache_clear()
    base = base_of("gemma3n")
    supported.check_trainable("mine", base.model)
    assert "mine" in caplog.text and "cache" in caplog.text
    caplog.clear()
    supported.check_trainable("mine", base_of("qwen3").model)
    assert not caplog.text
