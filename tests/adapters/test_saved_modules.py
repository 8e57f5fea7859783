"""LoRA on embeddings, and modules that are trained in full beside adapters (``--modules-to-save``)."""

import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model

from mlx_packs import LoRAConfig, Pack, TrainConfig, load_base, merge_pack, train_pack
from mlx_packs.adapters.attach import attach
from mlx_packs.adapters.lora import delta_of
from mlx_packs.adapters.saved_modules import attach_method
from mlx_packs.adapters.trainable import find_method
from mlx_packs.bases.geometry import select_targets
from mlx_packs.config.schema import DataConfig
from mlx_packs.convert.interop import export_pack, import_adapter
from mlx_packs.memory.estimate import estimate
from mlx_packs.memory.headers import Headers
from mlx_packs.nn.lora import AdaptedEmbedding
from mlx_packs.nn.wrapped import FullCopy, NoisyEmbedding
from mlx_packs.objectives.causal_lm import split_head, target_loss
from mlx_packs.objectives.frozen_activations import frozen_blocks
from mlx_packs.packs.making import pack_of
from mlx_packs.packs.weighted_sum import weighted_sum
from mlx_packs.runtime import mx
from mlx_packs.training.attached import add_noise
from mlx_packs.training.state import ADAPTERS
from tests.helpers.checkpoints import merged, write_dense
from tests.helpers.errors import raises
from tests.helpers.models import SMALL_FAMILIES, base_of
from tests.helpers.rows import CHATS, write_rows
from tests.helpers.steps import moved

TOKENS = mx.array([[5, 9, 3, 77, 12, 40], [1, 2, 3, 4, 5, 6]])
RUN = TrainConfig(iters=2, batch_size=2, max_seq_length=48, save_every=1, lr_schedule="constant")


def adapted(base, *names: str, **lora):
    return attach(base, LoRAConfig(rank=4, target_modules=names, **lora))


def attached(base, *names: str, method: str = "lora", path: str = "quantized", **lora):
    lora = LoRAConfig(rank=4, modules_to_save=names, **lora)
    return attach_method(base, lora, TrainConfig(method=method), path)


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *[("qwen3", method) for method in ("lora", "dora", "pissa", "olora")],
        *[("gpt2", "dora"), ("olmo2", "lora")],
    ],
)
def test_attach_train_detach(family, method):
    base = base_of(family)
    names = {"gpt2": ("wte", "ln_f"), "olmo2": ("lm_head", "q_norm")}.get(
        family, ("embed_tokens", "norm")
    )
    objects = {path: id(m) for path, m in base.model.named_modules()}
    before = base.model(TOKENS)
    targets = {"gpt2": ("c_fc",)}.get(family, ())  # no slices, whose zeros must stay

    trainable = attached(base, *names, method=method, target_modules=targets)
    assert mx.allclose(base.model(TOKENS), before, atol=1e-4).item()
    assert trainable.method == method and len(trainable.replaced) >= 2
    count = sum(t.size for t in trainable.tensors().values())
    assert trainable.parameter_count() <= count  # of fused projections and residuals fewer

    moved(trainable, 0.02)
    trained = base.model(TOKENS)
    assert not mx.allclose(trained, before, atol=1e-2).item()
    with trainable.disabled():
        assert mx.allclose(base.model(TOKENS), before, atol=1e-4).item()
    assert mx.array_equal(base.model(TOKENS), trained).item()

    pack = pack_of(trainable)
    trainable.detach()
    assert {path: id(m) for path, m in base.model.named_modules()} == objects
    assert mx.array_equal(base.model(TOKENS), before).item()
    assert not tree_flatten(base.model.trainable_parameters())

    with base.applied(pack):
        assert mx.allclose(base.model(TOKENS), trained, atol=1e-4).item()


@pytest.mark.parametrize(
    ("quantize", "path"), [("affine4", "quantized"), ("nf4", "transient"), ("affine4", "dense")]
)
def test_quantized_modules_are_trained_as_dense_copies(quantize, path, tmp_path):
    base = load_base(write_dense(tmp_path / "dense"), quantize)
    before = base.model(TOKENS)
    trainable = attached(base, "embed_tokens", "o_proj", "lm_head", path=path, num_layers=1)
    assert mx.allclose(base.model(TOKENS), before, atol=1e-4).item()
    tensors = trainable.tensors()
    assert tensors["lm_head.weight"].shape == (128, 128)
    assert all(tensor.dtype == mx.float32 for tensor in tensors.values())
    assert len(trainable.replaced) == 4

    moved(trainable, 0.02)
    trained = base.model(TOKENS)
    pack = pack_of(trainable)
    trainable.detach()
    with base.applied(pack):
        assert mx.allclose(base.model(TOKENS), trained, atol=1e-4).item()
    assert mx.array_equal(base.model(TOKENS), before).item()


