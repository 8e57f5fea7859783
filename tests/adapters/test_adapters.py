"""Attaching changes nothing, detaching restores everything, gradients are those of plain LoRA."""

import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_packs.adapters.attach import attach
from mlx_packs.config.schema import LoRAConfig
from mlx_packs.data.dataset import Batch
from mlx_packs.objectives.causal_lm import split_head
from mlx_packs.runtime import mx
from tests.helpers.errors import raises
from tests.helpers.models import base_of
from tests.helpers.steps import loss_sum

FAMILIES = ("qwen3", "gpt2")  # grouped and fused; test_families.py has the others
TOKENS = mx.array([[5, 9, 3, 77, 12, 40], [1, 2, 3, 4, 5, 6]])
BATCH = Batch(
    {
        "tokens": TOKENS,
        "positions": mx.array([2, 3, 4, 8, 10]),
        "targets": mx.array([9, 8, 7, 6, 5]),
        "owners": mx.array([0, 0, 0, 1, -1]),
    },
    targets=4,
    denominator=4,
)


def randomize(attached) -> dict[str, mx.array]:
    """Give every adapter values that matter, B included."""
    for place in attached.places.values():
        for arrays in (place.lora.lora_a, place.lora.lora_b):
            arrays[:] = [mx.random.normal(t.shape) * 0.1 for t in arrays]
    return attached.tensors()


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
    randomize(attached)
    assert mx.abs(base.model(TOKENS) - before).max().item() > 1e-3
    attached.detach()
    assert {path: id(m) for path, m in base.model.named_modules()} == objects
    assert mx.array_equal(base.model(TOKENS), before).item()


def test_gradients_agree_with_finite_differences():
    base = base_of("qwen3", num_hidden_layers=1)
    attached = attach(base, LoRAConfig(rank=2))
    randomize(attached)

    head = split_head(base.model)
    value_and_grad = nn.value_and_grad(base.model, lambda b: loss_sum(base.model, head, b))
    _, grads = value_and_grad(BATCH)
    flat = dict(tree_flatten(grads))
    parameters = dict(tree_flatten(base.model.trainable_parameters()))
    assert set(flat) == set(parameters) and len(flat) == 14

    for name, gradient in flat.items():
        direction = mx.random.normal(gradient.shape)
        values = []
        for step in (1e-2, -1e-2):
            moved = dict(parameters)
            moved[name] = parameters[name] + step * direction
            base.model.load_weights(list(moved.items()), strict=False)
            values.append(loss_sum(base.model, head, BATCH).item())
        base.model.load_weights(list(parameters.items()), strict=False)

        numeric = (values[0] - values[1]) / 2e-2
        exact = (gradient * direction).sum().item()
        size = mx.sqrt(gradient.square().sum() * direction.square().sum()).item()
        assert abs(numeric - exact) < 2e-3 * size, name


@pytest.mark.parametrize(("policy", "inner"), [("none", 0), ("selective", 4), ("block", 0)])
def test_recomputed_blocks_recompute_nothing_inside(policy, inner):
    base = base_of("qwen3")
    attached = attach(base, LoRAConfig(rank=2))
    attached.recompute(policy)
    assert sum(bool(getattr(m, "recompute", False)) for m in base.model.modules()) == inner


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


def test_fused_projection_has_a_rank_for_each_slice():
    base = base_of("gpt2")
    lora = LoRAConfig(rank=4, target_modules=("c_attn",), rank_pattern={r"c_attn\.k": 1})
    attached = attach(base, lora)
    spec = attached.specs["model.h.0.attn.c_attn"]
    shapes = [(s.name, s.width, s.rank) for s in spec.slices]
    assert shapes == [("q", 64, 4), ("k", 64, 1), ("v", 64, 4)]
    randomize(attached)
    b = np.array(attached.tensors()["model.h.0.attn.c_attn.lora_b"])
    assert b.shape == (9, 192)
    assert not b[:4, 64:].any() and not b[4:5, :64].any() and not b[5:, :128].any()


def test_dropout_uses_one_mask_for_the_group():
    base = base_of("qwen3", num_hidden_layers=1)
    attached = attach(base, LoRAConfig(rank=4, dropout=0.5))
    tensors = attached.tensors()

    for name in tensors:
        if "k_proj" in name:
            tensors[name] = tensors[name.replace("k_proj", "v_proj")]
        if name.endswith("v_proj.lora_b") or name.endswith("k_proj.lora_b"):
            tensors[name] = mx.ones_like(tensors[name])
    attached.load(tensors, "test")

    attention = base.model.layers[0].self_attn
    attention.train()
    x = mx.random.normal((1, 5, 64))
    zeros = [mx.zeros((1, 5, w)) for w in (128, 64, 64)]

    _, k, v = attention.qkv_lora(x, zeros)
    assert mx.array_equal(k, v).item()
    _, again, _ = attention.qkv_lora(x, zeros)
    assert not mx.array_equal(k, again).item()


@pytest.mark.parametrize(
    ("lora", "code", "names"),
    [
        ({"target_modules": ("q_prj",)}, "unknown", ("'q_proj'", "down_proj, embed_tokens")),
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
