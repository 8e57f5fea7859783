"""Batched generation: continuous, and the text of each as if it were generated alone."""

from types import SimpleNamespace

import pytest
from mlx_lm.models import cache

from mlx_packs.inference import generate
from mlx_packs.inference.generate import chat_prompt, complete, complete_batch, stream_batch
from tests.helpers.errors import raises
from tests.helpers.models import base_of
from tests.helpers.packs import random_pack

PROMPTS = (
    "In the beginning",
    "The Lord said unto him that he should go up to the mountain and",
    "And",
    "Now these are the generations of the sons of Noah, Shem, Ham",
    "def read(self, size=-1):",
)


@pytest.mark.slow
def test_complete_batch_gives_the_text_of_each_prompt_alone(small_tiny):
    """Five ragged prompts, completions of four lengths; two at a time, each slot is used again."""
    prompts = [small_tiny.tokenizer.encode(text) for text in PROMPTS]
    lengths = [6, 3, 5, 6, 2]
    plain = complete_batch(small_tiny, prompts, lengths, 2)
    with small_tiny.applied(random_pack(small_tiny, 5, 4, ())):
        alone = [complete(small_tiny, p, n) for p, n in zip(prompts, lengths, strict=True)]
        assert complete_batch(small_tiny, prompts, lengths, 2) == alone
    assert len(set(alone)) > 2 and plain != alone


def test_stream_batch_rejects_empty_prompts_and_states_without_batches(small_tiny, monkeypatch):
    with raises("invalid", "prompts", "prompt"):
        list(stream_batch(small_tiny, [[1], []]))

    monkeypatch.setattr(cache, "make_prompt_cache", lambda model: [SimpleNamespace()])
    with raises("unsupported", None, "tiny", "SimpleNamespace"):
        list(stream_batch(small_tiny, [[1]]))


def test_messages_of_a_prompt_are_read_as_those_of_training(small_tiny):
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say red."}]
    parts = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Say red."}]},
    ]
    for raw in (plain, parts):
        assert small_tiny._prompt_tokens(raw, False, None) == chat_prompt(small_tiny, plain)
    with raises("invalid", "prompt", "'content'"):
        small_tiny.generate([{"role": "user"}])


def prompt_tokens_of(base, prompts, monkeypatch, **changes) -> tuple[list[list[int]], int]:
    """Greedy tokens of each prompt, and how many tokens of prompts the model has read."""
    read = []
    kind = type(base.model)
    call = kind.__call__

    def counted(self, tokens, *args, **kwargs):
        read.append(tokens.size)
        return call(self, tokens, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "__call__", counted)
        texts = [[] for _ in prompts]
        for i, token, _ in stream_batch(base, prompts, 6, 2, stop=False, **changes):
            texts[i].append(token)
    return texts, sum(read) - 6 * len(prompts)


SYSTEM = [(7 * i + 2) % 120 for i in range(40)]


@pytest.mark.parametrize(
    ("prompts", "read"),
    [
        # two tokens are left of the shortest, and two prompts at a time are padded
        ([[*SYSTEM, 5, 9], [*SYSTEM, 3], [*SYSTEM, 11, 2, 8]], 39 + 2 * 3 + 4),
        ([[*SYSTEM, 5, 9]] * 4, 41 + 4),  # all but the last token
        ([[*SYSTEM, 5], [7, 9, *SYSTEM], [*SYSTEM, 5], [7, 9, *SYSTEM]], 40 + 41 + 4),
        ([SYSTEM, [*SYSTEM, 3]], 38 + 2 * 3),
        ([[*SYSTEM[:15], 5], [*SYSTEM[:15], 3]], 32),
        ([[*SYSTEM, 5, 9]], 42),
    ],
)
def test_what_prompts_begin_with_is_read_once(prompts, read, monkeypatch):
    base = base_of("qwen3")
    base.tokenizer = SimpleNamespace(eos_token_ids={0})
    expected, whole = prompt_tokens_of(base, prompts, monkeypatch, shares=False)
    texts, count = prompt_tokens_of(base, prompts, monkeypatch)
    assert texts == expected
    assert count == read <= whole

    monkeypatch.setattr(generate, "_READ_AT_ONCE", 7)  # less than a prompt
    assert prompt_tokens_of(base, prompts, monkeypatch)[0] == expected