def test_a_tied_table_counts_once_and_stays_tied_when_merged(tmp_path):
    sizes = {"vocab_size": 4096, "tie_word_embeddings": True}
    folder = write_dense(tmp_path / "base", dtype=mx.float32, **sizes)
    base = load_base(folder)
    trainable = moved(attached(base, "embed_tokens", target_modules=("q_proj",)), 0.02)
    assert trainable.replaced == {"model.embed_tokens.weight": (4096, 128)}
    plain = attached(load_base(folder), target_modules=("q_proj",))
    assert trainable.parameter_count() == plain.parameter_count() + 4096 * 128
    head = split_head(base.model)
    assert head is not None and head.frozen is None

    pack = pack_of(trainable).save(tmp_path / "pack")
    assert pack.manifest["adapters"]["replaced"][0]["head"] is True
    merged(pack, folder, tmp_path / "merged")
    result = load_base(tmp_path / "merged").model(TOKENS)
    assert mx.allclose(result, base.model(TOKENS), atol=1e-4).item()


@pytest.mark.parametrize("policy", ["none", "selective", "block"])
def test_gradients_reach_the_copies_whatever_is_recomputed(policy):
    base = base_of("qwen3")
    names = ("embed_tokens", "lm_head", "norm", "q_norm", "input_layernorm", "down_proj", "k_proj")
    trainable = moved(attached(base, *names, target_modules=("q_proj", "gate_proj")), 0.02)
    value = nn.value_and_grad(base.model, lambda: base.model(TOKENS).square().mean())
    base.model.train()
    expected = [g for _, g in sorted(tree_flatten(value()[1]))]
    trainable.recompute(policy)
    gradients = tree_flatten(value()[1])
    gradients = [g for _, g in sorted((n.replace(".block", ""), g) for n, g in gradients)]
    assert len(gradients) == len(trainable.tensors())
    for one, other in zip(gradients, expected, strict=True):
        assert mx.any(one).item() and mx.allclose(one, other, atol=1e-5).item()


def test_in_half_precision_nothing_after_a_copy_is_promoted():
    base = base_of("llama")
    base.model.set_dtype(mx.bfloat16)
    before = base.model(TOKENS)
    trainable = attached(base, "embed_tokens", "norm", "lm_head", "v_proj")
    assert any(isinstance(m, FullCopy) for m in base.model.modules())
    after = base.model(TOKENS)
    assert after.dtype == mx.bfloat16 and mx.array_equal(after, before).item()
    assert all(t.dtype == mx.float32 for t in trainable.tensors().values())
    gradients = nn.value_and_grad(base.model, lambda: base.model(TOKENS).square().mean())()[1]
    flat = dict(tree_flatten(gradients))
    add_noise(trainable, 5.0)
    assert base.model.train()(TOKENS).dtype == mx.bfloat16
    assert all(g.dtype == mx.float32 and mx.any(g).item() for n, g in flat.items() if "module" in n)


def test_what_is_frozen_below():
    def frozen(*names):
        return frozen_blocks(
            attached(base_of("qwen3"), *names, target_modules=("q_proj",), num_layers=1)
        )

    assert frozen("norm") == frozen("lm_head") == 1
    assert frozen("embed_tokens") == 0 and frozen("layers.0.mlp.down_proj") == 0


def test_default_targets_leave_saved_modules_out_and_named_ones_conflict():
    base = base_of("qwen3")
    paths = {path for path, _ in select_targets(base.model, (), -1, ("q_proj",))}
    assert paths and not any(path.endswith("q_proj") for path in paths)
    with raises("conflict", "modules_to_save", "q_proj", "--target-modules"):
        attached(base, "q_proj", target_modules=("self_attn.q_proj", "v_proj"))


@pytest.mark.parametrize(
    ("name", "code", "hint"),
    [
        ("nrm", "unknown", "'norm'"),
        ("mlp", "unsupported", "inside"),
        ("lm_head", "unknown", "embed_tokens"),
        ("switch_mlp.gate_proj", "unsupported", "switch_mlp"),
    ],
)
def test_what_cannot_be_saved_is_named(name, code, hint):
    family = "qwen3_moe" if "switch" in name else "qwen3"
    base = base_of(family, **SMALL_FAMILIES[family], tie_word_embeddings=True)
    with raises(code, "modules_to_save", name, hint):
        attached(base, name)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows"), train=CHATS, valid=CHATS[:2])


