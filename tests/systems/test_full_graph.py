"""docs/systems.md, section 4: full-graph QLoRA and the stack of projections, as a user has them."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from mlx_packs import LoRAConfig, Pack, evaluate, load_base
from mlx_packs.cli.main import packs
from mlx_packs.evaluation.answers import Exam
from mlx_packs.extras.projection_stack import graph_of
from mlx_packs.runtime import mx
from tests.helpers.checkpoints import layout, logits, write_checkpoint, write_quantized
from tests.helpers.errors import check
from tests.helpers.memory import active_bytes
from tests.helpers.rows import chat, write_rows

pytestmark = pytest.mark.systems

SQUARE = {"head_dim": 16}
STACK = ("--objective", "projection-stack")
SLICES = "c_attn.q=8,c_attn.k=2,c_attn.v=4"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TRAIN = "--batch-size 4 --max-seq-length 64 --learning-rate 1e-2 --rank 4 --overwrite --json"


def succeed(*args: object) -> dict:
    """Run `packs ARGS`; its report."""
    result = CliRunner().invoke(packs, [*map(str, args)])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def graph_folder(tmp_path_factory) -> Path:
    """Small bases by family, and rows, in one folder."""
    folder = tmp_path_factory.mktemp("full-graph")
    write_checkpoint(folder / "llama", "llama", **SQUARE)
    config = write_checkpoint(folder / "gpt2", "gpt2", n_layer=3, n_head=8) / "config.json"
    own = json.loads(config.read_text())
    own.pop("num_attention_heads")  # GPT-2's own config has n_head
    config.write_text(json.dumps(own))
    rows = [{"text": f"row {i} has {i + 1} after it and then {i + 2}"} for i in range(32)]
    return write_rows(folder / "d", train=rows, valid=rows[:8], test=rows[8:16]).parent


@pytest.fixture(scope="module")
def train_graph(graph_folder):
    """`packs train` on a base of the folder; its report."""

    def go(model: str, out: str, *args, iters: int = 1) -> dict:
        places = ("--model", graph_folder / model, "--data", graph_folder / "d")
        out = ("--out", graph_folder / out, "--iters", iters)
        return succeed("train", *places, *out, *TRAIN.split(), *args)

    return go


@pytest.fixture(scope="module")
def true_run(train_graph) -> dict:
    """The report of `true`, on `llama`."""
    return train_graph("llama", "true", iters=4)


@pytest.fixture(scope="module")
def stack_run(train_graph) -> dict:
    """The report of `stack`, on `llama`."""
    return train_graph("llama", "stack", *STACK, iters=4)


@pytest.fixture(scope="module")
def merged_runs(graph_folder, train_graph, true_run) -> None:
    """`true` and `slices`, which has a rank for each slice of `gpt2`, merged in float32."""
    train_graph("gpt2", "slices", "--target-modules", "c_attn", "--rank-pattern", SLICES, iters=2)
    for model, pack in (("llama", "true"), ("gpt2", "slices")):
        places = (
            graph_folder / pack,
            "--model",
            graph_folder / model,
            "--data",
            graph_folder / "d",
        )
        how = ("--dtype", "float32", "--max-drift", 0.02, "--json")
        succeed("merge", *places, "--out", graph_folder / f"{pack}-merged", *how)


def modules(pack: Path) -> dict[str, dict]:
    return {m["path"]: m for m in Pack.open(pack).manifest["adapters"]["modules"]}


def test_the_default_is_the_true_forward_with_all_projections(graph_folder, true_run):
    pack = Pack.open(graph_folder / "true")
    assert true_run["objective"] == {"graph": "transformer"}
    assert pack.manifest["objective"]["graph"] == "transformer"
    assert {path.rpartition(".")[2] for path in modules(pack.path)} == set(PROJECTIONS)
    assert all(mx.abs(t).max().item() > 0 for t in pack.load_tensors().values())  # each B has moved
    assert true_run["ppl_after"] < true_run["ppl_before"]


def test_a_metric_asks_the_whole_base_with_what_a_proxy_trained(
    graph_folder, train_graph, monkeypatch
):
    asked = []
    answers = Exam.answers
    monkeypatch.setattr(Exam, "answers", lambda *args: asked.append(answers(*args)) or asked[-1])
    chats = write_rows(graph_folder / "chats", train=[chat("Say yes.", "yes")] * 8)
    report = train_graph("llama", "asked", *STACK, "--data", chats, "--metric", "exact", iters=8)
    assert report["answers"]["rows"] == 1 and report["samples"][0]["before"] == asked[0][0]
    pack = graph_folder / "asked"
    again = evaluate(load_base(graph_folder / "llama"), pack, chats, split="valid", metric="exact")
    assert again.to_json()["answers"] == report["answers"]
    assert asked[2:] == asked[:2] and asked[0] != asked[1]


def test_projection_stack_is_in_the_manifest_and_scored_on_the_true_forward(
    graph_folder, stack_run, run
):
    pack, objective = graph_folder / "stack", stack_run["objective"]
    assert objective["graph"] == "projection-stack"
    assert "not the full transformer" in objective["note"] and "no attention" in objective["note"]
    assert objective["embedding"] == "frozen, mapped from its file"
    assert objective["stack"] == [f"model.layers.{i}.self_attn.o_proj" for i in range(2)]
    assert list(modules(pack)) == [*objective["stack"], "lm_head"]
    assert objective["ppl_after"] < objective["ppl_before"]
    assert objective.items() <= Pack.open(pack).manifest["objective"].items()
    _, shown, _ = run("inspect", pack)
    assert "Trained by projection-stack over model.layers.0" in shown and "no attention" in shown
    assert "no token sees another" in (pack / "README.md").read_text()

    places = ("--model", graph_folder / "llama", "--data", graph_folder / "d")
    evaluation = succeed("eval", pack, *places, "--json")
    for key, side in (("ppl_before", "base"), ("ppl_after", "pack")):
        assert abs(evaluation[side]["ppl"] / stack_run[key] - 1) < 1e-4
        assert abs(objective[key] / stack_run[key] - 1) > 1e-3


@pytest.mark.parametrize(
    ("family", "model_type", "tail"),
    [
        ("gpt2", "gpt2", "attn.c_proj"),
        ("llama", "mistral", "self_attn.o_proj"),
        ("qwen2", "qwen2", "self_attn.o_proj"),
        ("qwen3", "qwen3", "self_attn.o_proj"),
    ],
)
def test_each_family_has_its_stack(tmp_path, family, model_type, tail):
    folder = tmp_path / "base"
    write_checkpoint(folder, family, **(SQUARE if family in ("llama", "qwen3") else {}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    stack = graph_of(load_base(folder, lazy=True), LoRAConfig(rank=4)).facts["stack"]
    assert [path.partition(".0.")[2] for path in stack][0] == tail and len(stack) == 2


def test_projection_stack_without_square_projections_trains_the_head(graph_folder, train_graph):
    write_checkpoint(graph_folder / "narrow", "qwen3")  # 128 -> 64, as 4096 -> 2560 in Qwen3-4B
    objective = train_graph("narrow", "head", *STACK)["objective"]
    assert list(modules(graph_folder / "head")) == ["lm_head"] and objective["stack"] == []
    assert "only the head, since o_proj is 128 -> 64" in objective["note"]


def test_stack_without_trainable_weights_names_what_works(graph_folder, run):
    write_checkpoint(graph_folder / "tied", "qwen3", tie_word_embeddings=True)
    places = ("--model", graph_folder / "tied", "--data", graph_folder / "d")
    code, out, err = run("train", "-q", *places, "--out", graph_folder / "none", *STACK)
    assert (code, out, err.count("\n")) == (2, "", 1) and not (graph_folder / "none").exists()
    check(run.error, "unsupported", "objective", "--objective transformer")


def test_gpt2_trains_a_rank_for_each_slice_and_merges_into_fp32_shards(graph_folder, merged_runs):
    slices = modules(graph_folder / "slices")["model.h.0.attn.c_attn"]["slices"]
    assert [s["rank"] for s in slices] == [8, 2, 4]
    merged = graph_folder / "slices-merged"
    assert layout(merged) == layout(graph_folder / "gpt2")  # Conv1D lies [in, out] in both
    assert layout(merged)["h.0.attn.c_attn.weight"] == ("F32", [64, 192])
    base = load_base(graph_folder / "gpt2")
    with base.applied(graph_folder / "slices"):
        attached = logits(base)
    assert np.abs(attached - logits(base)).max() > 1e-2
    assert np.abs(attached - logits(load_base(merged))).max() < 1e-4


def test_ranks_of_slices_from_yaml_are_those_from_flags(graph_folder, train_graph, merged_runs):
    (graph_folder / "slices.yaml").write_text(
        "target_modules: [c_attn]\nrank_pattern: {c_attn.q: 8, c_attn.k: 2, c_attn.v: 4}\n"
    )
    train_graph("gpt2", "by-yaml", "-c", graph_folder / "slices.yaml", iters=2)
    one, other = (Pack.open(graph_folder / name).load_tensors() for name in ("by-yaml", "slices"))
    assert all(mx.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("objective", ["projection-stack", "transformer"])
def test_the_last_k_targets_are_the_loss(graph_folder, train_graph, objective):
    report = train_graph("llama", "suffix", "--objective", objective, "--ce-last-k", 2)
    assert report["trained_tokens"] == 4 * 2
    assert Pack.open(graph_folder / "suffix").manifest["objective"]["ce_last_k"] == 2


def test_the_table_is_frozen_and_mapped_from_its_file(graph_folder, train_graph):
    """The loop reads no weight of a block but its projection, not even once."""
    write_checkpoint(graph_folder / "wide", "llama", **SQUARE, intermediate_size=20_000)
    feed_forwards_gb = 2 * 3 * 64 * 20_000 * 4 / 1e9
    weights = (graph_folder / "wide" / "model.safetensors").read_bytes()
    others_gb = active_bytes() / 1e9  # of other tests
    report = train_graph("wide", "mapped", *STACK)
    assert report["objective"]["embedding"] == "frozen, mapped from its file"
    assert (graph_folder / "wide" / "model.safetensors").read_bytes() == weights
    assert not any("embed" in path for path in modules(graph_folder / "mapped"))
    assert report["peak_gb"] - others_gb < feed_forwards_gb


@pytest.mark.parametrize(("family", "pack"), [("llama", "true"), ("gpt2", "slices")])
def test_manifest_maps_adapters_to_tensors_and_merge_changes_just_those(
    graph_folder, merged_runs, run, family, pack
):
    keys = {m["base_key"] for m in modules(graph_folder / pack).values()}
    folders = graph_folder / family, graph_folder / f"{pack}-merged"
    before, after = (mx.load(str(folder / "model.safetensors")) for folder in folders)
    assert {n for n in before if not mx.array_equal(before[n], after[n])} == keys
    _, shown, _ = run("inspect", graph_folder / pack, "-v")
    assert all(f"base key {key}" in shown for key in keys)


@pytest.mark.parametrize("more", [(), ("--no-double-quant",)])
def test_double_quantization_is_the_default_and_can_be_turned_off(
    graph_folder, train_graph, run, more
):
    nf4 = ("--quantize", "nf4", "--keep", "lm_head,embed_tokens", "--target-modules", "q_proj")
    train_graph("llama", "nf4", *nf4, *more)
    manifest = Pack.open(graph_folder / "nf4").manifest
    assert manifest["base"]["quantization"]["double_quant"] == (not more)
    _, shown, _ = run("inspect", graph_folder / "nf4")
    assert ("nf4 4-bit g64 double-quantized" in shown) == (not more)


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (lambda f: (f / "model.safetensors").rename(f / "m.bin"), ("m.bin", "safetensors")),
        (
            lambda f: (f / "tokenizer.json").rename(f / "tokenizer.model"),
            ("tokenizer.model ", "tokenizer.json"),
        ),
        (lambda f: _claim(f, "hqq"), ("hqq", "mlx-community")),
    ],
    ids=["pickle", "sentencepiece", "hqq"],
)
def test_what_cannot_be_read_is_refused_and_what_works_is_named(
    tmp_path, graph_folder, run, spoil, parts
):
    spoil(write_checkpoint(tmp_path / "base", "llama"))
    code, out, err = run(
        "train", "--model", tmp_path / "base", "--data", graph_folder / "d", "--out", tmp_path / "o"
    )
    assert (code, out) == (2, "")
    check(run.error, "unsupported", None, f"{tmp_path / 'base'}: ", *parts)
    assert err.splitlines()[-1].startswith("packs: ") and not (tmp_path / "o").exists()


def _claim(folder: Path, method: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("pack", "counts"), [("slices", (3, 8, 8, 8, 64)), ("true", (2, 4, 2, 16, 64))]
)
def test_layers_and_heads_of_the_manifest_are_the_bases_own(
    graph_folder, merged_runs, pack, counts
):
    base = Pack.open(graph_folder / pack).manifest["base"]
    names = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size")
    assert tuple(base[name] for name in names) == counts


def test_4_bit_base_trains_both_objectives_and_swaps_the_pack(graph_folder, train_graph):
    write_quantized(graph_folder / "packed", graph_folder / "llama")
    train_graph("packed", "packed-stack", *STACK)
    base = load_base(graph_folder / "packed")
    before = logits(base)
    with base.applied(graph_folder / "packed-stack"):
        assert np.abs(logits(base) - before).max() > 0
    assert np.array_equal(logits(base), before)
