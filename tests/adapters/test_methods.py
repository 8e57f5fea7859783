"""What holds for every method, and what others than plain LoRA begin with, train and write."""

import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_packs import LoRAConfig, TrainConfig, load_base, merge_pack, train_pack
from mlx_packs.adapters.attach import attach
from mlx_packs.adapters.lora import delta_of
from mlx_packs.adapters.trainable import find_method, trainable_modules
from mlx_packs.config import choices
from mlx_packs.nn.frozen_weight import frozen_weight
from mlx_packs.ops.profile import GPU, forced_profile
from mlx_packs.packs.making import pack_of
from mlx_packs.runtime import mx
from tests.bases.changes import change_tensors
from tests.helpers.checkpoints import write_dense
from tests.helpers.errors import raises
from tests.helpers.models import SMALL_FAMILIES, base_of
from tests.helpers.rows import chat, write_rows
from tests.helpers.steps import moved

TOKENS = mx.array([[5, 9, 3, 77, 12, 40], [1, 2, 3, 4, 5, 6]])
OTHERS = ("dora", "pissa", "olora")  # that go with any base


def attached(method: str, base, path: str = "quantized", **lora):
    lora = LoRAConfig(rank=4, **lora)
    return find_method(method).attach(base, lora, TrainConfig(method=method), path)


@pytest.fixture(params=choices.METHODS)
def name(request) -> str:
    return request.param


@pytest.fixture
def base(name, tmp_path):
    if name == "loftq":
        return load_base(write_dense(tmp_path / "dense"), "affine4")
    return base_of("llama")


def change_values(trainable) -> dict[str, mx.array]:
    """Set all trainable parameters to other values; return them."""
    values = {n: t + 0.1 * mx.random.normal(t.shape) for n, t in trainable.tensors().items()}
    trainable.load(values, "test")
    return values


def test_disabled_computes_the_base_and_then_what_was_trained(name, base):
    before = base.model(TOKENS)
    trainable = attached(name, base, "dense")
    values = change_values(trainable)
    trained = base.model(TOKENS)
    with pytest.raises(KeyboardInterrupt), trainable.disabled():
        assert mx.allclose(base.model(TOKENS), before, atol=1e-5).item()
        raise KeyboardInterrupt
    assert not mx.allclose(trained, before, atol=1e-3).item()
    assert mx.array_equal(base.model(TOKENS), trained).item()
    tensors = trainable.tensors()
    assert set(tensors) == set(values)
    assert all(mx.array_equal(tensors[n], values[n]).item() for n in values)


def test_what_is_trained_is_what_is_planned(name, base):
    assert trainable_modules(base.model) == []
    find_method(name).check(base, "dense")
    trainable = attached(name, base, "dense")
    parameters = [w for _, w in tree_flatten(base.model.trainable_parameters())]
    modules = trainable_modules(base.model)
    own = [w for m in modules for _, w in tree_flatten(m.trainable_parameters())]
    assert sum(w.size for w in own) == trainable.parameter_count()

    trainable.detach()
    planned = attach(base, LoRAConfig(rank=4), matmul_path="dense").specs
    expected = [] if choices.METHODS[name].trains_base else [tuple(w.shape) for w in parameters]
    assert sorted(find_method(name).adapter_shapes(planned)) == sorted(expected)


def test_a_base_is_the_same_after_detaching(name, base):
    before = base.model(TOKENS)
    objects = {path: id(m) for path, m in base.model.named_modules()}
    trainable = attached(name, base, "dense")
    trainable.recompute("block")
    change_values(trainable)
    trainable.detach()
    trainable.detach()
    assert {path: id(m) for path, m in base.model.named_modules()} == objects
    assert mx.array_equal(base.model(TOKENS), before).item()
    assert not tree_flatten(base.model.trainable_parameters())


@pytest.mark.parametrize("method", OTHERS)
@pytest.mark.parametrize(("family", "level"), [("gpt2", 1e-4), ("qwen3", 1e-3)])
def test_attaching_to_fused_or_quantized_projections_changes_no_output(method, family, level):
    base = base_of(family)  # test_saved_modules.py has dense ones
    if family == "qwen3":
        nn.quantize(base.model, group_size=32, bits=4)
    before = base.model(TOKENS)
    attached(method, base)
    assert mx.allclose(base.model(TOKENS), before, atol=level).item()


@pytest.mark.parametrize(
    ("family", "mode"),
    [("qwen3", "train"), ("qwen3", "eval"), ("qwen2", "eval"), ("gpt2", "train")],
)
def test_dora_is_the_adapted_weight_with_other_norms(family, mode):
    base = base_of(family)
    trainable = moved(attached("dora", base), 0.05)
    tensors = trainable.tensors()
    for path in trainable.specs:  # magnitudes other than the norms
        tensors[f"{path}.m"] = tensors[f"{path}.m"] * 1.1 + 0.01
    trainable.load(tensors, "test")

    getattr(base.model, mode)()
    trained = base.model(TOKENS)
    specs, frozen = trainable.specs, trainable.frozen
    trainable.detach()

    for path, linear in frozen.items():
        dense = frozen_weight(linear).dense().astype(mx.float32)
        weight = dense + delta_of(specs[path], tensors)
        norms = mx.linalg.norm(weight, axis=1)
        linear.weight = (tensors[f"{path}.m"] / norms)[:, None] * weight

    assert mx.allclose(base.model(TOKENS), trained, atol=1e-4).item()


