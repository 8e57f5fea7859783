"""What fits: counts by hand and against the table of real geometries, directions, the commands."""

import dataclasses
import json
import math
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest

from mlx_packs import LoRAConfig, PackError, TrainConfig, runtime, train_pack
from mlx_packs.adapters.lora import attach
from mlx_packs.bases.files import tiny_checkpoint
from mlx_packs.cli.recipe import read_recipes, recipe_of
from mlx_packs.cli.train import train as train_command
from mlx_packs.config.schema import DataConfig
from mlx_packs.data.batches import make_batch
from mlx_packs.data.encoding import Example
from mlx_packs.data.rows import load_rows
from mlx_packs.display import QUIET, Display
from mlx_packs.memory.plan import (
    ERROR,
    Checkpoint,
    estimate,
    fit,
    read_checkpoint,
    remedies,
    tensors_of,
)
from mlx_packs.memory.recommend import advise
from mlx_packs.objectives.causal_lm import as_arrays
from mlx_packs.optim import make_optimizer
from mlx_packs.runtime import mx
from mlx_packs.training.phases import PhasedDataset, resolve_phases
from mlx_packs.training.setup import choose_path, encode_splits, plan_paths
from tests.helpers.errors import check
from tests.helpers.models import base_of
from tests.helpers.rows import chat, write_rows
from tests.helpers.steps import lm_stepper

# hidden, FFN, blocks, heads, KV heads, vocab, tied; head_dim 128: weights and adapters at rank 16
REAL = {
    "llama-3-8b": ((4096, 14336, 32, 32, 8, 128256, False), 8.03e9, 41.94e6),
    "qwen3-0.6b": ((1024, 3072, 28, 16, 8, 151936, True), 0.60e9, 10.09e6),
    "qwen3-4b": ((2560, 9728, 36, 32, 8, 151936, True), 4.02e9, 33.03e6),
    "qwen3-8b": ((4096, 12288, 36, 32, 8, 151936, False), 8.19e9, 43.65e6),
    "qwen3-32b": ((5120, 25600, 64, 64, 8, 151936, False), 32.76e9, 134.22e6),
}


# of the size of all-MiniLM-L6-v2, whose family (BERT) has no plan
SMALL = (384, 1536, 6, 3, 3, 30522, True)


def checkpoint(name: str) -> Checkpoint:
    """A dense bfloat16 checkpoint of a real geometry: config and headers, no weights."""
    sizes = REAL[name][0] if name in REAL else SMALL
    hidden, ffn, blocks, heads, kv_heads, vocab, tied = sizes
    family = "qwen3" if name.startswith("qwen3") else "llama"
    config = {
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
    }
    q, k = heads * 128, kv_heads * 128
    shapes = {
        "self_attn.q_proj": [q, hidden],
        "self_attn.k_proj": [k, hidden],
        "self_attn.v_proj": [k, hidden],
        "self_attn.o_proj": [hidden, q],
        "mlp.gate_proj": [ffn, hidden],
        "mlp.up_proj": [ffn, hidden],
        "mlp.down_proj": [hidden, ffn],
        "input_layernorm": [hidden],
        "post_attention_layernorm": [hidden],
    }
    if family == "qwen3":
        shapes |= {"self_attn.q_norm": [128], "self_attn.k_norm": [128]}
    tensors = {"model.embed_tokens.weight": [vocab, hidden], "model.norm.weight": [hidden]}
    if not tied:
        tensors["lm_head.weight"] = [vocab, hidden]
    for i in range(blocks):
        tensors |= {f"model.layers.{i}.{n}.weight": s for n, s in shapes.items()}
    return Checkpoint(name, config, {n: {"dtype": "BF16", "shape": s} for n, s in tensors.items()})


def peak(lora: dict | None = None, matmul_path: str = "quantized", **train) -> float:
    """Estimated GB of the tiny base."""
    tiny = read_checkpoint("tiny")
    settings = TrainConfig(**{"batch_size": 4, "max_seq_length": 256, **train})
    return estimate(
        tiny.config, tiny.tensors, LoRAConfig(**(lora or {})), settings, matmul_path
    ).peak_gb


@pytest.mark.parametrize("name", REAL)
def test_counts_are_those_of_the_real_geometries(name):
    found = checkpoint(name)
    plan = estimate(found.config, found.tensors, LoRAConfig(rank=16), TrainConfig(), "dense")
    assert plan.base_weights == pytest.approx(REAL[name][1], rel=0.01)
    assert plan.adapter_weights == pytest.approx(REAL[name][2], abs=0.01e6)
    assert plan.adapters == 4 * plan.adapter_weights
    assert plan.optimizer == 8 * plan.adapter_weights


