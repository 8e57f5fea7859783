"""LoRA on embeddings: what it computes, on which bases, and what goes with it."""

import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model

from mlx_packs import LoRAConfig, TrainConfig, load_base
from mlx_packs.adapters.attach import attach
from mlx_packs.adapters.lora import delta_of
from mlx_packs.adapters.saved_modules import attach_method
from mlx_packs.adapters.trainable import find_method
from mlx_packs.convert.interop import export_pack
from mlx_packs.memory.estimate import estimate
from mlx_packs.memory.headers import Headers
from mlx_packs.nn.lora import AdaptedEmbedding, EmbeddingLoRA
from mlx_packs.nn.wrapped import NoisyEmbedding
from mlx_packs.objectives.causal_lm import split_head, target_loss
from mlx_packs.packs.making import pack_of
from mlx_packs.packs.weighted_sum import weighted_sum
from mlx_packs.runtime import mx
from mlx_packs.training.attached import add_noise
from tests.helpers.checkpoints import merged, write_dense
from tests.helpers.errors import raises
from tests.helpers.models import base_of
from tests.helpers.steps import moved

TOKENS = mx.array([[5, 9, 3, 77, 12, 40], [1, 2, 3, 4, 5, 6]])


def attached(base, *names: str, **lora):
    return attach(base, LoRAConfig(rank=4, target_modules=names, **lora))


@pytest.mark.parametrize(
    ("family", "tied", "name"),
    [("qwen3", False, "embed_tokens"), ("qwen3", True, "embed_tokens"), ("gpt2", True, "wte")],
)
def test_an_adapter_is_a_delta_of_the_one_table(family, tied, name):
    base = base_of(family, tie_word_embeddings=tied)
    before = base.model(TOKENS)
    trainable = attached(base, name)
    assert mx.array_equal(base.model(TOKENS), before).item()

    moved(trainable)
    trained = base.model(TOKENS)
    ((path, spec),) = trainable.specs.items()
    assert spec.kind == "embedding" and spec.head is (tied or None)
    table, delta = trainable.frozen[path], delta_of(spec, trainable.tensors())

    trainable.detach()
    assert mx.array_equal(base.model(TOKENS), before).item()
    table.weight = table.weight + delta
    assert mx.allclose(base.model(TOKENS), trained, atol=1e-4).item()


@pytest.mark.parametrize(
    ("quantize", "matmul_path"),
    [("affine4", "quantized"), ("nf4", "transient"), ("affine4", "dense")],
)
def test_on_a_quantized_table(quantize, matmul_path, tmp_path):
    folder = write_dense(tmp_path / "dense", tie_word_embeddings=True)
    base = load_base(folder, quantize)
    before = base.model(TOKENS)
    lora = LoRAConfig(rank=4, target_modules=("embed_tokens", "q_proj"))
    trainable = attach(base, lora, matmul_path=matmul_path)
    assert mx.allclose(base.model(TOKENS), before, atol=1e-4).item()

    moved(trainable)
    trained = base.model(TOKENS)
    pack = pack_of(trainable)
    assert not mx.allclose(trained, before, atol=1e-2).item()

    trainable.detach()
    with base.applied(pack):
        assert mx.allclose(base.model(TOKENS), trained, atol=1e-4).item()
    assert mx.array_equal(base.model(TOKENS), before).item()


def test_the_beginning_is_zero_and_normal():
    lora = EmbeddingLoRA(512, 256, 8, 2.0, mx.random.key(0))
    assert not mx.any(lora.lora_a[0]).item()
    b = np.array(lora.lora_b[0])
    assert abs(b.mean()) < 0.1 and abs(b.std() - 1) < 0.1


def test_an_adapted_tied_head_is_no_frozen_head():
    """The loss by rows with a target has the gradient of the loss of all logits."""
    base = base_of("qwen3", tie_word_embeddings=True)
    lora = moved(attached(base, "embed_tokens", "q_proj")).places["model.embed_tokens"].lora
    head = split_head(base.model)
    assert head is not None and head.frozen is None
    targets, positions = mx.array([7, 8, 9]), mx.array([0, 3, 8])

    def by_rows(a, b):
        lora.lora_a[0], lora.lora_b[0] = a, b
        inputs = {"tokens": TOKENS, "positions": positions, "targets": targets}
        return target_loss(base.model, head, inputs)[0].sum()

    def of_all(a, b):
        lora.lora_a[0], lora.lora_b[0] = a, b
        logits = base.model(TOKENS).reshape(-1, 128)[positions]
        return nn.losses.cross_entropy(logits, targets, reduction="sum")

    base.model.train()
    factors = lora.lora_a[0], lora.lora_b[0]
    ours, whole = (mx.value_and_grad(f, argnums=(0, 1))(*factors) for f in (by_rows, of_all))
    assert ours[0].item() == pytest.approx(whole[0].item(), rel=1e-5)
    for one, other in zip(ours[1], whole[1], strict=True):
        assert mx.allclose(one, other, atol=1e-4).item() and mx.any(one).item()


