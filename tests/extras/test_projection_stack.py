"""--objective projection-stack: the graph, its gradients, what it reads, and what it rejects."""

from pathlib import Path

import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_packs import LoRAConfig, TrainConfig, load_base, train_pack
from mlx_packs.adapters.attach import attach
from mlx_packs.data.encoding import Example
from mlx_packs.extras.projection_stack import graph_of
from mlx_packs.memory.estimate import estimate
from mlx_packs.memory.headers import Headers
from mlx_packs.optim import make_optimizer
from mlx_packs.runtime import mx
from tests.helpers.checkpoints import write_checkpoint, write_quantized
from tests.helpers.errors import raises
from tests.helpers.models import base_of
from tests.helpers.rows import write_rows
from tests.helpers.steps import lm_stepper, loss_sum, make_batch, moved

STACK = TrainConfig(objective="projection-stack")
SQUARE = {"head_dim": 16}  # 4 heads of 16 are as wide as the 64 of the hidden states
O_PROJ = "model.layers.{}.self_attn.o_proj"


def graph(base, lora=None):
    return graph_of(base, lora or LoRAConfig(rank=4, alpha=12))


def dense_weight(module) -> mx.array:
    if not isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
        return module.weight
    how = {"group_size": module.group_size, "bits": module.bits}
    return mx.dequantize(module.weight, module.scales, module.get("biases"), **how)


def plain_loss(frozen, tied: bool, scale: float, adapters, tokens, positions, targets):
    """The same stack in plain MLX; ``frozen``: table, then (path, weight, bias) in order."""
    table, *layers = frozen
    x = table[tokens]
    for path, weight, bias in layers:
        y = x @ weight.T + (0 if bias is None else bias)
        if f"{path}.lora_a" in adapters:
            y = y + scale * (x @ adapters[f"{path}.lora_a"]) @ adapters[f"{path}.lora_b"]
        x = y
    logits = (x @ table.T if tied else x).reshape(-1, table.shape[0])[positions]
    return nn.losses.cross_entropy(logits, targets, reduction="none")


@pytest.mark.parametrize(
    ("family", "changes", "paths"),
    [
        ("llama", SQUARE, [O_PROJ.format(0), O_PROJ.format(1), "lm_head"]),
        ("qwen3", {**SQUARE, "tie_word_embeddings": True}, [O_PROJ.format(0), O_PROJ.format(1)]),
        ("qwen2", {}, [O_PROJ.format(0), O_PROJ.format(1), "lm_head"]),
        ("gpt2", {}, ["model.h.0.attn.c_proj", "model.h.1.attn.c_proj"]),
    ],
)
@pytest.mark.parametrize("quantized", [False, True])
def test_stack_has_the_loss_gradients_and_step_of_plain_mlx(family, changes, paths, quantized):
    base = base_of(family, **changes)
    if quantized:
        nn.quantize(base.model, group_size=32, bits=4)
        base.model.freeze()
    modules = dict(base.model.named_modules())
    name = "model.wte" if family == "gpt2" else "model.embed_tokens"
    projections = [(p, dense_weight(modules[p]), modules[p].get("bias")) for p in paths]
    frozen = [dense_weight(modules[name]), *projections]

    result = graph(base)
    attached = attach(result.base, result.lora)
    assert list(attached.specs) == paths
    moved(attached, 0.3)
    head = result.head()
    target = np.arange(20) > 4
    rows = [Example(np.arange(3 + i, 23 + i, dtype=np.int32), target, "row") for i in (0, 9)]
    batch = result.preparation.prepare(make_batch(rows, [0, 1], 2, 31))
    tokens, positions, targets = (
        mx.array(batch.inputs[name]) for name in ("tokens", "positions", "targets")
    )
    weights = mx.array(batch.inputs["owners"] >= 0)
    started = attached.tensors()

    def expected_loss(adapters):
        each = plain_loss(frozen, "lm_head" not in paths, 3.0, adapters, tokens, positions, targets)
        return (each * weights).sum()

    expected, expected_grads = mx.value_and_grad(expected_loss)(started)
    value, grads = nn.value_and_grad(attached.model, lambda b: loss_sum(attached.model, head, b))(
        batch
    )
    assert abs(value.item() - expected.item()) < 1e-4 * expected.item()
    assert len(tree_flatten(grads)) == len(expected_grads)

    rate, count = 1e-3, batch.denominator
    config = TrainConfig(optimizer="sgd", learning_rate=rate, lr_schedule="constant")
    optimizer = make_optimizer(config)
    optimizer.init(attached.model.trainable_parameters())
    lm_stepper(attached.model, optimizer, None, head)(batch, True, True)
    for name, stepped in attached.tensors().items():
        gradient = (started[name] - stepped) / rate * count
        scale = mx.abs(expected_grads[name]).max().item()
        assert scale > 0
        assert mx.abs(gradient - expected_grads[name]).max().item() < 2e-3 * scale + 1e-2, name


def test_no_token_sees_another_so_packed_rows_are_those_alone():
    base = base_of("llama", **SQUARE)
    stack = graph(base).base.model
    tokens = mx.array([[3, 4, 5, 6]])
    changed = mx.array([[9, 9, 9, 6]])
    assert mx.array_equal(stack(tokens)[:, 3], stack(changed)[:, 3])
    assert mx.array_equal(stack(tokens, cache=[None, None]), stack(tokens))