def test_parts_of_a_small_base_are_counted_by_hand():
    base = base_of("qwen3")
    plan = estimate(base.config, tensors_of(base.model), LoRAConfig(rank=4), TrainConfig(), "dense")
    # per block: q 64 -> 128, k and v 64 -> 64, o 128 -> 64, gate and up 64 -> 96, down 96 -> 64
    assert plan.adapter_weights == 2 * 4 * (192 + 2 * 128 + 192 + 3 * 160)
    linears = 2 * (64 * 128 * 2 + 64 * 64 * 2 + 3 * 64 * 96) + 2 * 128 * 64
    norms = 2 * (2 * 64 + 2 * 32) + 64
    assert plan.base_weights == linears and plan.base == 4 * (linears + norms)
    assert plan.peak_bytes == sum(plan.parts().values())


def test_counts_are_those_of_a_loaded_base(tiny):
    plan = estimate(tiny.config, tensors_of(tiny.model), LoRAConfig(rank=16), TrainConfig())
    assert plan.base == sum(a.nbytes for a in _arrays(tiny.model))
    attached = attach(tiny, LoRAConfig(rank=16))
    assert plan.adapter_weights == attached.parameter_count()
    attached.detach()


def _arrays(model):
    from mlx.utils import tree_flatten

    return [a for _, a in tree_flatten(model.parameters())]


@pytest.mark.parametrize("bits, double", [(4.127, True), (4.5, False)])
def test_nf4_takes_its_bits_a_weight(bits, double):
    found = checkpoint("qwen3-4b")
    train = TrainConfig(quantize="nf4", double_quant=double)
    plan = estimate(found.config, found.tensors, LoRAConfig(), train, "quantized")
    assert plan.base == pytest.approx(4.02e9 * bits / 8, rel=0.002)


def test_dense_copies_of_nf4_are_not_unpacked_again():
    found = checkpoint("qwen3-4b")
    train = TrainConfig(quantize="nf4", recompute="none")

    def working(path: str) -> int:
        return estimate(found.config, found.tensors, LoRAConfig(), train, path).most()["working"]

    kept = TrainConfig(recompute="none")
    dense = estimate(found.config, found.tensors, LoRAConfig(), kept, "dense")
    assert working("dense") == dense.most()["working"] != working("quantized")


@pytest.mark.parametrize("optimizer, each", [("adamw", 8), ("lion", 4), ("adamw_8bit", 2.03)])
def test_optimizer_takes_its_bytes_a_weight(optimizer, each):
    found = checkpoint("qwen3-4b")
    train = TrainConfig(optimizer=optimizer)
    plan = estimate(found.config, found.tensors, LoRAConfig(), train)
    assert plan.optimizer == pytest.approx(each * plan.adapter_weights, rel=0.01)


def test_more_work_takes_more_and_recomputing_less():
    assert peak() < peak(batch_size=8)
    assert peak() < peak(max_seq_length=512)
    assert peak() < peak({"rank": 64})
    assert peak({"num_layers": 2}) < peak()
    assert peak({"target_modules": ("q_proj", "v_proj")}) < peak()
    assert (
        peak(grad_checkpoint=True) < peak(recompute="selective") < peak(recompute="none") == peak()
    )
    assert peak() < peak(matmul_path="dense")


def on_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(runtime, "on_cpu", lambda: False)


# best (method, quantize, length) on a CPU and on a GPU, None where nothing fits
ADVICE = [
    ("small", 8, ("lora-fp32", "none", 2048), ("lora-fp32", "none", 2048)),
    ("small", 64, ("lora-fp32", "none", 2048), ("lora-fp32", "none", 2048)),
    ("qwen3-4b", 8, ("qlora", "nf4", 2048), ("qlora", "affine4", 2048)),
    ("qwen3-4b", 16, ("qlora", "nf4", 2048), ("lora", "none", 2048)),
    ("qwen3-4b", 24, ("lora-fp32", "none", 2048), ("lora", "none", 2048)),
    ("llama-3-8b", 8, ("qlora", "nf4", 1024), ("qlora", "nf4", 2048)),
    ("llama-3-8b", 16, ("qlora", "nf4", 2048), ("qlora", "affine4", 2048)),
    ("llama-3-8b", 24, ("qlora", "nf4", 2048), ("lora", "none", 2048)),
    ("llama-3-8b", 64, ("lora-fp32", "none", 2048), ("lora", "none", 2048)),
]


@pytest.mark.parametrize("name, gb, on_cpu, on_gpu", ADVICE)
def test_what_comes_first(name, gb, on_cpu, on_gpu, monkeypatch):
    for best, device in ((on_cpu, "cpu"), (on_gpu, "gpu")):
        if device == "gpu":
            on_a_gpu(monkeypatch)
        first = advise(checkpoint(name), int(gb * 1e9))[0]
        found = (first.method, first.quantize, first.train.max_seq_length)
        assert (found if first.fits else None) == best, device