def test_an_untied_head_stays_frozen_and_an_adapted_one_does_not():
    base = base_of("qwen3")
    attached(base, "embed_tokens").detach()
    attached(base, "embed_tokens")
    assert split_head(base.model).frozen is not None
    base = base_of("qwen3")
    trainable = attached(base, "lm_head")
    assert list(trainable.specs) == ["lm_head"] and split_head(base.model).frozen is None


@pytest.mark.parametrize(
    ("kind", "matmul_path"),
    [("frozen", "transient"), ("adapted", "quantized"), ("saved", "quantized")],
)
def test_noise_is_added_once_to_any_table(kind, matmul_path, tmp_path):
    base = load_base(write_dense(tmp_path / "dense"), "affine4")
    targets, saved = {
        "frozen": (("q_proj",), ()),
        "adapted": (("q_proj", "embed_tokens"), ()),
        "saved": (("q_proj",), ("embed_tokens",)),
    }[kind]
    lora = LoRAConfig(4, target_modules=targets, modules_to_save=saved)

    trainable = attach_method(base, lora, TrainConfig(), matmul_path)
    table = base.model.model.embed_tokens
    scores = table.as_linear(mx.ones((1, 128)))
    add_noise(trainable, 5.0)
    assert sum(isinstance(m, NoisyEmbedding) for m in base.model.modules()) == 1
    base.model.train()
    assert not mx.array_equal(base.model(TOKENS), base.model(TOKENS)).item()
    noisy = base.model.model.embed_tokens  # a head of the same table has no noise
    assert mx.array_equal(noisy.as_linear(mx.ones((1, 128))), scores).item()
    trainable.detach()
    assert not any(isinstance(m, NoisyEmbedding) for m in base.model.modules())


@pytest.mark.parametrize("method", ["dora", "pissa", "olora"])
def test_methods_that_need_a_linear_name_the_embedding(method):
    base = base_of("llama")
    lora = LoRAConfig(rank=4, target_modules=("embed_tokens", "q_proj"))
    with raises("unsupported", None, f"--method {method}", "model.embed_tokens", "--method lora"):
        find_method(method).attach(base, lora, TrainConfig(method=method), "quantized")
    assert not any(isinstance(m, AdaptedEmbedding) for m in base.model.modules())


@pytest.mark.parametrize("tied", [True, False])
def test_merging_and_mlx_lm_compute_what_the_attached_pack_does(tied, tmp_path):
    sizes = {"vocab_size": 4096, "tie_word_embeddings": tied}
    folder = write_dense(tmp_path / "base", dtype=mx.float32, **sizes)
    base = load_base(folder)
    before = base.model(TOKENS)
    head = () if tied else ("lm_head",)
    trainable = moved(attached(base, "embed_tokens", "q_proj", *head), 0.02)
    wanted = base.model(TOKENS)
    assert mx.abs(wanted - before).max().item() > 1e-3

    pack = pack_of(trainable).save(tmp_path / "pack")
    merged(pack, folder, tmp_path / "merged")
    result = load_base(tmp_path / "merged").model(TOKENS)
    assert mx.abs(result - wanted).max().item() < 1e-4
    export_pack(pack, "mlx-lm", tmp_path / "out")
    stock = load_adapters(load_model(folder)[0], str(tmp_path / "out")).eval()
    assert mx.abs(stock(TOKENS) - wanted).max().item() < 1e-4


def test_such_packs_are_not_mixed():
    pack = pack_of(attached(base_of("qwen3"), "embed_tokens"))
    with raises("unsupported", None, "model.embed_tokens", "embedding"):
        weighted_sum([(pack, 0.5)])


def test_the_memory_plan_counts_the_table_and_all_logits_of_a_tied_head():
    headers = Headers.of(base_of("qwen3", tie_word_embeddings=True))
    plain, adapted, saved = (
        estimate(headers, LoRAConfig(rank=4, **lora), TrainConfig(max_seq_length=48))
        for lora in (
            {"target_modules": ("q_proj",)},
            {"target_modules": ("q_proj", "embed_tokens")},
            {"target_modules": ("q_proj",), "modules_to_save": ("embed_tokens", "norm")},
        )
    )
    assert adapted.adapter_weights - plain.adapter_weights == 4 * (128 + 64)
    assert saved.adapter_weights - plain.adapter_weights == 128 * 64 + 64
    for plan in (adapted, saved):
        assert plan.moments["loss"]["logits"] > plain.moments["loss"]["logits"]
