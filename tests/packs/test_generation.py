"""Text in pieces and for many prompts; packs that are attached and detached."""

import pytest

import mlx_packs as mp
from mlx_packs.runtime import mx
from tests.helpers.errors import raises
from tests.helpers.packs import random_pack

PROMPT = "Remind me to call the bank on Friday."
PROMPTS = [PROMPT, "Hi", [{"role": "user", "content": "What is due on Monday?"}]]


@pytest.fixture(scope="module")
def pack(shared_tiny):
    return random_pack(shared_tiny, 0)


def logits(base) -> mx.array:
    values = base.model(mx.array([[1, 2, 3, 4]]))
    mx.eval(values)
    return values


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_k": 20, "seed": 3}])
def test_the_pieces_of_a_stream_are_the_text(shared_tiny, pack, sampling):
    sampling = {"max_tokens": 12, **sampling}
    text = shared_tiny.generate(PROMPT, pack, **sampling)
    pieces = list(shared_tiny.stream(PROMPT, pack, **sampling))
    assert len(pieces) > 3 and "".join(pieces) == text
    assert "".join(mp.stream_generate(shared_tiny, PROMPT, pack, **sampling)) == text
    assert text != shared_tiny.generate(PROMPT, **sampling)
    assert shared_tiny.active is None


def test_a_stream_that_is_left_early_detaches_its_pack(shared_tiny, pack):
    stream = shared_tiny.stream(PROMPT, pack, max_tokens=12)
    assert shared_tiny.active is None  # until the first piece
    next(stream)
    assert shared_tiny.active.pack is pack
    stream.close()
    assert shared_tiny.active is None


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_a_batch_has_the_texts_of_single_prompts(shared_tiny, pack, batch_size):
    texts = [shared_tiny.generate(prompt, pack, max_tokens=8) for prompt in PROMPTS]
    options = {"max_tokens": 8, "batch_size": batch_size}
    assert shared_tiny.generate_batch(PROMPTS, pack, **options) == texts
    assert mp.batch_generate(shared_tiny, PROMPTS, pack, **options) == texts
    assert shared_tiny.active is None


def test_a_batch_is_sampled_by_its_seed(shared_tiny):
    draw = [
        shared_tiny.generate_batch(PROMPTS, max_tokens=8, temperature=1.0, seed=seed)
        for seed in (1, 1, 2)
    ]
    assert draw[0] == draw[1] != draw[2]
    assert draw[0] != shared_tiny.generate_batch(PROMPTS, max_tokens=8)


def test_a_batch_of_raw_texts_and_an_empty_one(shared_tiny):
    raw = shared_tiny.generate("The meeting", raw=True, max_tokens=5)
    assert shared_tiny.generate_batch(["The meeting"], raw=True, max_tokens=5) == [raw]
    assert shared_tiny.generate_batch([]) == []


def test_faults_show_before_anything_is_generated(shared_tiny):
    with raises("unknown", "max_tokenz", "max_tokens"):
        shared_tiny.stream(PROMPT, max_tokenz=3)
    with raises("unsupported", "repetition_penalty"):
        shared_tiny.generate_batch(PROMPTS, repetition_penalty=1.2)
    with raises("invalid", "prompts"):
        shared_tiny.generate_batch(PROMPT)
    with raises("invalid", "batch_size"):
        shared_tiny.generate_batch(PROMPTS, batch_size=0)
    with raises("conflict", "raw"):
        shared_tiny.stream(PROMPTS[2], raw=True)


def test_attach_and_detach_equal_applied(shared_tiny, pack):
    plain = logits(shared_tiny)
    with shared_tiny.applied(pack):
        applied = logits(shared_tiny)

    assert shared_tiny.attach(pack) is shared_tiny
    assert mx.array_equal(logits(shared_tiny), applied)
    assert shared_tiny.active.pack is pack

    shared_tiny.detach()
    shared_tiny.detach()
    assert shared_tiny.active is None
    assert mx.array_equal(logits(shared_tiny), plain)