def test_a_small_base_is_not_to_be_quantized():
    best = advise(checkpoint("small"), int(16e9))[0]
    assert best.plan.base_weights == pytest.approx(22.7e6, rel=0.2)
    assert best.method == "lora-fp32" and best.fits and "small" in best.why


def test_what_fits_comes_first_and_what_is_learned_before_precision(monkeypatch):
    on_a_gpu(monkeypatch)
    for gb in (8, 16, 24, 64):
        *ways, full = advise(checkpoint("qwen3-4b"), int(gb * 1e9))
        states = [("fits", "tight", "no").index(option.fit) for option in ways]
        assert states == sorted(states) and full.method == "full"
        fitting = [(-o.lora.rank, -o.train.max_seq_length) for o in ways if o.fits]
        assert fitting == sorted(fitting)


def given_up(memory: float, asked=frozenset()) -> tuple:
    """(rank, length, recompute, batch) of NF4 on Qwen3-4B."""
    train = TrainConfig(quantize="nf4")
    asked = asked | {"quantize"}
    best = advise(checkpoint("qwen3-4b"), int(memory * 1e9), train=train, asked=asked)[0]
    settings = best.train
    return (
        best.lora.rank,
        settings.max_seq_length,
        settings.recomputes,
        settings.batch_size,
    )


def test_batch_gives_way_before_time_length_and_rank():
    assert given_up(256) == (16, 2048, "none", 4)
    assert given_up(60) == (16, 2048, "none", 2)
    assert given_up(30) == (16, 2048, "none", 1)
    assert given_up(20) == (16, 2048, "selective", 1)
    assert given_up(16) == (16, 2048, "block", 4)
    assert given_up(6) == (16, 2048, "block", 1)
    assert given_up(4) == (16, 1024, "block", 1)
    assert given_up(3.5) == (16, 512, "block", 1)
    assert given_up(3.2) == (8, 512, "block", 1)
    assert given_up(10, frozenset({"batch_size"})) == (16, 1024, "block", 4)
    told = advise(checkpoint("qwen3-4b"), int(8e9))[0].why
    assert "batch 2 instead of 4, blocks recomputed" in told


def test_rows_are_planned_no_longer_than_the_base_reads():
    found = checkpoint("small")
    found.config["max_position_embeddings"] = 512
    assert advise(found, int(64e9))[0].train.max_seq_length == 512


def test_full_fine_tuning_takes_16_bytes_a_weight_beside_the_base_and_float32_activations(
    monkeypatch,
):
    on_a_gpu(monkeypatch)
    known = checkpoint("qwen3-4b")
    full = advise(known, int(16e9))[-1]
    weights, parts = full.plan.base_weights, full.plan.parts()
    assert (parts["optimizer"], parts["adapters"]) == (8 * weights, 4 * weights)
    assert parts["base"] == pytest.approx(2 * weights, rel=0.01)  # as stored, in bfloat16
    assert full.plan.most()["gradients"] == 4 * weights
    assert full.train.batch_size == 1 and "16 bytes a weight" in full.why
    # inputs of 36 blocks of one row, in float32
    assert full.plan.most()["activations"] > 36 * (full.train.max_seq_length - 1) * 2560 * 4
    assert full.plan.peak_bytes > 18 * weights and "--method full" in full.command("m")


def test_parts_add_up_to_the_peak_and_each_is_largest_somewhere():
    tiny = read_checkpoint("tiny")
    plan = estimate(tiny.config, tiny.tensors, LoRAConfig(), TrainConfig(), "dense")
    assert sum(plan.parts().values()) == plan.peak_bytes
    assert plan.most()["gradients"] == 4 * plan.adapter_weights
    assert all(plan.most()[name] >= size for name, size in plan.parts().items())
    assert plan.most()["logits"] > 0 and plan.most()["working"] > 0


def test_one_rule_says_what_fits():
    tiny = read_checkpoint("tiny")
    plan = estimate(tiny.config, tiny.tensors, LoRAConfig(), TrainConfig(), "dense")
    assert fit(plan, int(plan.peak_bytes * (1 + ERROR)) + 1) == "fits"
    assert fit(plan, int(plan.peak_bytes * (1 + ERROR)) - 1) == "tight"
    assert fit(plan, plan.peak_bytes) == "tight" and fit(plan, plan.peak_bytes - 1) == "no"


def test_what_is_asked_for_is_not_searched():
    train = TrainConfig(batch_size=3, max_seq_length=300)
    asked = frozenset({"batch_size", "max_seq_length"})
    for option in advise(read_checkpoint("tiny"), int(8e9), train=train, asked=asked):
        assert (option.train.batch_size, option.train.max_seq_length) == (3, 300)


