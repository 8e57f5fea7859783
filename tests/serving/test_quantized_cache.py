"""Quantized keys and values of a batch are those that mlx-lm quantizes for each sequence alone."""

import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from mlx_packs.inference.generate import raw_prompt, text_of
from mlx_packs.runtime import mx
from mlx_packs.serving.generation import Generator
from mlx_packs.serving.quantized_cache import QuantizedSequence, quantized
from mlx_packs.serving.request import Limits
from tests.helpers.errors import raises
from tests.helpers.serving import texts_of


def drawn(seed: int, tokens: int) -> tuple[mx.array, mx.array]:
    keys = mx.random.split(mx.random.key(seed))
    return tuple(mx.random.normal((1, 2, tokens, 64), key=key) for key in keys)


def filled(seed: int, tokens: int, bits: int) -> QuantizedSequence:
    cache = QuantizedSequence(64, bits)
    if tokens:
        cache.update_and_fetch(*drawn(seed, tokens))
    return cache


def same(cache, expected: QuantizedKVCache) -> bool:
    pairs = zip(
        (*cache.keys_and_values()[0], *cache.keys_and_values()[1]),
        (*expected.keys_and_values()[0], *expected.keys_and_values()[1]),
        strict=True,
    )
    return cache.offset == expected.offset and all(mx.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("bits", [4, 8])
def test_sequences_pass_through_batches_unchanged(bits):
    lengths = (3, 300, 17)
    alone = [filled(i, n, bits) for i, n in enumerate(lengths)]
    batch = alone[0].merge([filled(i, n, bits) for i, n in enumerate(lengths)])

    other = filled(3, 5, bits).merge([filled(3, 5, bits)])
    alone.append(filled(3, 5, bits))
    batch.extend(other)

    added = [drawn(10 + i, 260) for i in range(4)]
    batch.update_and_fetch(*(mx.concatenate(parts) for parts in zip(*added, strict=True)))
    for cache, more in zip(alone, added, strict=True):
        cache.update_and_fetch(*more)
    assert batch.nbytes > 0
    assert all(same(batch.extract(i), cache) for i, cache in enumerate(alone))

    batch.filter([0, 2, 3])
    assert batch.left_padding.tolist() == [14, 0, 12]
    assert all(same(batch.extract(i), alone[k]) for i, k in enumerate((0, 2, 3)))


def test_prompts_padded_on_the_right_are_turned():
    batch = filled(0, 0, 8).merge([filled(0, 0, 8), filled(1, 0, 8)])
    assert batch.empty() and batch.nbytes == 0

    (ka, va), (kb, vb) = drawn(0, 4), drawn(1, 2)
    pad = mx.zeros((1, 2, 2, 64))
    batch.prepare(lengths=[4, 2], right_padding=[0, 2])
    batch.update_and_fetch(
        mx.concatenate([ka, mx.concatenate([kb, pad], axis=2)]),
        mx.concatenate([va, mx.concatenate([vb, pad], axis=2)]),
    )
    batch.finalize()
    assert same(batch.extract(0), filled(0, 4, 8)) and same(batch.extract(1), filled(1, 2, 8))

    empty = filled(0, 0, 8).merge([filled(0, 0, 8)])
    empty.extend(batch)
    assert empty.offset.tolist() == [0, 4, 2] and same(empty.extract(1), filled(0, 4, 8))


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
def test_texts_are_those_of_mlx_lm_with_a_quantized_cache(small_tiny, bits):
    prompts = [raw_prompt(small_tiny, text) for text in ("The list of", "def", "It was " * 30)]
    expected = []
    for prompt in prompts:
        cache = [QuantizedKVCache(64, bits) for _ in small_tiny.model.layers]
        steps = generate_step(mx.array(prompt), small_tiny.model, max_tokens=16, prompt_cache=cache)
        tokens = [int(token) for token, _ in steps]
        eos = [i for i, t in enumerate(tokens) if t in small_tiny.tokenizer.eos_token_ids]
        if eos:
            tokens = tokens[: eos[0]]
        expected.append(text_of(small_tiny, tokens))

    worker = Generator(small_tiny, Limits(4, 16, 1 << 30, 64, 2048, bits))
    plain = Generator(small_tiny, Limits(4, 16, 1 << 30, 64, 2048))
    worker.start()
    try:
        requests = [("base", prompt, 16) for prompt in prompts]
        assert texts_of(worker, requests * 2) == expected * 2
        assert texts_of(worker, requests) == expected  # with prompts that are in memory now
        assert worker.reused > 0
        room = worker.call(lambda: worker.kv_bytes(1, 256)).result()
    finally:
        worker.close(0.0)

    plain.start()
    try:
        assert room < plain.call(lambda: plain.kv_bytes(1, 256)).result() * (bits + 2) / 32
    finally:
        plain.close(0.0)


def test_other_caches_are_rejected():
    with raises("unsupported", "kv_bits", "RotatingKVCache"):
        quantized([KVCache(), RotatingKVCache(8)], 8, "a base")
    assert np.all([type(c) is QuantizedSequence for c in quantized([KVCache()], 4, "a base")])
