"""Full fine-tuning: the base's own weights are trained, with the results of plain MLX."""

import json
import shutil
from pathlib import Path

import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import load

from mlx_packs import LoRAConfig, Pack, TrainConfig, evaluate, load_base, merge_pack, train_pack
from mlx_packs.adapters.attach import attach
from mlx_packs.adapters.full import unfreeze
from mlx_packs.adapters.imported import attach_inference_only
from mlx_packs.config.recipe import resolve
from mlx_packs.convert.interop import export_pack
from mlx_packs.data.encoding import Example
from mlx_packs.display import NORMAL, Display
from mlx_packs.evaluation.perplexity import Scorer
from mlx_packs.memory.estimate import estimate
from mlx_packs.memory.headers import Headers
from mlx_packs.memory.plan import ERROR
from mlx_packs.nn.quantized import apply_matmul_path, count_weights
from mlx_packs.objectives.causal_lm import split_head
from mlx_packs.optim import make_optimizer
from mlx_packs.runtime import mx
from tests.helpers.errors import check, raises
from tests.helpers.memory import active_bytes
from tests.helpers.models import base_of
from tests.helpers.rows import chat, write_rows
from tests.helpers.steps import lm_stepper, loss_sum, make_batch

FAMILIES = {
    "qwen3": {},
    "qwen3 tied": {"tie_word_embeddings": True},
    "gpt2": {},
    "gemma2": {"head_dim": 32},
}
TOKENS = np.random.default_rng(0).integers(0, 128, (2, 13))
ROWS = [chat(f"Say {word}.", f"{word}, I say, {word}.") for word in "yes no one two".split()]
FULL = TrainConfig(
    method="full",
    iters=4,
    batch_size=2,
    max_seq_length=48,
    learning_rate=1e-3,
    val_batches=0,
    save_every=2,
    matmul_path="dense",
)


def family(name: str):
    return base_of(name.split()[0], **FAMILIES[name])


def batch():
    rows = [Example(t.astype(np.int32), np.arange(13) > 3, "x") for t in TOKENS]
    return make_batch(rows, [0, 1], 2, 12)


def named(gradients: dict) -> dict:
    """Gradients by the name that the parameter has in the base."""
    return {name.replace(".block.", "."): g for name, g in tree_flatten(gradients)}


def plain_gradients(model: nn.Module) -> tuple[float, dict]:
    """Of the mean loss, by MLX's autograd through the model's own forward."""
    tokens, target = mx.array(TOKENS), mx.arange(1, 13) > 3

    def loss(model):
        nll = nn.losses.cross_entropy(model(tokens[:, :-1]).astype(mx.float32), tokens[:, 1:])
        return (nll * target).sum() / (2 * target.sum())

    model.unfreeze()
    value, gradients = nn.value_and_grad(model, loss)(model)
    model.freeze()
    return value.item(), named(gradients)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("policy", ["none", "selective", "block"])
def test_gradients_are_those_of_plain_mlx(name, policy):
    base = family(name)
    expected, wanted = plain_gradients(base.model)
    learning = unfreeze(base)
    learning.recompute(policy)
    head = split_head(base.model)
    assert head is None or head.frozen is None
    base.model.train()
    built = batch()
    value, result = nn.value_and_grad(
        base.model, lambda batch: loss_sum(base.model, head, batch) / built.denominator
    )(built)
    result = named(result)
    assert value.item() == pytest.approx(expected, rel=1e-6)
    assert set(result) == set(wanted) == set(learning.tensors())
    for weight, gradient in wanted.items():
        largest = mx.abs(gradient).max().item()
        assert mx.abs(result[weight] - gradient).max().item() <= 2e-5 * largest + 1e-8, weight


def test_detach_gives_the_base_back_to_the_bit():
    base = family("qwen3")
    tokens = mx.array(TOKENS)
    modules = {path: id(m) for path, m in base.model.named_modules()}
    before, logits = dict(tree_flatten(base.model.parameters())), base.model(tokens)
    learning = unfreeze(base)
    learning.recompute("block")
    learning.load({n: t + 0.01 for n, t in learning.tensors().items()}, "test")
    assert not mx.array_equal(base.model(tokens), logits).item()
    learning.detach()
    learning.detach()
    after = dict(tree_flatten(base.model.parameters()))
    assert all(after[name] is before[name] for name in before)
    assert {path: id(m) for path, m in base.model.named_modules()} == modules
    assert not tree_flatten(base.model.trainable_parameters())
    assert mx.array_equal(base.model(tokens), logits).item()