def test_remedies_name_only_what_is_not_so_already_and_helps():
    small, tiny = checkpoint("qwen3-0.6b"), read_checkpoint("tiny")

    def told(found: Checkpoint, lora: dict, **train) -> list[str]:
        def peak(lora, train):
            path = train.matmul_path
            return estimate(found.config, found.tensors, lora, train, path).peak_bytes

        settings = TrainConfig(**{"matmul_path": "dense", **train})
        return remedies(peak, LoRAConfig(**lora), settings, found is small)

    smallest = {"batch_size": 1, "max_seq_length": 256, "grad_checkpoint": True}
    assert told(small, {"rank": 4}, **smallest) == ["--quantize nf4", "a smaller base"]
    assert told(tiny, {"rank": 4}, **smallest) == ["--matmul-path transient", "a smaller base"]
    assert told(tiny, {"rank": 4}, **smallest, matmul_path="transient") == ["a smaller base"]
    assert told(tiny, {}, matmul_path="transient") == [
        "a smaller --batch-size",
        "--recompute block",
        "a smaller --max-seq-length",
        "a smaller base",
    ]
    assert "a smaller --rank" in told(tiny, {"rank": 128}, **smallest)


def test_command_prints_a_list_of_options_and_the_next_command(run):
    code, out, _ = run("plan", "--memory", "16", "--json")
    options = json.loads(out)
    assert code == 0
    keys = "method matmul_path batch_size max_seq_length peak_gb fits why parts parts_max".split()
    assert all(set(keys) <= set(option) for option in options)
    code, out, _ = run("plan", "--memory", "16", "--grad-checkpoint")
    assert code == 0 and out.splitlines()[-1].startswith("try:    packs train --model tiny")
    assert f"{ERROR:.0%}" in out


def peak_of(command: str, found: Checkpoint) -> float:
    """The estimate for a `packs train` as its own command line reads it."""
    words = shlex.split(command)
    assert words[:2] == ["packs", "train"]
    told = dict(train_command.make_context("train", words[2:]).params)
    values = read_recipes(told.pop("configs"))
    names = {f.name for c in (LoRAConfig, TrainConfig) for f in dataclasses.fields(c)} | {"model"}
    flags = {k: v for k, v in told.items() if v is not None and k in names}
    recipe = recipe_of(flags, values)
    assert recipe.run["model"] == found.name
    return estimate(
        found.config, found.tensors, recipe.lora, recipe.train, recipe.train.matmul_path
    ).peak_gb


RECIPE = {"batch_size": 2, "lora_parameters": {"rank": 32, "scale": 2.0}, "grad_checkpoint": True}


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--memory 8",
        "--memory 0.3",
        "--memory 16 --optimizer adamw_8bit --num-layers 2",
        "--memory 16 --grad-accumulation-steps 4 --target-modules q_proj,v_proj -c FILE",
        "--memory 16 -c FILE --no-grad-checkpoint",
        "--memory 64 --model DENSE -c FILE",
        "--memory 8 --model DENSE --quantize nf4 --keep embed_tokens --no-double-quant",
        "--memory 8 --model DENSE --compute-dtype float32",
        "--memory 4 --model DENSE",
        "--memory 8 --rank-pattern q_proj=64,v_proj=2",
    ],
)
def test_the_printed_command_has_the_peak_that_is_shown(flags, device, run, tmp_path, monkeypatch):
    if device == "gpu":
        on_a_gpu(monkeypatch)
    folder = write_headers(tmp_path / "a dense base", checkpoint("small"))
    (tmp_path / "c.yaml").write_text(json.dumps(RECIPE))
    names = {"FILE": str(tmp_path / "c.yaml"), "DENSE": str(folder)}
    arguments = [names.get(word, word) for word in flags.split()]
    code, out, err = run("plan", "--json", *arguments)
    assert code == 0, err
    found = read_checkpoint(folder if "DENSE" in flags else "tiny")
    *ways, _ = json.loads(out)
    for option in ways:
        assert peak_of(option["command"], found) == option["peak_gb"], option["command"]
    _, out, _ = run("plan", *arguments)
    assert out.splitlines()[-1] == f"try:    {ways[0]['command']}"