@pytest.fixture(scope="module")
def trained(rows, tmp_path_factory):
    """A base, the adapters of a run, its pack, and the logits that it gives the base."""
    folder = tmp_path_factory.mktemp("saved")
    base = write_dense(folder / "base", dtype=mx.float32, vocab_size=4096)
    names = ("lm_head", "embed_tokens", "q_norm")
    lora = LoRAConfig(rank=4, dropout=0.1, modules_to_save=names)
    run = train_pack(str(base), rows, lora, RUN, folder / "pack")
    loaded = load_base(base)
    with loaded.applied(run.pack):
        return base, lora, run, np.array(loaded.model(TOKENS))


def test_merged_is_attached(trained, rows, tmp_path):
    base, _, run, wanted = trained
    assert np.abs(wanted - np.array(load_base(base).model(TOKENS))).max() > 1e-3
    merge_pack(run.pack, base, tmp_path / "merged", data=rows, rows=2)
    result = load_base(tmp_path / "merged").model(TOKENS)
    assert np.abs(np.array(result) - wanted).max() < 1e-4


def test_a_resumed_run_is_bit_identical(trained, rows, tmp_path):
    base, lora, run, _ = trained
    half = TrainConfig(**{**vars(RUN), "iters": 1})
    train_pack(str(base), rows, lora, half, tmp_path / "b")
    checkpoint = next((tmp_path / "b-run").glob(f"step-*/{ADAPTERS}"))
    assert set(mx.load(str(checkpoint))) == set(run.pack.load_tensors())
    resumed = train_pack(str(base), rows, lora, RUN, tmp_path / "b", resume=True, overwrite=True)
    for name, tensor in run.pack.load_tensors().items():
        assert mx.array_equal(tensor, resumed.pack.tensors[name]).item(), name


def test_a_round_trip_through_peft_and_none_to_mlx_lm(trained, tmp_path):
    base, _, run, wanted = trained
    export_pack(run.pack, "peft", tmp_path / "peft")
    import_adapter(tmp_path / "peft", tmp_path / "same", base)
    (tmp_path / "peft" / "mlx_packs.json").unlink()  # by PEFT's own config
    import_adapter(tmp_path / "peft", tmp_path / "back", base)
    for name in ("same", "back"):
        loaded = load_base(base)
        with loaded.applied(Pack.open(tmp_path / name)):
            assert np.abs(np.array(loaded.model(TOKENS)) - wanted).max() < 1e-4
    for to in ("mlx-lm", "gguf"):
        with raises("unsupported", None, "in full"):
            export_pack(run.pack, to, tmp_path / "x")
    assert not (tmp_path / "x").exists() and not (run.pack.path / "adapter_config.json").exists()


def test_full_fine_tuning_and_the_proxy_have_no_use_for_it(rows, tmp_path, rejected):
    arguments = ["train", "--data", rows, "--modules-to-save", "norm", "--out", tmp_path / "p"]
    error = rejected(*arguments, "--method", "full")
    assert error.code == "conflict" and "--modules-to-save" in error.message
    with raises("conflict", None, "--modules-to-save"):
        train = TrainConfig(**{**vars(RUN), "objective": "projection-stack"})
        lora = LoRAConfig(rank=4, modules_to_save=("norm",))
        train_pack("tiny", rows, lora, train, tmp_path / "p", DataConfig())
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    ("family", "tied", "name"),
    [("qwen3", False, "embed_tokens"), ("qwen3", True, "embed_tokens"), ("gpt2", True, "wte")],
)
def test_an_adapter_is_a_delta_of_the_one_table(family, tied, name):
    base = base_of(family, tie_word_embeddings=tied)
    before = base.model(TOKENS)
    trainable = adapted(base, name)
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


def test_an_adapted_tied_head_is_no_frozen_head():
    """The loss by rows with a target has the gradient of the loss of all logits."""
    base = base_of("qwen3", tie_word_embeddings=True)
    lora = moved(adapted(base, "embed_tokens", "q_proj")).places["model.embed_tokens"].lora
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
    adapted(base, "embed_tokens").detach()
    adapted(base, "embed_tokens")
    assert split_head(base.model).frozen is not None
    base = base_of("qwen3")
    trainable = adapted(base, "lm_head")
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
    trainable = moved(adapted(base, "embed_tokens", "q_proj", *head), 0.02)
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
    pack = pack_of(adapted(base_of("qwen3"), "embed_tokens"))
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
