"""docs/systems.md, section 4: full-graph QLoRA and the stack of projections, as a user has them."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from mlx_packs import Pack, evaluate, load_base
from mlx_packs.cli.main import packs
from mlx_packs.evaluation.answers import Exam
from tests.helpers.checkpoints import layout, logits, write_checkpoint
from tests.helpers.memory import active_bytes
from tests.helpers.rows import chat, write_rows

pytestmark = [pytest.mark.systems, pytest.mark.slow]

SQUARE = {"head_dim": 16}
STACK = ("--objective", "projection-stack")
SLICES = "c_attn.q=8,c_attn.k=2,c_attn.v=4"
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
def merged_runs(graph_folder, train_graph) -> None:
    """`true` and `slices`, which has a rank for each slice of `gpt2`, merged in float32."""
    train_graph("llama", "true")
    train_graph("gpt2", "slices", "--target-modules", "c_attn", "--rank-pattern", SLICES, iters=2)
    how = ("--dtype", "float32", "--max-drift", 0.02, "--json", "--data", graph_folder / "d")
    for model, pack in (("llama", "true"), ("gpt2", "slices")):
        places = ("--model", graph_folder / model, "--out", graph_folder / f"{pack}-merged")
        succeed("merge", graph_folder / pack, *places, *how)


def modules(pack: Path) -> dict[str, dict]:
    return {m["path"]: m for m in Pack.open(pack).manifest["adapters"]["modules"]}


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
    graph_folder, train_graph, run
):
    stack_run = train_graph("llama", "stack", *STACK, iters=4)
    pack, objective = graph_folder / "stack", stack_run["objective"]
    assert objective["graph"] == "projection-stack"
    assert "not the full transformer" in objective["note"] and "no attention" in objective["note"]
    assert objective["embedding"] == "frozen, read from its file"
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


@pytest.mark.parametrize("objective", ["projection-stack", "transformer"])
def test_the_last_k_targets_are_the_loss(graph_folder, train_graph, objective):
    report = train_graph("llama", "suffix", "--objective", objective, "--ce-last-k", 2)
    assert report["trained_tokens"] == 4 * 2
    assert Pack.open(graph_folder / "suffix").manifest["objective"]["ce_last_k"] == 2


def test_the_table_is_frozen_and_read_from_its_file(graph_folder, train_graph):
    """The loop reads no weight of a block but its projection, not even once."""
    write_checkpoint(graph_folder / "wide", "llama", **SQUARE, intermediate_size=20_000)
    feed_forwards_gb = 2 * 3 * 64 * 20_000 * 4 / 1e9
    weights = (graph_folder / "wide" / "model.safetensors").read_bytes()
    others_gb = active_bytes() / 1e9  # of other tests
    report = train_graph("wide", "mapped", *STACK)
    assert report["objective"]["embedding"] == "frozen, read from its file"
    assert (graph_folder / "wide" / "model.safetensors").read_bytes() == weights
    assert not any("embed" in path for path in modules(graph_folder / "mapped"))
    assert report["peak_gb"] - others_gb < feed_forwards_gb


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
    ("pack", "counts"), [("slices", (3, 8, 8, 8, 64)), ("true", (2, 4, 2, 16, 64))]
)
def test_layers_and_heads_of_the_manifest_are_the_bases_own(
    graph_folder, merged_runs, pack, counts
):
    base = Pack.open(graph_folder / pack).manifest["base"]
    names = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size")
    assert tuple(base[name] for name in names) == counts