def test_flags_and_files_are_what_is_planned(run, tmp_path):
    (tmp_path / "c.yaml").write_text(json.dumps(RECIPE))
    code, out, _ = run("plan", "--memory", "64", "--json", "-c", tmp_path / "c.yaml")
    best = json.loads(out)[0]
    assert code == 0
    assert (best["rank"], best["batch_size"], best["recompute"]) == (32, 2, "block")
    wider = run("plan", "--json", "--memory", "64", "--rank-pattern", "q_proj=64")[1]
    accumulated = run("plan", "--json", "--memory", "64", "--grad-accumulation-steps", "4")[1]
    plain = run("plan", "--json", "--memory", "64")[1]
    weights = json.loads(plain)[0]["adapter_weights"]
    assert json.loads(wider)[0]["adapter_weights"] > weights
    more = [json.loads(out)[0]["parts"]["gradients"] for out in (plain, accumulated)]
    assert more[1] - more[0] == 4 * weights


@pytest.mark.parametrize("columns", [60, 100])
@pytest.mark.parametrize("memory", ["0.05", "8"])
def test_the_table_fits_the_terminal(columns, memory, run, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = run("plan", "--memory", memory)[1].splitlines()
    assert max(len(line) for line in lines[:-1]) <= columns  # the command is one line, to be copied
    assert ("50.0 MB" if memory == "0.05" else "8.00 GB") in lines[0]


def test_where_nothing_fits_it_says_what_is_left_to_do(run):
    last = run("plan", "--memory", "0.02")[1].splitlines()[-1]
    assert last == "try:    a smaller base or more memory"
    asked = ["--batch-size", "4", "--no-grad-checkpoint", "--rank", "16"]
    last = run("plan", "--memory", "0.02", *asked)[1].splitlines()[-1]
    assert "--batch-size" in last and "--recompute" not in last and "--quantize" not in last


@pytest.mark.parametrize("quantize", ["nf4", "affine8"])
def test_plan_and_train_refuse_to_quantize_what_is_quantized_in_one_line(quantize, run, tmp_path):
    planned = run("plan", "--quantize", quantize)
    trained = run("train", "--quantize", quantize, "--out", tmp_path / "p")
    assert planned[0] == trained[0] == 2 and planned[2] == trained[2]
    assert "quantized already" in planned[2]


def test_plan_knows_an_nf4_base_as_it_is_stored(run, tmp_path):
    found = checkpoint("small")
    dense = write_headers(tmp_path / "dense", found)
    out = tmp_path / "nf4"
    assert run("quantize", "--model", dense, "--out", out)[0] == 0
    code, told, _ = run("plan", "--model", out, "--quantize", "nf4", "--memory", "64", "--json")
    assert code == 0
    for option in json.loads(told)[:-1]:
        assert peak_of(option["command"], read_checkpoint(out)) == option["peak_gb"]
    code, _, err = run("plan", "--model", out, "--quantize", "nf4", "--no-double-quant")
    assert code == 2 and "double-quantized" in err
    code, _, err = run("plan", "--model", out, "--quantize", "nf4", "--keep", "q_proj")
    assert code == 2 and "--keep q_proj" in err


@pytest.mark.parametrize(
    "wrong",
    [
        ["--memory", "-1"],
        ["--rank", "0"],
        ["--model", "/nowhere/at-all"],
        ["--num-layers", "99"],
        ["--target-modules", "q_prj"],
        ["--rank-pattern", "q_prj=2"],
        ["--batch-size", "many"],
    ],
)
def test_bad_input_is_one_line_and_exit_2(wrong, run):
    code, out, err = run("plan", *wrong)
    assert code == 2 and out == "" and err.startswith("packs: ") and len(err.splitlines()) == 1


def test_an_unknown_family_has_no_plan(tmp_path):
    with pytest.raises(PackError, match="no plan for model_type 'gpt2'"):
        estimate({"model_type": "gpt2"}, {}, LoRAConfig(), TrainConfig())


def test_a_hub_id_is_planned_by_its_headers(monkeypatch, tmp_path):
    real = checkpoint("qwen3-4b")
    tensors = {n: SimpleNamespace(**t) for n, t in real.tensors.items()}
    headers = SimpleNamespace(
        files_metadata={"model.safetensors": SimpleNamespace(tensors=tensors)}
    )
    (tmp_path / "config.json").write_text(json.dumps(real.config))

    def absent(*_, **__):
        raise FileNotFoundError("not cached")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", absent)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", lambda _: headers)
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda *_: str(tmp_path / "config.json")
    )
    assert read_checkpoint("owner/name") == Checkpoint("owner/name", real.config, real.tensors)


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch, run):
    def unreachable(*_, **__):
        raise ConnectionError("no network\nmore of it")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", unreachable)
    code, _, err = run("plan", "--model", "owner/name")
    assert code == 2 and "no network" in err and len(err.splitlines()) == 1