@pytest.mark.parametrize("method", ["dora", "pissa"])
def test_the_graph_of_a_gpu_computes_the_same(method):
    base = base_of("qwen3")
    moved(attached(method, base), 0.05)
    base.model.train()
    on_cpu = base.model(TOKENS)
    with forced_profile(GPU):
        assert mx.allclose(base.model(TOKENS), on_cpu, atol=1e-4).item()


def test_rows_of_zeros_have_finite_gradients_and_are_applied_and_merged(tmp_path):
    folder = write_dense(tmp_path / "dense", dtype=mx.float32, vocab_size=4096)
    path = "model.layers.0.self_attn.q_proj"

    def damage(tensors):
        tensors[f"{path}.weight"][3] = 0

    change_tensors(folder, damage)
    base = load_base(folder)
    trainable = attached("dora", base)
    trained = base.model(TOKENS)
    pack = pack_of(trainable)
    assert mx.isfinite(trained).all().item()

    lora = trainable.places[path].lora

    def loss(m):
        lora.magnitude[0] = m
        return base.model.train()(TOKENS).square().sum()

    gradient = mx.grad(loss)(lora.magnitude[0])
    assert mx.isfinite(gradient).all().item() and mx.any(gradient).item()
    trainable.detach()
    base.model.eval()

    with base.applied(pack):
        assert mx.allclose(base.model(TOKENS), trained, atol=1e-4).item()

    merge_pack(pack, folder, tmp_path / "merged", rows=2)
    merged = load_base(tmp_path / "merged").model(TOKENS)
    assert mx.allclose(merged, trained, atol=1e-4).item()


TRAIN = {"iters": 2, "batch_size": 2, "max_seq_length": 64, "val_batches": 0}
TRAIN |= {"learning_rate": 1e-2, "lr_schedule": "constant", "matmul_path": "dense"}


def test_encoders_are_trained_applied_and_merged(encoder, tmp_path):
    words = "one two three four five six seven eight".split()
    pairs = [{"anchor": f"Say {word}.", "positive": f"{word}, I say."} for word in words]
    rows = write_rows(tmp_path / "pairs", train=pairs, valid=pairs[:4])
    train = TrainConfig(task="embedding", method="dora", iters=2, batch_size=4, val_batches=0)
    pack = train_pack(str(encoder), rows, LoRAConfig(rank=4), train, tmp_path / "p").pack
    base = load_base(encoder)
    bare = base.encode(words)
    with base.applied(pack):
        wanted = base.encode(words)
    assert np.abs(wanted - bare).max() > 1e-5
    merge_pack(pack, encoder, tmp_path / "merged", data=rows)
    assert np.abs(load_base(tmp_path / "merged").encode(words) - wanted).max() < 1e-4


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    each = [chat(f"Say {word}.", f"{word}, I say, {word}.") for word in "one two six ten".split()]
    return write_rows(tmp_path_factory.mktemp("rows"), train=each, valid=each[:2])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_dense(tmp_path_factory.mktemp("base") / "dense", vocab_size=4096)


@pytest.mark.parametrize("method", ["dora", "pissa"])
def test_a_run_learns_and_its_pack_computes_what_was_trained(method, checkpoint, rows, tmp_path):
    lora = LoRAConfig(rank=4, num_layers=1)
    run = train_pack(
        str(checkpoint), rows, lora, TrainConfig(method=method, **TRAIN), tmp_path / "p"
    )
    assert run.report["ppl_after"] < run.report["ppl_before"]
    assert run.pack.manifest["method"] == method
    stored = sum(tensor.size for tensor in run.pack.load_tensors().values())
    assert run.pack.manifest["adapters"]["parameters"] == stored
    base = load_base(checkpoint)
    before = base.model(TOKENS)
    with base.applied(run.pack):
        assert not mx.allclose(base.model(TOKENS), before, atol=1e-3).item()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("dora", {"packing": True}),
        ("pissa", {"packing": True}),
        ("loftq", {"recompute": "block", "quantize": "affine4"}),
    ],
)
def test_a_resumed_run_equals_an_unbroken_one_to_the_bit(
    method, settings, checkpoint, rows, tmp_path
):
    base = str(checkpoint)
    lora = LoRAConfig(rank=4, dropout=0.1)
    whole = TrainConfig(method=method, **TRAIN | settings)
    unbroken = train_pack(base, rows, lora, whole, tmp_path / "a")
    half = TrainConfig(method=method, **TRAIN | settings | {"iters": 1})
    train_pack(base, rows, lora, half, tmp_path / "b")
    resumed = train_pack(base, rows, lora, whole, tmp_path / "b", resume=True, overwrite=True)
    for name, tensor in unbroken.pack.tensors.items():
        assert mx.array_equal(tensor, resumed.pack.tensors[name]).item(), name


@pytest.mark.parametrize("method", [*OTHERS, "loftq"])
def test_experts_are_rejected(method):
    base = base_of("qwen3_moe", **SMALL_FAMILIES["qwen3_moe"])
    with raises("unsupported", None, f"--method {method}", "switch_mlp", "--target-modules"):
        attached(method, base, target_modules=("gate_proj",))
