"""What fits: counts by hand and against the table of real geometries, directions, the commands."""

import json
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from conftest import base_of, chat, write_rows

from mlx_packs import LoRAConfig, PackError, TrainConfig, runtime, train_pack
from mlx_packs.adapters import attach
from mlx_packs.advice import advise
from mlx_packs.plan import ERROR, Checkpoint, estimate, read_checkpoint, tensors_of

# hidden, FFN, blocks, heads, KV heads, vocab, tied; head_dim 128: weights and adapters at rank 16
REAL = {
    "qwen3-0.6b": ((1024, 3072, 28, 16, 8, 151936, True), 0.60e9, 10.09e6),
    "qwen3-4b": ((2560, 9728, 36, 32, 8, 151936, True), 4.02e9, 33.03e6),
    "qwen3-8b": ((4096, 12288, 36, 32, 8, 151936, False), 8.19e9, 43.65e6),
    "qwen3-32b": ((5120, 25600, 64, 64, 8, 151936, False), 32.76e9, 134.22e6),
}


def checkpoint(name: str) -> Checkpoint:
    """A dense bfloat16 checkpoint of a real geometry: config and headers, no weights."""
    hidden, ffn, blocks, heads, kv_heads, vocab, tied = REAL[name][0]
    config = {
        "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": blocks, "num_attention_heads": heads, "vocab_size": vocab,
        "num_key_value_heads": kv_heads, "head_dim": 128, "tie_word_embeddings": tied,
    }  # fmt: skip
    q, k = heads * 128, kv_heads * 128
    shapes = {
        "self_attn.q_proj": [q, hidden], "self_attn.k_proj": [k, hidden],
        "self_attn.v_proj": [k, hidden], "self_attn.o_proj": [hidden, q],
        "mlp.gate_proj": [ffn, hidden], "mlp.up_proj": [ffn, hidden],
        "mlp.down_proj": [hidden, ffn], "self_attn.q_norm": [128], "self_attn.k_norm": [128],
    }  # fmt: skip
    tensors = {"model.embed_tokens.weight": [vocab, hidden]}
    if not tied:
        tensors["lm_head.weight"] = [vocab, hidden]
    for i in range(blocks):
        tensors |= {f"model.layers.{i}.{n}.weight": s for n, s in shapes.items()}
    return Checkpoint(name, config, {n: {"dtype": "BF16", "shape": s} for n, s in tensors.items()})


def peak(lora: dict | None = None, base_path: str = "quantized", **train) -> float:
    """Estimated GB of the tiny base."""
    tiny = read_checkpoint("tiny")
    settings = TrainConfig(**{"batch_size": 4, "max_seq_length": 256, **train})
    return estimate(
        tiny.config, tiny.tensors, LoRAConfig(**(lora or {})), settings, base_path
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
    assert peak(grad_checkpoint=True) < peak()
    assert peak() < peak(base_path="dense")


def test_a_small_base_is_not_to_be_quantized():
    best = advise(checkpoint("qwen3-0.6b"), int(32e9))[0]
    assert best.method == "lora-fp32" and best.fits and "small" in best.why


def test_8b_in_16_gb_is_qlora():
    options = advise(checkpoint("qwen3-8b"), int(16e9))
    assert options[0].method == "qlora" and options[0].fits
    assert options[-1].method == "full" and not options[-1].fits
    assert "--quantize" in options[0].command("Qwen/Qwen3-8B")


def test_what_is_asked_for_is_not_searched():
    train = TrainConfig(batch_size=3, max_seq_length=300)
    asked = frozenset({"batch_size", "max_seq_length"})
    for option in advise(read_checkpoint("tiny"), int(8e9), train=train, asked=asked):
        assert (option.train.batch_size, option.train.max_seq_length) == (3, 300)


def test_command_prints_a_list_of_options_and_the_next_command(run):
    code, out, _ = run("plan", "--memory", "16", "--json")
    options = json.loads(out)
    assert code == 0
    keys = "method base_path batch_size max_seq_length peak_gb fits why".split()
    assert all(set(keys) <= set(option) for option in options)
    code, out, _ = run("plan", "--memory", "16", "--grad-checkpoint")
    assert code == 0 and out.splitlines()[-1].startswith("try:    packs train --model tiny")
    assert f"{ERROR:.0%}" in out


@pytest.mark.parametrize(
    "wrong",
    [
        ["--memory", "-1"],
        ["--rank", "0"],
        ["--model", "/nowhere/at-all"],
        ["--num-layers", "99"],
        ["--target-modules", "q_prj"],
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
        iters=2, batch_size=4, max_seq_length=128, base_path="dense", grad_checkpoint=recomputed,
        val_batches=0,
    )  # fmt: skip
    report = train_pack(tiny, rows, LoRAConfig(rank=8), train, tmp_path / "p").report
    assert report["plan_peak_gb"] == pytest.approx(report["peak_gb"], rel=ERROR)


def test_training_that_cannot_fit_is_refused_unless_forced(rows, tmp_path, monkeypatch, run):
    monkeypatch.setattr(runtime, "total_memory", lambda: int(20e6))
    out = tmp_path / "p"
    arguments = ["train", "--data", rows, "--out", out, "--iters", "1", "--base-path", "transient"]
    code, _, err = run(*arguments, "-q")
    assert code == 2 and "--force" in err and "--grad-checkpoint" in err and not out.exists()
    assert len(err.splitlines()) == 1
    assert run(*arguments, "--force", "-q")[0] == 0
    assert json.loads((out / "pack.json").read_text())["measured"]["plan_peak_gb"] > 0.02


def test_a_base_without_a_plan_is_trained_all_the_same(monkeypatch, tiny, rows, tmp_path):
    monkeypatch.setattr("mlx_packs.plan.FAMILIES", ())
    train = TrainConfig(iters=1, batch_size=2, base_path="dense", val_batches=0)
    run = train_pack(tiny, rows, LoRAConfig(rank=4), train, tmp_path / "p")
    assert run.report["plan_peak_gb"] is None


@pytest.mark.parametrize("memory", ["nan", "inf", "0", "-4"])
def test_memory_that_is_no_size_is_refused(run, memory):
    code, out, err = run("plan", "--model", "tiny", "--memory", memory)
    assert (code, out) == (2, "") and err.count("\n") == 1 and "--memory" in err