@pytest.fixture
def rows(tmp_path) -> Path:
    turns = [chat(f"What is {n}?", f"It is {n}, and {n} again. " * 12) for n in range(8)]
    return write_rows(tmp_path / "rows", train=turns, valid=turns[:2], test=turns[:2])


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_estimate_is_within_its_error_of_the_measured_peak(recomputed, tiny, rows, tmp_path):
    train = TrainConfig(
        iters=2,
        batch_size=4,
        max_seq_length=128,
        matmul_path="dense",
        grad_checkpoint=recomputed,
        val_batches=0,
    )
    report = train_pack(tiny, rows, LoRAConfig(rank=8), train, tmp_path / "p").report
    assert report["plan_peak_gb"] == pytest.approx(report["peak_gb"], rel=ERROR)


@pytest.mark.parametrize("targets", ["gate_proj up_proj down_proj", "q_proj o_proj"])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_blocks_keep_no_scores_whichever_of_their_projections_carry_adapters(
    targets, recompute, tiny, nothing_ahead
):
    """A step of one long row, whose T x T probabilities would be most of its memory."""
    length = 768
    lora = LoRAConfig(rank=8, target_modules=tuple(targets.split()))
    train = TrainConfig(
        iters=1, batch_size=1, max_seq_length=length + 1, matmul_path="dense", recompute=recompute
    )
    planned = estimate(tiny.config, tensors_of(tiny.model), lora, train, "dense", targets=256)
    attached = attach(tiny, lora, matmul_path="dense")
    attached.recompute(recompute)
    optimizer = make_optimizer(train)
    optimizer.init(tiny.model.trainable_parameters())
    stepper = lm_stepper(tiny.model, optimizer, None)
    tiny.model.train()
    rows = [Example(np.arange(length + 1, dtype=np.int32) % 1000, np.arange(length + 1) > 512, "x")]
    batch = make_batch(rows, [0], 1, length)
    mx.eval(tiny.model.parameters(), optimizer.state)
    for _ in range(2):
        mx.reset_peak_memory()
        stepper(as_arrays(batch), batch.count, True, True)
    assert mx.get_peak_memory() < (1 + ERROR) * planned.peak_bytes


def test_probabilities_are_kept_on_cpus_alone(monkeypatch):
    def activations(length):
        train = TrainConfig(batch_size=1, recompute="none", matmul_path="dense")
        known = checkpoint("qwen3-0.6b")
        plan = estimate(
            known.config, known.tensors, LoRAConfig(), train, "dense", length=length, targets=1
        )
        return plan.moments["mlp"]["activations"]

    assert activations(128) > 2.05 * activations(64)
    on_a_gpu(monkeypatch)
    assert activations(128) == pytest.approx(2 * activations(64))


