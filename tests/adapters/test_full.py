"""Full fine-tuning: the base's own weights are trained, with the results of plain MLX."""

import json
import shutil
from pathlib import Path

import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import load

from mlx_packs import LoRAConfig, Pack, TrainConfig, load_base, merge_pack, train_pack
from mlx_packs.adapters.full import unfreeze
from mlx_packs.convert.interop import export_pack
from mlx_packs.data.encoding import Example
from mlx_packs.evaluation.perplexity import Scorer
from mlx_packs.memory.estimate import estimate
from mlx_packs.memory.headers import Headers
from mlx_packs.memory.plan import ERROR
from mlx_packs.nn.quantized import count_weights
from mlx_packs.objectives.causal_lm import split_head
from mlx_packs.optim import make_optimizer
from mlx_packs.runtime import mx
from tests.helpers.checkpoints import write_checkpoint, write_quantized
from tests.helpers.errors import check, raises
from tests.helpers.memory import active_bytes
from tests.helpers.models import base_of
from tests.helpers.rows import chat, write_rows
from tests.helpers.steps import lm_stepper, loss_sum, make_batch
from tests.helpers.variants import nightly_except

FAMILIES = {
    "qwen3": {},
    "qwen3 tied": {"tie_word_embeddings": True},
    "gpt2": {},
    "gemma2": {"head_dim": 32},
}
TOKENS = np.random.default_rng(0).integers(0, 128, (2, 13))
ROWS = [chat(f"Say {word}.", f"{word}, I say, {word}.") for word in "yes no one two".split()]
SETTINGS = {"method": "full", "iters": 4, "batch_size": 2, "max_seq_length": 48, "save_every": 2}
SETTINGS |= {"learning_rate": 1e-2, "lr_schedule": "constant", "val_batches": 0}
FULL = TrainConfig(**SETTINGS)


def family(name: str):
    return base_of(name.split()[0], **FAMILIES[name])


def batch():
    rows = [Example(t.astype(np.int32), np.arange(13) > 3, "x") for t in TOKENS]
    return make_batch(rows, [0, 1], 2, 12)


def named(gradients: dict) -> dict:
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


def test_half_precision_learns_in_float32():
    base = family("qwen3")
    base.model.set_dtype(mx.bfloat16)
    learning = unfreeze(base)
    assert {t.dtype for t in learning.tensors().values()} == {mx.float32}
    learning.detach()
    assert {a.dtype for _, a in tree_flatten(base.model.parameters())} == {mx.bfloat16}


def test_a_packed_base_is_refused_with_what_works(shared_tiny):
    with raises("conflict", "method", "affine 4-bit g64", "--matmul-path dense"):
        unfreeze(shared_tiny)
    learning = unfreeze(shared_tiny, matmul_path="dense")
    assert learning.parameter_count() == count_weights(shared_tiny.model) > 6e6
    learning.detach()
    assert isinstance(shared_tiny.model.layers[0].mlp.up_proj, nn.QuantizedLinear)


def test_a_table_that_is_only_looked_up_is_trained_too():
    base = family("qwen3")
    nn.quantize(base.model, group_size=32, bits=4)
    table = base.model.model.embed_tokens
    learning = unfreeze(base, matmul_path="dense")
    assert learning.tensors()["model.embed_tokens.weight"].dtype == mx.float32
    learning.detach()
    assert base.model.model.embed_tokens is table


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recompute", "layers", "optimizer", "rows", "length"),
    [
        ("block", -1, "adamw", 4, 128),
        ("selective", 2, "adamw", 4, 128),
        ("none", -1, "adamw_8bit", 2, 64),
    ],
)
def test_the_plan_is_no_less_than_a_step_takes(
    recompute, layers, optimizer, rows, length, nothing_ahead
):
    """With nothing allocated ahead, which a step of a run does by up to nine pieces of logits."""
    settings = {"recompute": recompute, "optimizer": optimizer, "batch_size": rows}
    train = TrainConfig(method="full", max_seq_length=length + 1, **settings)
    sizes = {"hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 768}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    base = base_of("qwen3", vocab_size=4096, tie_word_embeddings=True, **sizes, **heads)

    tokens = np.arange(length + 1, dtype=np.int32)
    result = make_batch([Example(tokens, tokens > 0, "x")] * rows, range(rows), rows, length)
    shape = (length, len(result.inputs["targets"]))
    planned = estimate(Headers.of(base), LoRAConfig(num_layers=layers), train, [shape])

    before = active_bytes() - sum(a.nbytes for _, a in tree_flatten(base.model.parameters()))
    learning = unfreeze(base, layers)
    learning.recompute(recompute)
    optimizer = make_optimizer(train)
    optimizer.init(base.model.trainable_parameters())
    stepper = lm_stepper(base.model, optimizer)
    base.model.train()
    mx.eval(base.model.parameters(), optimizer.state)

    for _ in range(2):
        mx.reset_peak_memory()
        stepper(result, True, True)
    measured = mx.get_peak_memory() - before

    assert measured / (1 + ERROR) < planned.peak_bytes < 1.75 * measured


@pytest.mark.parametrize("policy", nightly_except(["none", "block"], seconds=10))
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


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("dense") / "base")


@pytest.fixture(scope="module")
def full_data(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "d", train=ROWS, valid=ROWS[:2])


@pytest.fixture(scope="module")
def other_bytes() -> int:
    """Bytes of arrays that other tests keep."""
    return active_bytes()


@pytest.fixture(scope="module")
def full_run(checkpoint, full_data, tmp_path_factory, other_bytes):
    out = tmp_path_factory.mktemp("trained") / "p"
    return train_pack(checkpoint, full_data, train=FULL, out=out)


