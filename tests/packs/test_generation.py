"""Text in pieces and for many prompts; packs that are attached and detached."""

import mlx.nn as nn
import pytest

import mlx_packs as mp
from mlx_packs.inference.generate import texts_that_fit
from tests.helpers.errors import raises
from tests.helpers.packs import random_pack

PROMPT = "Remind me to call the bank on Friday."
PROMPTS = [PROMPT, "Hi", [{"role": "user", "content": "What is due on Monday?"}]]


@pytest.fixture(scope="module")
def base(small_tiny):
    return small_tiny


@pytest.fixture(scope="module")
def pack(base):
    return random_pack(base, 0, size=1.0)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_k": 20, "seed": 3}])
def test_the_pieces_of_a_stream_are_the_text(base, pack, sampling):
    sampling = {"max_tokens": 12, **sampling}
    text = base.generate(PROMPT, pack, **sampling)
    pieces = list(base.stream(PROMPT, pack, **sampling))
    assert len(pieces) > 3 and "".join(pieces) == text
    assert "".join(mp.stream_generate(base, PROMPT, pack, **sampling)) == text
    assert text != base.generate(PROMPT, **sampling)
    assert base.active is None


def test_a_stream_that_is_left_early_detaches_its_pack(base, pack):
    stream = base.stream(PROMPT, pack, max_tokens=12)
    assert base.active is None  # until the first piece
    next(stream)
    assert base.active.pack is pack
    stream.close()
    assert base.active is None


def quantized_of(base) -> list[str]:
    modules = base.model.named_modules()
    return [name for name, module in modules if isinstance(module, nn.QuantizedLinear)]


@pytest.mark.parametrize("way", ["base", "pack", "active"])
def test_text_is_generated_by_the_fast_path_of_the_device(base, pack, monkeypatch, way):
    """Also with a pack that was attached; afterwards all is as before."""
    monkeypatch.setattr("mlx_packs.memory.matmul_path.generation_path", lambda model: "dense")
    if way == "active":
        base.attach(pack)
    before, active = quantized_of(base), base.active
    stream = base.stream(PROMPT, pack if way == "pack" else None, max_tokens=4)
    next(stream)
    assert before and not quantized_of(base)
    stream.close()
    base.generate_batch(PROMPTS, max_tokens=2)
    assert quantized_of(base) == before and (base.active and base.active.pack) == (
        active and active.pack
    )
    base.detach()


def test_a_batch_has_the_texts_of_single_prompts(base, pack):
    texts = [base.generate(prompt, pack, max_tokens=8) for prompt in PROMPTS]
    options = {"max_tokens": 8, "batch_size": 2}
    assert base.generate_batch(PROMPTS, pack, **options) == texts
    assert mp.batch_generate(base, PROMPTS, pack, **options) == texts
    assert base.active is None


def test_a_batch_is_as_large_as_its_memory_allows(base, monkeypatch):
    at_once = []
    monkeypatch.setattr(
        "mlx_packs.inference.generate.complete_batch",
        lambda base, prompts, limit, batch_size, sampler: at_once.append(batch_size),
    )
    monkeypatch.setattr("mlx_packs.runtime.total_memory", lambda: 64 * 2**20)
    for tokens in (100, 1000, 100_000):
        base.generate_batch(PROMPTS, max_tokens=tokens)
    base.generate_batch(PROMPTS, batch_size=3)
    base.generate_batch(PROMPTS, batch_size=None)  # the default

    heads = base.config["num_key_value_heads"] * base.config["head_dim"]
    of_256 = 256 * 2 * 4 * heads * len(base.model.layers)  # float32 keys and values
    assert at_once == [2**23 // of_256, 2**23 // (4 * of_256), 1, 3, at_once[0]]
    assert 32 > at_once[0] > at_once[1] > 1

    monkeypatch.undo()
    assert texts_that_fit(base, 100) == 32


def test_a_batch_is_sampled_by_its_seed(base):
    options = {"max_tokens": 8, "temperature": 1.0}
    first, again, other = (base.generate_batch(PROMPTS, seed=seed, **options) for seed in (1, 1, 2))
    assert first == again != other
    assert first != base.generate_batch(PROMPTS, max_tokens=8)
    raw = base.generate("The meeting", raw=True, max_tokens=5)
    assert base.generate_batch(["The meeting"], raw=True, max_tokens=5) == [raw]
    assert base.generate_batch([]) == []


def test_faults_show_before_anything_is_generated(base):
    with raises("unknown", "max_tokenz", "max_tokens"):
        base.stream(PROMPT, max_tokenz=3)
    with raises("unsupported", "repetition_penalty"):
        base.generate_batch(PROMPTS, repetition_penalty=1.2)
    with raises("invalid", "prompts"):
        base.generate_batch(PROMPT)
    with raises("invalid", "batch_size"):
        base.generate_batch(PROMPTS, batch_size=0)
    with raises("conflict", "raw"):
        base.stream(PROMPTS[2], raw=True)