def write_headers(folder: Path, found: Checkpoint) -> Path:
    """A checkpoint folder that takes no space: the weights are a hole in the file, zeros."""
    at, header = 0, {}
    for name, tensor in found.tensors.items():
        end = at + 2 * math.prod(tensor["shape"])
        header[name] = {**tensor, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    (folder / "config.json").write_text(json.dumps(found.config))
    return folder


@pytest.fixture
def nothing_is_loaded(monkeypatch):
    """Loading weights raises."""

    def load(*_, **__):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("mlx_packs.training.run.load_base", load)


def test_a_base_that_cannot_fit_is_refused_before_it_is_loaded(
    nothing_is_loaded, rows, tmp_path, monkeypatch, run
):
    monkeypatch.setattr(runtime, "total_memory", lambda: int(4e9))
    base = write_headers(tmp_path / "base", checkpoint("llama-3-8b"))
    arguments = ["train", "--model", base, "--data", rows, "--out", tmp_path / "p"]
    code, _, err = run(*arguments)
    assert code == 2 and len(err.splitlines()) == 1 and "at least 3" in err and "GB" in err
    assert "--quantize nf4" in err and "--force" in err and not (tmp_path / "p").exists()
    code, _, err = run(*arguments, "--quantize", "nf4")
    assert code == 2 and "of 4.00 GB" in err and "--quantize" not in err
    monkeypatch.setattr(runtime, "total_memory", lambda: int(64e9))
    for more in (["--quantize", "nf4"], []):
        with pytest.raises(AssertionError, match="weights were loaded"):
            run(*arguments, *more)
    monkeypatch.setattr(runtime, "total_memory", lambda: int(4e9))
    with pytest.raises(AssertionError, match="weights were loaded"):
        run(*arguments, "--force")


def test_a_base_whose_headers_cannot_be_had_is_left_to_loading(monkeypatch, tmp_path, run):
    def unreachable(*_, **__):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", unreachable)
    code, _, err = run("train", "--model", "owner/name", "--out", tmp_path / "p")
    assert code == 2 and "hf download owner/name" in err


def test_training_that_cannot_fit_is_refused_unless_forced(rows, tmp_path, monkeypatch, run):
    monkeypatch.setattr(runtime, "total_memory", lambda: int(60e6))
    measured = []
    monkeypatch.setattr(
        "mlx_packs.training.setup.choose_matmul_path", lambda *_: measured.append(1)
    )
    out = tmp_path / "p"
    arguments = ["train", "--data", rows, "--out", out, "--iters", "1", "--recompute", "none"]
    code, _, err = run(*arguments)
    told = err.splitlines()[-1]
    assert code == 2 and "--force" in told and "--recompute block" in told and not out.exists()
    assert "at least" not in told and "data" in err, "the rows are known by now"
    assert not measured, "refused before any weight is dequantized"
    assert run(*arguments, "--force", "-q", "--matmul-path", "transient")[0] == 0
    assert json.loads((out / "pack.json").read_text())["measured"]["plan_peak_gb"] > 0.06


def test_what_is_tight_is_trained_with_a_warning(rows, tmp_path, monkeypatch, run):
    arguments = [
        "train",
        "--data",
        rows,
        "--iters",
        "1",
        "--matmul-path",
        "dense",
        "--json",
        "--test-batches",
        "1",
        "--val-batches",
        "0",
        "--batch-size",
        "1",
        "--recompute",
        "none",
    ]
    peak = json.loads(run(*arguments, "--out", tmp_path / "p")[1])["plan_peak_gb"]
    for memory, warned in ((1.05 * peak, True), (1.2 * peak, False)):
        monkeypatch.setattr(runtime, "total_memory", lambda memory=memory: int(memory * 1e9))
        code, _, err = run(*arguments, "--out", tmp_path / "p", "--overwrite")
        assert code == 0 and ("tight: 15% more would not fit" in err) is warned


def test_auto_takes_the_fastest_path_that_fits(tiny, rows, monkeypatch):
    display = Display(QUIET)
    train = TrainConfig(batch_size=4, max_seq_length=128, iters=4, recompute="none")
    columns = DataConfig(data=str(rows))
    splits = encode_splits(load_rows(columns), tiny, columns, train, display)
    dataset = PhasedDataset(resolve_phases(train, columns), [splits])
    shapes = dataset.batch_shapes()
    seconds = {"quantized": 3.0, "transient": 2.0, "dense": 1.0}
    monkeypatch.setattr("mlx_packs.memory.matmul_path._kind_seconds", lambda *_: seconds)

    def taken(memory: int) -> str:
        monkeypatch.setattr(runtime, "total_memory", lambda: memory)
        plans = plan_paths(tiny, LoRAConfig(), train, shapes, display)
        return choose_path(tiny, train, dataset.train, plans, display).matmul_path

    monkeypatch.setattr(runtime, "total_memory", lambda: int(64e9))
    plans = plan_paths(tiny, LoRAConfig(), train, shapes, display)
    assert set(plans) == set(seconds)
    assert taken(int(64e9)) == "dense"
    assert taken(int(plans["dense"].peak_bytes * (1 + ERROR)) - 1) == "transient"
    with pytest.raises(PackError, match="--force"):
        taken(min(plan.peak_bytes for plan in plans.values()) - 1)


def test_the_plan_takes_the_first_policy_of_recomputation_that_fits(
    rows, tmp_path, monkeypatch, run
):
    arguments = [
        "train",
        "--data",
        rows,
        "--iters",
        "1",
        "--matmul-path",
        "dense",
        "--json",
        "--test-batches",
        "1",
        "--val-batches",
        "0",
        "--overwrite",
        "--out",
        tmp_path / "p",
    ]
    peaks = {}
    for policy in ("none", "selective", "block"):
        report = json.loads(run(*arguments, "--recompute", policy)[1])
        assert report["recompute"] == policy
        peaks[policy] = report["plan_peak_gb"]
    assert peaks["none"] > peaks["selective"] > peaks["block"]
    for policy, peak in peaks.items():
        memory = int((1 + ERROR) * peak * 1e9) + 1000
        monkeypatch.setattr(runtime, "total_memory", lambda memory=memory: memory)
        code, out, err = run(*arguments)
        assert code == 0 and json.loads(out)["recompute"] == policy
        assert f"recompute {policy}" in err


def test_a_dense_base_has_its_estimate(rows, tmp_path, run):
    base = write_headers(tmp_path / "base", base_checkpoint())
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_checkpoint() / file, base / file)
    arguments = ["--model", base, "--data", rows, "--iters", "1", "--val-batches", "0", "--json"]
    code, out, err = run("train", *arguments, "--out", tmp_path / "p")
    assert code == 0, err
    assert json.loads(out)["plan_peak_gb"] > 0 and json.loads(out)["matmul_path"] == "dense"