def test_the_last_projections_are_adapted_and_the_base_is_untouched_and_shares_its_weights():
    base = base_of("llama", **SQUARE)
    objects = {path: id(m) for path, m in base.model.named_modules()}
    result = graph(base, LoRAConfig(rank=2, num_layers=1))
    assert result.lora.target_modules == (O_PROJ.format(1), "lm_head")
    assert result.facts["stack"] == [O_PROJ.format(0), O_PROJ.format(1)]
    attached = attach(result.base, result.lora)
    assert {path: id(m) for path, m in base.model.named_modules()} == objects
    assert attached.model is not base.model
    attached.detach()
    assert result.base.model.at(O_PROJ.format(0)) is base.model.layers[0].self_attn.o_proj


def test_stack_of_projections_that_are_not_square_is_the_head_alone():
    result = graph(base_of("qwen3"))  # 4 heads of 32 to 64 hidden, as 4096 to 2560 in Qwen3-4B
    assert result.lora.target_modules == ("lm_head",) and result.facts["stack"] == []
    reason = "without the output projection of 2 blocks, which is not square"
    assert reason in result.facts["note"]


@pytest.mark.parametrize(
    ("family", "changes", "lora", "error"),
    [
        ("qwen3", {"tie_word_embeddings": True}, {}, ("unsupported", "objective", "no square")),
        ("llama", SQUARE, {"target_modules": ("q_proj",)}, ("conflict", "target_modules")),
        ("llama", SQUARE, {"num_layers": 3}, ("mismatch", "num_layers", "3", "2")),
    ],
)
def test_a_graph_in_which_nothing_would_learn_is_refused(family, changes, lora, error):
    with raises(*error):
        graph(base_of(family, **changes), LoRAConfig(**lora))


def test_what_a_stack_has_not_is_rejected():
    for name, value in (("recompute", "block"), ("grad_checkpoint", True)):
        with raises("conflict", name, "projection-stack"):
            TrainConfig(objective="projection-stack", **{name: value})
    with raises("unsupported", "objective", "projection-stack"):
        estimate(Headers("q", {"model_type": "qwen3"}, {}), LoRAConfig(), STACK)


@pytest.fixture(scope="module")
def stack_folder(tmp_path_factory) -> Path:
    """A base ``llama``, rows ``d``, and a run that stopped at two batches of four, ``broken``."""
    folder = tmp_path_factory.mktemp("objective")
    write_checkpoint(folder / "llama", "llama", **SQUARE)
    rows = [{"text": f"row {i} has {i + 1} after it and {i + 2} then"} for i in range(24)]
    write_rows(folder / "d", train=rows, valid=rows[:6])
    train_stack(folder, "broken", iters=2)
    return folder


def train_stack(folder: Path, out: str, resume=False, **options):
    settings = {"iters": 4, "batch_size": 4, "max_seq_length": 64, "save_every": 2}
    settings |= {"learning_rate": 1e-2, "lr_schedule": "constant"}
    train = TrainConfig(**{**settings, "objective": "projection-stack", **options})
    places = str(folder / "llama"), folder / "d"
    return train_pack(*places, LoRAConfig(rank=4), train, folder / out, resume=resume)


def test_packed_rows_and_a_base_that_is_quantized_on_loading(stack_folder):
    report = train_stack(stack_folder, "packed", packing=True, quantize="affine4", iters=1).report
    assert report["objective"]["embedding"].startswith("in memory: model.embed_tokens.weight is")
    assert np.isfinite(report["ppl_after"])


def test_a_resumed_run_keeps_its_objective(stack_folder):
    with raises("mismatch", "objective", "'projection-stack'", "'transformer'"):
        train_stack(stack_folder, "broken", resume=True, objective="transformer")


def test_stack_resumed_equals_an_unbroken_run(stack_folder):
    whole = train_stack(stack_folder, "whole").pack.tensors
    broken = train_stack(stack_folder, "broken", resume=True).pack.tensors
    assert all(mx.array_equal(whole[name], broken[name]) for name in whole)


def test_a_4_bit_table_is_read_and_a_tied_one_is_not(stack_folder, tmp_path):
    write_quantized(tmp_path / "q", stack_folder / "llama")
    tokens = mx.array([[3, 4095, 0], [17, 3, 2000]])
    for folder in (tmp_path / "q", stack_folder / "llama"):
        base = load_base(folder)
        result = graph(base)
        assert result.facts["embedding"] == "frozen, read from its file"
        rows = result.preparation._table(tokens)
        assert mx.array_equal(rows, base.model.model.embed_tokens(tokens)).item()
    write_checkpoint(tmp_path / "tied", "llama", tie_word_embeddings=True, **SQUARE)
    result = graph(load_base(tmp_path / "tied")).facts
    assert result["embedding"] == "in memory: the head is this table (model.embed_tokens)"
    assert result["head"] == "model.embed_tokens, tied and frozen"


def test_stack_leaves_out_projections_whose_tensors_contradict():
    base = base_of("llama", **SQUARE)
    nn.quantize(base.model, group_size=32, bits=4)
    o_proj = base.model.layers[0].self_attn.o_proj
    o_proj.scales = o_proj.scales[:, :1]
    result = graph(base).facts
    assert result["stack"] == [O_PROJ.format(1)]
    assert "without the output projection of 1 blocks" in result["note"]
