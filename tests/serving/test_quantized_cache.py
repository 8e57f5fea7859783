"""A server with quantized keys and values computes what mlx-lm does with them."""

import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache

from mlx_packs.inference.generate import raw_prompt, text_of
from mlx_packs.runtime import mx
from mlx_packs.serving import batch
from mlx_packs.serving.generation import Generator
from mlx_packs.serving.request import Limits
from tests.helpers.errors import raises
from tests.helpers.serving import texts_of


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

    worker = Generator(small_tiny, Limits(1, 16, 1 << 30, 64, 2048, bits))
    plain = Generator(small_tiny, Limits(1, 16, 1 << 30, 64, 2048))
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


def test_other_caches_are_rejected(small_tiny, monkeypatch):
    monkeypatch.setattr(batch, "make_prompt_cache", lambda _: [RotatingKVCache(8)])
    with raises("unsupported", "kv_bits", "RotatingKVCache"):
        Generator(small_tiny, Limits(1, 16, 1 << 30, 64, 2048, 8))