def base_checkpoint() -> Checkpoint:
    """A small dense checkpoint with the vocabulary of the tiny base."""
    found = checkpoint("small")
    config = json.loads((tiny_checkpoint() / "config.json").read_text())
    vocab = config["vocab_size"]
    found.tensors["model.embed_tokens.weight"]["shape"] = [vocab, SMALL[0]]
    return Checkpoint("small", {**found.config, "vocab_size": vocab}, found.tensors)


def test_a_base_without_a_plan_is_trained_all_the_same(monkeypatch, tiny, rows, tmp_path):
    monkeypatch.setattr("mlx_packs.memory.plan.FAMILIES", ())
    train = TrainConfig(iters=1, batch_size=2, matmul_path="dense", val_batches=0)
    run = train_pack(tiny, rows, LoRAConfig(rank=4), train, tmp_path / "p")
    assert run.report["plan_peak_gb"] is None


@pytest.mark.parametrize("memory", ["nan", "inf", "0", "-4"])
def test_memory_that_is_no_size_is_refused(run, memory):
    code, out, err = run("plan", "--model", "tiny", "--memory", memory)
    assert (code, out) == (2, "") and err.count("\n") == 1 and "--memory" in err


@pytest.mark.parametrize("name", ["llama-3-8b", "qwen3-4b"])
def test_a_config_alone_is_planned_as_the_dense_checkpoint_that_it_describes(name, tmp_path):
    whole = checkpoint(name)
    (tmp_path / "config.json").write_text(json.dumps(whole.config))
    found = read_checkpoint(tmp_path)
    assert found.config == whole.config
    wanted = {n: (t["dtype"], list(t["shape"])) for n, t in whole.tensors.items()}
    assert {n: (t["dtype"], t["shape"]) for n, t in found.tensors.items()} == wanted


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quantization": {"bits": 4, "group_size": 64}}, "needs the headers"),
        ({"model_type": "mamba"}, "no plan for model_type 'mamba'"),
        ({"hidden_size": None}, "no plan: config.json lacks a size"),
    ],
)
def test_a_config_alone_that_does_not_say_enough_is_refused(config, message, tmp_path, run):
    told = checkpoint("llama-3-8b").config | config
    (tmp_path / "config.json").write_text(json.dumps(told))
    code, _, err = run("plan", "--model", tmp_path, "--memory", 8)
    assert code == 2 and message in err and len(err.splitlines()) == 1


def test_a_plan_for_another_device_is_that_of_the_device(tmp_path, run, monkeypatch):
    base = write_headers(tmp_path / "base", checkpoint("small"))
    fixed = [
        "--model",
        base,
        "--memory",
        16,
        "--batch-size",
        1,
        "--max-seq-length",
        512,
        "--recompute",
        "none",
        "--rank",
        8,
        "--json",
    ]
    told = {device: run("plan", *fixed, "--device", device)[1] for device in ("cpu", "gpu")}
    assert told["cpu"] == run("plan", *fixed)[1] != told["gpu"]
    assert runtime.on_cpu()
    with monkeypatch.context() as patch:
        patch.setattr("mlx_packs.runtime._assumed", "gpu")
        assert run("plan", *fixed)[1] == told["gpu"]
    assert run("plan", "--model", base, "--device", "gpu")[0] == 2
    check(run.error, "conflict", "device", "--memory")


def test_the_table_of_bases_says_what_each_way_needs():
    from benchmarks.plan_table import CONFIGS, checkpoint_of, rows

    for name in ("llama-3-8b", "qwen3-4b"):
        config, real = CONFIGS[name], checkpoint(name).config
        assert all(
            real[key] == config.get(key, 128)
            for key in real
            if key not in ("rms_norm_eps", "rope_theta")
        ), name
    assert checkpoint_of("llama-3-8b").config is CONFIGS["llama-3-8b"]
    (line,) = rows(checkpoint_of("all-minilm-l6-v2"), [8, 16, 24, 64])
    assert line.startswith("| 8, 16, 24, 64 GB | fits: ") and "(batch 32 x 256) | - | " in line
    assert "**lora-fp32, batch 32 x 256**: float32 LoRA, not QLoRA: all 22.6 M weights" in line
    small = checkpoint("small")
    (line,) = rows(small, [8])
    assert line.startswith("| 8 GB | ") and "**lora-fp32, batch " in line


def test_the_table_of_bases_in_the_docs_is_what_is_planned():
    from benchmarks.plan_table import CONFIGS, checkpoint_of, rows

    told = (Path(__file__).parents[2] / "docs" / "systems.md").read_text(encoding="utf-8")
    with runtime.assumed_device("gpu"):
        for name in CONFIGS:
            for line in rows(checkpoint_of(name), [8, 16, 24, 64]):
                assert line in told, name
