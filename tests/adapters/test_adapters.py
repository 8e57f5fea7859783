"""Attaching changes nothing, detaching restores everything, and what is impossible is named."""

import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_packs.adapters.attach import attach
from mlx_packs.config.schema import LoRAConfig
from mlx_packs.runtime import mx
from tests.helpers.errors import raises
from tests.helpers.models import base_of
from tests.helpers.steps import fill_b

FAMILIES = ("qwen3", "gpt2")  # grouped and fused; test_families.py has the others
TOKENS = mx.array([[5, 9, 3, 77, 12, 40], [1, 2, 3, 4, 5, 6]])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("matmul_path", ["quantized", "transient", "dense"])
def test_attach_changes_no_logit_and_detach_restores_the_same_objects(family, matmul_path):
    base = base_of(family)
    nn.quantize(base.model, group_size=32, bits=4)
    before = base.model(TOKENS)
    objects = {path: id(m) for path, m in base.model.named_modules()}
    attached = attach(base, LoRAConfig(rank=4), matmul_path=matmul_path)
    tolerance = 0 if matmul_path == "quantized" else 1e-5
    assert mx.abs(base.model(TOKENS) - before).max().item() <= tolerance
    fill_b(attached)
    assert mx.abs(base.model(TOKENS) - before).max().item() > 1e-3
    attached.detach()
    assert {path: id(m) for path, m in base.model.named_modules()} == objects
    assert mx.array_equal(base.model(TOKENS), before).item()


def test_attach_refuses_a_base_that_carries_adapters():
    base = base_of("qwen3")
    attached = attach(base, LoRAConfig(rank=2))
    with raises("conflict", None, base.name):
        attach(base, LoRAConfig(rank=2))
    attached.detach()
    attach(base, LoRAConfig(rank=2)).detach()


def test_rank_and_alpha_patterns_select_by_path_and_regex():
    base = base_of("qwen3")
    lora = LoRAConfig(
        rank=4,
        alpha=4.0,
        rank_pattern={r"layers\.0\..*q_proj": 2, "v_proj": 8},
        alpha_pattern={"model.layers.1.self_attn.o_proj": 16.0},
    )

    attached = attach(base, lora)
    slices = {path: spec.slices[0] for path, spec in attached.specs.items()}

    assert slices["model.layers.0.self_attn.q_proj"].rank == 2
    assert slices["model.layers.1.self_attn.q_proj"].rank == 4
    assert slices["model.layers.0.self_attn.v_proj"].rank == 8
    assert slices["model.layers.1.self_attn.o_proj"].scale == 4.0
    assert attached.tensors()["model.layers.0.self_attn.v_proj.lora_a"].shape == (64, 8)


@pytest.mark.parametrize(
    ("lora", "code", "names"),
    [
        ({"target_modules": ("q_prj",)}, "unknown", ("'q_proj'", "down_proj, embed_tokens")),
        ({"target_modules": ("model.norm",)}, "unsupported", ("model.norm", "RMSNorm")),
        ({"num_layers": 3}, "mismatch", ("3", "2 blocks")),
        ({"rank": 1000}, "invalid", ("1000", "64")),
        ({"rank_pattern": {"nothing": 3}}, "unknown", ("nothing",)),
        ({"alpha_pattern": {"nothing": 3}}, "unknown", ("nothing",)),
    ],
)
def test_impossible_adapters_are_rejected_and_nothing_is_attached(lora, code, names):
    base = base_of("qwen3")
    objects = {path: id(m) for path, m in base.model.named_modules()}
    with raises(code, next(iter(lora)), *names):
        attach(base, LoRAConfig(**lora))
    assert {path: id(m) for path, m in base.model.named_modules()} == objects


def test_load_lists_missing_unknown_and_misshaped_tensors():
    attached = attach(base_of("qwen3"), LoRAConfig(rank=2))
    tensors = attached.tensors()
    name = "model.layers.0.self_attn.q_proj.lora_a"
    tensors[name] = tensors[name][:, :1]
    tensors["stray"] = tensors.pop("model.layers.0.self_attn.k_proj.lora_a")
    with raises("mismatch", None, "file", "k_proj.lora_a", "stray", "(64, 1)", "(64, 2)"):
        attached.load(tensors, "file")


def test_load_refuses_a_fused_b_that_couples_slices():
    attached = attach(base_of("gpt2"), LoRAConfig(rank=2, target_modules=("c_attn",)))
    tensors = {n: mx.ones_like(t) for n, t in attached.tensors().items()}
    with raises("unsupported", None, "file", "c_attn.lora_b"):
        attached.load(tensors, "file")


def test_a_kv_cache_is_used_in_training_mode_too():
    base = base_of("qwen3")
    attach(base, LoRAConfig(rank=2))
    tokens = mx.arange(12)[None]
    expected = base.model(tokens)
    base.model.train()
    cache = make_prompt_cache(base.model)
    result = mx.concatenate([base.model(tokens[:, :7], cache), base.model(tokens[:, 7:], cache)], 1)
    assert mx.allclose(result, expected, atol=1e-4).item()


def test_evaluation_of_a_long_row_keeps_no_whole_scores():
    length = 2048
    base = base_of("llama", num_hidden_layers=1, max_position_embeddings=length)
    tokens = mx.random.randint(0, 128, (1, length))
    expected = base.model(tokens)
    attach(base, LoRAConfig(rank=2))
    mx.eval(expected, base.model.parameters())
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    result = base.model(tokens)
    mx.eval(result)
    scores = 4 * base.config["num_attention_heads"] * length**2
    assert mx.get_peak_memory() - before < 0.5 * scores
    assert mx.allclose(result, expected, atol=1e-4).item()