@pytest.fixture
def full_copy(full_run, tmp_path) -> Path:
    return shutil.copytree(full_run.pack.path.parent, tmp_path / "copy") / "p"


def test_held_out_perplexity_falls_and_the_ratio_is_told(full_run, checkpoint, other_bytes):
    report, manifest = full_run.report, full_run.pack.manifest
    stored = mx.load(str(checkpoint / "model.safetensors"))
    assert report["ppl_after"] < 0.5 * report["ppl_before"]
    assert report["method"] == manifest["method"] == "full"

    count = sum(t.size for t in stored.values())
    assert report["trainable_parameters"] == report["base_weights"] == count
    assert report["plan_peak_gb"] * (1 + ERROR) > report["peak_gb"] - other_bytes / 1e9

    recipe = manifest["recipe"]
    assert recipe["method"] == "full" and "rank" not in recipe and recipe["num_layers"] == -1

    tensors = mx.load(str(full_run.pack.path / "adapters.safetensors"))
    assert set(tensors) == set(stored) == {t["name"] for t in manifest["adapters"]["replaced"]}

    card = (full_run.pack.path / "README.md").read_text()
    assert f"in {len(stored)} tensors of the base, stored in full" in card
    assert "lora" not in card.lower()


def test_the_pack_exported_and_merged_computes_the_same(full_run, checkpoint, full_data, tmp_path):
    tokens, base = mx.array(TOKENS), load_base(checkpoint)
    with base.applied(full_run.pack):
        wanted = base.model(tokens)
    export_pack(full_run.pack, "mlx-lm", tmp_path / "theirs")
    for folder in (full_run.pack.path, tmp_path / "theirs"):
        model, _ = load(str(checkpoint), adapter_path=str(folder))
        assert mx.allclose(model(tokens), wanted, atol=1e-4).item()
    report = merge_pack(full_run.pack, checkpoint, tmp_path / "m", data=full_data / "valid.jsonl")
    assert report["passed"] and report["kl_mean"] < 1e-6
    assert mx.allclose(load_base(tmp_path / "m").model(tokens), wanted, atol=1e-4).item()


def test_a_resumed_run_equals_the_unbroken_one_to_the_bit(
    full_run, checkpoint, full_data, tmp_path
):
    half = TrainConfig(**SETTINGS | {"iters": 2})
    train_pack(checkpoint, full_data, train=half, out=tmp_path / "b")
    resumed = train_pack(checkpoint, full_data, train=FULL, out=tmp_path / "b", resume=True)
    assert resumed.report["ppl_after"] == full_run.report["ppl_after"]
    for name, tensor in full_run.pack.load_tensors().items():
        assert mx.array_equal(tensor, resumed.pack.tensors[name]).item(), name


def test_resume_takes_the_method_of_the_run(full_copy, checkpoint, full_data, run):
    resume = ("train", "--resume", "--out", full_copy)
    code, out, err = run(*resume, "--iters", 5, "--json")
    assert code == 0 and json.loads(out)["method"] == "full", err
    assert "rank" not in json.loads((full_copy.parent / "p-run/config.json").read_text())["recipe"]
    assert run(*resume, "--iters", 6, "--rank", 4)[0] == 2
    check(run.error, "conflict", "rank")
    with raises("mismatch", "method", "'full'", "'lora'"):
        lora = TrainConfig(**SETTINGS | {"method": "lora"})
        train_pack(checkpoint, full_data, train=lora, out=full_copy, resume=True)


def test_a_pack_on_a_packed_base_brings_dense_weights(checkpoint, full_data, tmp_path, run):
    folder = write_quantized(tmp_path / "packed", checkpoint)
    arguments = "--method full --matmul-path dense --num-layers 1 --iters 1 --val-batches 0 -q"
    places = ("--model", folder, "--data", full_data, "--out", tmp_path / "p")
    code, _, err = run("train", *arguments.split(), *places)
    assert code == 0, err

    pack = Pack.open(tmp_path / "p")
    base = load_base(folder)
    assert not (tmp_path / "p" / "adapter_config.json").exists()  # stock mlx-lm could not load it
    with base.applied(pack):
        assert isinstance(base.model.layers[1].mlp.up_proj, nn.Linear)
        assert isinstance(base.model.layers[0].mlp.up_proj, nn.QuantizedLinear)
    assert isinstance(base.model.layers[1].mlp.up_proj, nn.QuantizedLinear)

    assert "tensors of the base, stored in full" in run("inspect", tmp_path / "p")[1]
    shown = run("apply", tmp_path / "p", "--model", folder, "--dry-run")[1]
    assert "11 tensors stored in full" in shown

    for to in ("peft", "mlx-lm"):
        code, _, err = run("export", tmp_path / "p", "--to", to, "--out", tmp_path / "x")
        assert code == 2 and len(err.splitlines()) == 1
        check(run.error, "unsupported", None, str(tmp_path / "p"))
        assert not (tmp_path / "x").exists()
    assert run("diff", tmp_path / "p", tmp_path / "p")[0] == 2
    check(run.error, "mismatch", None, str(tmp_path / "p"))


@pytest.mark.parametrize(
    ("flags", "setting"),
    [
        ("--target-modules q_proj", "target_modules"),
        ("--matmul-path transient", "matmul_path"),
        ("--cache-frozen on", "cache_frozen"),
        ("--compute-dtype bfloat16", "compute_dtype"),
        ("--fine-tune-type lora", "fine_tune_type"),
        ("", "method"),  # of a quantized base
    ],
)
def test_what_means_nothing_beside_full_is_rejected(flags, setting, rejected, full_data, tmp_path):
    data = ("--data", full_data, "--out", tmp_path / "p")
    check(rejected("train", "--method", "full", *flags.split(), *data), "conflict", setting)
    assert not list(tmp_path.glob("p*"))
