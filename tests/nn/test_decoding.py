"""Text from a base with adapters on a GPU: factors are cast once, and one kernel op makes a group."""

import pytest

from mlx_packs.adapters.attach import attach
from mlx_packs.config.schema import LoRAConfig
from mlx_packs.inference.generate import complete, complete_batch
from mlx_packs.nn import lora
from mlx_packs.nn.lora import GroupedLoRA, factors_cast
from mlx_packs.ops import _backend, dispatch, grouped_lora
from mlx_packs.runtime import assumed_device, mx
from tests.helpers.emulation import emulation

PROMPT = [5, 9, 300, 41]


@pytest.fixture
def adapted(tiny):
    """The tiny base with one block and adapters that change its logits."""
    tiny.model.model.layers = tiny.model.layers[:1]
    attached = attach(tiny, LoRAConfig(rank=4))
    attached.load(random_factors(attached, 0), "test")
    tiny.model.eval()
    return attached


@pytest.fixture
def on_gpu():
    """MLX computes on a GPU, as far as this package knows."""
    with assumed_device("gpu"):
        yield


@pytest.fixture
def on_plain_gpu(on_gpu):
    """The same without kernels."""
    with dispatch.backend("reference"):
        yield


def random_factors(attached, seed: int) -> dict[str, mx.array]:
    return {
        name: 0.1 * mx.random.normal(value.shape, key=mx.random.key(seed + i))
        for i, (name, value) in enumerate(attached.tensors().items())
    }


def groups(attached) -> list[GroupedLoRA]:
    return [m for m in attached.model.modules() if isinstance(m, GroupedLoRA)]


def test_a_block_decodes_in_8_launches_to_the_same_logits(adapted, on_gpu):
    tokens = mx.array([[5], [9], [300]])
    with dispatch.backend("reference"):
        expected = adapted.model(tokens)
    with emulation("metal", ("forward",)) as built, dispatch.backend("metal"):
        with factors_cast(adapted.model):
            adapted.model(tokens)  # the first call compares the kernels with the reference
            before = sum(len(kernel.reports) for kernel in built)
            logits = adapted.model(tokens)
        assert sum(len(kernel.reports) for kernel in built) - before == 8
        assert all(call.startswith("lora_qmv") for call in _backend.record()["kernels"])
    assert mx.allclose(logits, expected, atol=1e-4).item()


@pytest.mark.slow
def test_text_by_kernels_is_that_of_plain_mlx(adapted, emulated, on_gpu):
    with dispatch.backend("reference"):
        expected = complete(adapted.base, PROMPT, max_tokens=3)
        batch = complete_batch(adapted.base, [PROMPT, [7]], max_tokens=2)
    assert complete(adapted.base, PROMPT, max_tokens=3) == expected
    assert complete_batch(adapted.base, [PROMPT, [7]], max_tokens=2) == batch
    assert all(call.startswith("lora_qmv") for call in _backend.record()["kernels"])


def test_training_long_prompts_and_other_calls_take_no_kernel(adapted, on_plain_gpu, monkeypatch):
    def fail(*_):
        raise AssertionError("a kernel for decoding was asked for")

    monkeypatch.setattr(lora, "prepare", fail)
    one, nine = mx.array([[5]]), mx.zeros((1, 9), mx.int32)
    adapted.model(one)
    with factors_cast(adapted.model):
        adapted.model(nine)
        with pytest.raises(AssertionError, match="for decoding"):
            adapted.model(one)
        adapted.model.train()
        adapted.model(one)
    adapted.model.eval()
    adapted.model(one)


def test_prompts_take_factors_that_were_cast_once(adapted, on_plain_gpu, monkeypatch):
    tokens = mx.arange(9)[None]
    expected = adapted.model(tokens)
    seen = []

    def watched(x, outputs, lora_a, lora_b, scales):
        seen.append([*lora_a, *lora_b])
        return grouped_lora.grouped_lora(x, outputs, lora_a, lora_b, scales)

    monkeypatch.setattr(lora, "grouped_lora", watched)
    with factors_cast(adapted.model):
        adapted.model.set_dtype(mx.bfloat16)
        adapted.load(random_factors(adapted, 0), "test")  # float32
        first = [group.factors(mx.bfloat16) for group in groups(adapted)]
        logits = adapted.model(tokens)
        assert {v.dtype for call in seen for v in call} == {mx.bfloat16}
        again = [group.factors(mx.bfloat16) for group in groups(adapted)]
        assert all(a is b for a, b in zip(first, again, strict=True))
    assert mx.abs(logits - expected).max().item() < 0.05 * mx.abs(expected).max().item()


def test_replaced_factors_are_cast_again(adapted, on_plain_gpu):
    token = mx.array([[5]])
    with factors_cast(adapted.model):
        before = adapted.model(token)
        with adapted.disabled():
            bare = adapted.model(token)
        adapted.load(random_factors(adapted, 50), "test")
        after = adapted.model(token)
    expected = adapted.model(token)
    assert mx.allclose(after, expected, atol=1e-4).item()
    assert not any(mx.allclose(after, other, atol=1e-1).item() for other in (before, bare))