def test_the_last_blocks_alone_learn_as_in_mlx_lm():
    base = family("qwen3")
    learning = unfreeze(base, num_layers=1)
    assert all(name.startswith("model.layers.1.") for name in learning.tensors())
    inside = base.model.layers[1].parameters()
    assert learning.parameter_count() == sum(a.size for _, a in tree_flatten(inside))
    assert split_head(base.model).frozen is not None  # sliced, as beside adapters
    learning.detach()
    with raises("mismatch", "num_layers", "9", "2 blocks"):
        unfreeze(base, num_layers=9)


def test_a_tied_table_is_one_tensor():
    learning = unfreeze(family("qwen3 tied"))
    assert [n for n in learning.tensors() if "embed" in n or "head" in n] == [
        "model.embed_tokens.weight"
    ]
    assert learning.parameter_count() == count_weights(learning.model)


def test_any_module_is_unfrozen_and_comes_back():
    """No blocks, no head, a weight on a module with children: an encoder's, for one."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(8, 8)
            self.gain = mx.ones(8)

        def __call__(self, x):
            return self.gain * self.proj(x)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.norm = Inner(), nn.LayerNorm(8)

        def __call__(self, x):
            return self.norm(self.inner(x))

    base = family("qwen3")
    base.model = Net()
    base.model.freeze()
    x = mx.ones((2, 8))
    before = base.model(x)
    learning = unfreeze(base)
    assert sorted(learning.tensors()) == [
        "inner.gain",
        "inner.proj.bias",
        "inner.proj.weight",
        "norm.bias",
        "norm.weight",
    ]
    learned = {name: tensor + 1 for name, tensor in learning.tensors().items()}
    learning.load(learned, "test")
    after = base.model(x)
    assert not mx.array_equal(after, before).item()
    learning.detach()
    assert mx.array_equal(base.model(x), before).item()
    applied = attach(base, specs={})  # as a pack that stores full tensors
    attach_inference_only(applied, {}, learning.replaced, learned, "test")
    assert mx.array_equal(base.model(x), after).item()
    applied.detach()
    assert mx.array_equal(base.model(x), before).item()


def test_half_precision_learns_in_float32():
    base = family("qwen3")
    base.model.set_dtype(mx.bfloat16)
    learning = unfreeze(base)
    assert {t.dtype for t in learning.tensors().values()} == {mx.float32}
    learning.detach()
    assert {a.dtype for _, a in tree_flatten(base.model.parameters())} == {mx.bfloat16}


def test_a_packed_base_is_refused_with_what_works(tiny):
    with raises("conflict", "method", "affine 4-bit g64", "--matmul-path dense"):
        unfreeze(tiny)
    learning = unfreeze(tiny, matmul_path="dense")
    assert learning.parameter_count() == count_weights(tiny.model) > 6e6
    learning.detach()
    assert isinstance(tiny.model.layers[0].mlp.up_proj, nn.QuantizedLinear)


def test_count_weights_sees_through_packing(tiny):
    packed = count_weights(tiny.model)
    apply_matmul_path(tiny.model, "dense")
    assert packed == count_weights(tiny.model)
    assert packed == sum(a.size for _, a in tree_flatten(tiny.model.parameters()))


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recompute", "changes"),
    [
        ("none", {}),
        slow("block", {}),
        slow("selective", {}),
        slow("none", {"num_layers": 2}),
        slow("none", {"batch_size": 1, "length": 32}),
        slow("none", {"optimizer": "adamw_8bit", "batch_size": 2, "length": 64}),
    ],
)
def test_the_plan_is_no_less_than_a_step_takes(recompute, changes):
    """With nothing allocated ahead, which a step of a run does by up to nine pieces of logits."""
    length, layers = changes.get("length", 128), changes.get("num_layers", -1)
    train = TrainConfig(
        method="full",
        recompute=recompute,
        batch_size=changes.get("batch_size", 4),
        max_seq_length=length + 1,
        optimizer=changes.get("optimizer", "adamw"),
    )
    base = base_of(
        "qwen3",
        hidden_size=256,
        num_hidden_layers=6,
        intermediate_size=768,
        vocab_size=4096,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    rows = [
        Example(np.arange(length + 1, dtype=np.int32), np.arange(length + 1) > 0, "x")
        for _ in range(train.batch_size)
    ]
    result = make_batch(rows, list(range(train.batch_size)), train.batch_size, length)
    planned = estimate(
        Headers.of(base),
        LoRAConfig(num_layers=layers),
        train,
        [(length, len(result.inputs["targets"]))],
    )
    before = active_bytes() - sum(a.nbytes for _, a in tree_flatten(base.model.parameters()))
    learning = unfreeze(base, layers)
    learning.recompute(recompute)
    optimizer = make_optimizer(train)
    optimizer.init(base.model.trainable_parameters())
    stepper = lm_stepper(base.model, optimizer)
    base.model.train()
    mx.eval(base.model.parameters(), optimizer.state)
    limit = mx.set_memory_limit(0)  # nothing is allocated ahead, whatever else the machine does
    try:
        for _ in range(2):
            mx.reset_peak_memory()
            stepper(result, True, True)
    finally:
        mx.set_memory_limit(limit)
    measured = mx.get_peak_memory() - before
    assert measured / (1 + ERROR) < planned.peak_bytes < 1.75 * measured


def write_dense_tiny(folder: Path, dtype: mx.Dtype) -> Path:
    """The tiny base as a dense checkpoint."""
    base = load_base("tiny")
    apply_matmul_path(base.model, "dense")
    shutil.copytree(base.path, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((folder / "config.json").read_text())
    dense = {k: v for k, v in config.items() if not k.startswith("quantization")}
    (folder / "config.json").write_text(json.dumps(dense))
    weights = {n: a.astype(dtype) for n, a in tree_flatten(base.model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


@pytest.fixture(scope="module")
def dense_tiny(tmp_path_factory) -> Path:
    return write_dense_tiny(tmp_path_factory.mktemp("dense") / "base", mx.float32)


@pytest.fixture(scope="module")
def full_data(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "d", train=ROWS, valid=ROWS[:2])


@pytest.fixture(scope="module")
def other_bytes() -> int:
    """Bytes of arrays that other tests keep."""
    return active_bytes()


@pytest.fixture(scope="module")
def full_run(dense_tiny, full_data, tmp_path_factory, other_bytes):
    """A run on the dense base, made once."""
    out = tmp_path_factory.mktemp("trained") / "p"
    return train_pack(dense_tiny, full_data, train=FULL, out=out)


def test_held_out_perplexity_falls_and_the_ratio_is_told(full_run, dense_tiny, other_bytes):
    report, manifest = full_run.report, full_run.pack.manifest
    assert report["ppl_after"] < 0.5 * report["ppl_before"]
    assert report["method"] == manifest["method"] == "full"
    assert report["learned_weights"] == report["base_weights"] == 6_557_696
    assert report["plan_peak_gb"] * (1 + ERROR) > report["peak_gb"] - other_bytes / 1e9
    recipe = manifest["recipe"]
    assert recipe["method"] == "full" and "rank" not in recipe and recipe["num_layers"] == -1
    tensors = mx.load(str(full_run.pack.path / "adapters.safetensors"))
    stored = mx.load(str(dense_tiny / "model.safetensors"))
    assert set(tensors) == set(stored) == {t["name"] for t in manifest["adapters"]["replaced"]}


def test_the_pack_computes_what_was_measured_in_the_run(full_run, dense_tiny, full_data):
    report = evaluate(load_base(dense_tiny), full_run.pack.path, full_data / "valid.jsonl")
    assert report.pack.ppl == pytest.approx(full_run.report["ppl_after"], rel=1e-5)
    assert report.base.ppl == pytest.approx(full_run.report["ppl_before"], rel=1e-5)


def test_stock_mlx_lm_loads_the_pack_over_its_base(full_run, dense_tiny, tmp_path):
    export_pack(full_run.pack, "mlx-lm", tmp_path / "theirs")
    tokens = mx.array(TOKENS)
    base = load_base(dense_tiny)
    with base.applied(full_run.pack):
        wanted = base.model(tokens)
    for folder in (full_run.pack.path, tmp_path / "theirs"):
        model, _ = load(str(dense_tiny), adapter_path=str(folder))
        assert mx.allclose(model(tokens), wanted, atol=1e-4).item()


def test_the_merged_checkpoint_computes_what_the_pack_does(
    full_run, dense_tiny, full_data, tmp_path
):
    report = merge_pack(
        full_run.pack, dense_tiny, tmp_path / "merged", data=full_data / "valid.jsonl"
    )
    assert report["passed"] and report["kl_mean"] < 1e-6
    tokens, base = mx.array(TOKENS), load_base(dense_tiny)
    with base.applied(full_run.pack):
        wanted = base.model(tokens)
    assert mx.allclose(load_base(tmp_path / "merged").model(tokens), wanted, atol=1e-4).item()


@pytest.mark.slow
def test_a_resumed_run_equals_the_unbroken_one_to_the_bit(
    full_run, dense_tiny, full_data, tmp_path
):
    half = TrainConfig(**{**vars(FULL), "iters": 2, "lr_schedule": "constant"})
    whole = TrainConfig(**{**vars(FULL), "lr_schedule": "constant"})
    uninterrupted = train_pack(dense_tiny, full_data, train=whole, out=tmp_path / "a")
    train_pack(dense_tiny, full_data, train=half, out=tmp_path / "b")
    resumed = train_pack(dense_tiny, full_data, train=whole, out=tmp_path / "b", resume=True)
    assert resumed.report["ppl_after"] == uninterrupted.report["ppl_after"]
    for name, tensor in uninterrupted.pack.tensors.items():
        assert mx.array_equal(tensor, resumed.pack.tensors[name]).item(), name
    with raises("mismatch", "method", "'full'", "'lora'"):
        lora = TrainConfig(**{**vars(whole), "method": "lora"})
        train_pack(dense_tiny, full_data, train=lora, out=tmp_path / "b", resume=True)


def test_resume_takes_the_method_of_the_run(dense_tiny, full_data, tmp_path, run):
    out = tmp_path / "p"
    common = ["--data", full_data, "--model", dense_tiny, "--max-seq-length", 48, "--batch-size", 2]
    arguments = ["--method", "full", "--val-batches", 0, "--iters", 1]
    code, _, err = run("train", *common, *arguments, "--out", out)
    assert code == 0, err
    code, out_text, err = run("train", "--resume", "--out", out, "--iters", 2, "--json")
    assert code == 0 and json.loads(out_text)["method"] == "full", err
    assert "rank" not in json.loads((tmp_path / "p-run" / "config.json").read_text())["recipe"]
    code, _, err = run("train", "--resume", "--out", out, "--iters", 3, "--rank", 4)
    assert code == 2
    check(run.error, "conflict", "rank")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["none", "selective", "block"])
def test_steps_and_scores_are_the_same_compiled(policy):
    """Weights that learn are inputs of the traces, those of the scores too."""

    def learn() -> tuple[list[float], list[float]]:
        base = family("qwen3")
        learning = unfreeze(base)
        learning.recompute(policy)
        optimizer = make_optimizer(FULL)
        optimizer.init(base.model.trainable_parameters())
        head = split_head(base.model)
        stepper = lm_stepper(base.model, optimizer, head=head)
        scorer = Scorer(base.model, head)
        losses, scores = [], []
        for _ in range(3):
            base.model.train()
            losses.append(stepper(batch(), True, True)[0])
            scores.append(scorer.examples([batch()]).score.nll)
        return losses, scores

    plain = learn()
    mx.enable_compile()
    try:
        compiled = learn()
    finally:
        mx.disable_compile()
    np.testing.assert_allclose(compiled, plain, rtol=1e-4)
    assert plain[1][2] < plain[1][0]


def test_a_run_can_start_from_the_weights_of_another(full_run, dense_tiny, full_data, tmp_path):
    file = full_run.pack.path / "adapters.safetensors"
    run = train_pack(
        dense_tiny, full_data, train=FULL, out=tmp_path / "p", resume_adapter_file=str(file)
    )
    assert run.report["ppl_before"] == full_run.report["ppl_before"]
    assert run.report["ppl_after"] < full_run.report["ppl_after"]


def test_a_pack_on_a_packed_base_brings_dense_weights(tiny, full_data, tmp_path, run):
    code, _, err = run(
        "train",
        "--method",
        "full",
        "--matmul-path",
        "dense",
        "--num-layers",
        1,
        "--iters",
        2,
        "--data",
        full_data,
        "--out",
        tmp_path / "p",
        "--val-batches",
        0,
        "--json",
        "-q",
    )
    assert code == 0, err
    pack = Pack.open(tmp_path / "p")
    assert not (tmp_path / "p" / "adapter_config.json").exists()  # stock mlx-lm could not load it
    with tiny.applied(pack):
        assert isinstance(tiny.model.layers[5].mlp.up_proj, nn.Linear)
        assert isinstance(tiny.model.layers[4].mlp.up_proj, nn.QuantizedLinear)
    assert isinstance(tiny.model.layers[5].mlp.up_proj, nn.QuantizedLinear)
    code, out, _ = run("inspect", tmp_path / "p")
    assert code == 0 and "tensors of the base, stored in full" in out
    code, out, _ = run("list", tmp_path)
    assert code == 0 and "full" in out
    code, out, _ = run("apply", tmp_path / "p", "--model", "tiny", "--dry-run")
    assert code == 0 and "11 tensors stored in full" in out
    for to in ("peft", "mlx-lm"):
        code, _, err = run("export", tmp_path / "p", "--to", to, "--out", tmp_path / "x")
        assert code == 2 and len(err.splitlines()) == 1
        check(run.error, "unsupported", None, str(tmp_path / "p"))
        assert not (tmp_path / "x").exists()
    assert run("diff", tmp_path / "p", tmp_path / "p")[0] == 2
    check(run.error, "mismatch", None, str(tmp_path / "p"))


def test_a_card_says_what_was_trained(full_run):
    card = (full_run.pack.path / "README.md").read_text()
    assert "68 of its tensors fine-tuned in full" in card and "lora" not in card.lower()


@pytest.mark.parametrize(
    ("flags", "setting"),
    [
        (["--rank", "16"], "rank"),
        (["--alpha", "4"], "alpha"),
        (["--dropout", "0.1"], "dropout"),
        (["--target-modules", "q_proj"], "target_modules"),
        (["--quantize", "nf4"], "quantize"),
        (["--matmul-path", "transient"], "matmul_path"),
        (["--cache-frozen", "on"], "cache_frozen"),
        (["--train-fp16-fallback"], "train_fp16_fallback"),
        (["--compute-dtype", "bfloat16"], "compute_dtype"),
        (["--fine-tune-type", "lora"], "fine_tune_type"),
        ([], "method"),
    ],
)
def test_what_means_nothing_beside_full_is_rejected(flags, setting, run, full_data, tmp_path):
    out = tmp_path / "p"
    code, _, err = run("train", "--method", "full", *flags, "--data", full_data, "--out", out)
    assert code == 2 and len(err.splitlines()) == 1
    check(run.error, "conflict", setting)
    assert not out.exists() and not (tmp_path / "p-run").exists()


def test_settings_of_adapters_are_refused_in_python_too(tiny, full_data):
    with raises("conflict", "rank"):
        train_pack(tiny, full_data, LoRAConfig(rank=4), FULL)


def test_mlx_lms_key_is_the_method_and_flags_override_files():
    assert resolve({"fine_tune_type": "full"}).train.method == "full"
    assert resolve({"method": "lora"}, under=[{"fine_tune_type": "full"}]).train.method == "lora"
    with raises("unknown", "fine_tune_type", "ia3", "lora"):
        resolve({"fine_tune_type": "ia3"})


def test_a_run_that_cannot_fit_is_refused_by_the_plan(dense_tiny, full_data, tmp_path, monkeypatch):
    monkeypatch.setattr("mlx_packs.runtime.total_memory", lambda: int(1e8))
    with raises("memory", None, "--method lora"):
        train_pack(dense_tiny, full_data, train=FULL, out=tmp_path / "p")
    assert not (tmp_path / "p").exists()


def test_the_plan_of_full_is_a_command_that_can_be_run(run, dense_tiny):
    code, out, err = run("plan", "--model", dense_tiny, "--memory", 8, "--method", "full", "--json")
    (full,) = json.loads(out)
    assert code == 0 and full["method"] == "full" and full["fits"]
    assert "--method full" in full["command"] and "--rank" not in full["command"]
    code, out, _ = run("plan", "--model", dense_tiny, "--memory", 8, "--json")
    assert json.loads(out)[-1]["command"].split()[:2] == ["packs", "train"]


def test_the_share_that_learns_is_told_for_adapters_too(tiny, full_data, tmp_path, capsys):
    train = TrainConfig(**{**vars(FULL), "method": "lora", "iters": 1})
    run = train_pack(
        tiny, full_data, LoRAConfig(rank=2), train, tmp_path / "p", display=Display(NORMAL)
    )
    text = capsys.readouterr().err
    share = 100 * run.report["learned_weights"] / run.report["base_weights"]
    assert f"{share:.3g} % of 6.6 M)" in text and 0 < share < 5


def test_a_base_that_carries_adapters_is_not_unfrozen():
    base = family("qwen3")
    attached = attach(base, LoRAConfig(rank=2))
    with raises("conflict", None, "qwen3"):
        unfreeze(base)
    attached.detach()
