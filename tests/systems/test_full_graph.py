"""docs/systems.md, section 4: full-graph QLoRA and the stack of projections, as a user has them."""

import json
from pathlib import Path

import numpy as np
import pytest

from mlx_packs import Pack, evaluate, load_base
from mlx_packs.evaluation.answers import Exam
from mlx_packs.runtime import mx
from tests.helpers.checkpoints import layout, logits, write_checkpoint, write_quantized
from tests.helpers.errors import check
from tests.helpers.memory import active_bytes
from tests.helpers.rows import chat, write_rows

pytestmark = pytest.mark.systems

SQUARE = {"head_dim": 16}
SLICES = "c_attn.q=8,c_attn.k=2,c_attn.v=4"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def graph_folder(tmp_path_factory) -> Path:
    """Small bases by family, and rows, in one folder."""
    folder = tmp_path_factory.mktemp("full-graph")
    write_checkpoint(folder / "llama", "llama", **SQUARE)
    write_checkpoint(folder / "gpt2", "gpt2")
    rows = [{"text": f"row {i} has {i + 1} after it and then {i + 2}"} for i in range(32)]
    write_rows(folder / "d", train=rows, valid=rows[:8], test=rows[8:16])
    return folder


@pytest.fixture
def train_graph(graph_folder, run):
    """`packs train` on a base of ``here``; its report."""

    def go(model: str, out: str, *args, iters: int = 4) -> dict:
        code, printed, err = run(
            "train",
            "--model",
            graph_folder / model,
            "--data",
            graph_folder / "d",
            "--out",
            graph_folder / out,
            "--iters",
            iters,
            "--batch-size",
            4,
            "--max-seq-length",
            64,
            "--learning-rate",
            1e-2,
            "--rank",
            4,
            "--overwrite",
            "--json",
            *args,
        )
        assert code == 0, err
        return json.loads(printed)

    return go


def modules(pack: Path) -> dict[str, dict]:
    return {m["path"]: m for m in Pack.open(pack).manifest["adapters"]["modules"]}


def test_the_default_is_the_true_forward_with_all_projections(graph_folder, train_graph):
    report = train_graph("llama", "true")
    manifest = Pack.open(graph_folder / "true").manifest
    assert (
        report["objective"] == {"graph": "transformer"} == {"graph": manifest["objective"]["graph"]}
    )
    assert {path.rpartition(".")[2] for path in modules(graph_folder / "true")} == set(PROJECTIONS)
    tensors = Pack.open(graph_folder / "true").load_tensors()
    assert all(mx.abs(t).max().item() > 0 for t in tensors.values())  # each B has moved
    assert report["ppl_after"] < report["ppl_before"]


def test_a_metric_asks_the_whole_base_with_what_a_proxy_trained(
    graph_folder, train_graph, monkeypatch
):
    asked = []
    answers = Exam.answers
    monkeypatch.setattr(Exam, "answers", lambda exam: asked.append(answers(exam)) or asked[-1])
    chats = write_rows(graph_folder / "chats", train=[chat("Say yes.", "yes")] * 8)
    proxy = ("--objective", "projection-stack", "--data", chats, "--metric", "exact")
    report = train_graph("llama", "asked", *proxy, iters=8)
    assert report["answers"]["rows"] == 1 and report["samples"][0]["before"] == asked[0][0]
    pack = graph_folder / "asked"
    again = evaluate(load_base(graph_folder / "llama"), pack, chats, split="valid", metric="exact")
    assert again.to_json()["answers"] == report["answers"]
    assert asked[2:] == asked[:2] and asked[0] != asked[1]


def test_projection_stack_is_in_the_manifest_and_scored_on_the_true_forward(
    graph_folder, train_graph, run
):
    report = train_graph("llama", "stack", "--objective", "projection-stack")
    objective = report["objective"]
    assert (
        objective["graph"] == "projection-stack" and "not the full transformer" in objective["note"]
    )
    assert objective["stack"] == [f"model.layers.{i}.self_attn.o_proj" for i in range(2)]
    assert list(modules(graph_folder / "stack")) == [*objective["stack"], "lm_head"]
    assert objective["ppl_after"] < objective["ppl_before"]
    _, shown, _ = run("inspect", graph_folder / "stack")
    assert "Trained by projection-stack" in shown and "no attention" in shown
    code, printed, _ = run(
        "eval",
        graph_folder / "stack",
        "--model",
        graph_folder / "llama",
        "--data",
        graph_folder / "d",
        "--json",
    )
    evaluation = json.loads(printed)
    assert code == 0 and abs(evaluation["pack"]["ppl"] / report["ppl_after"] - 1) < 1e-4


@pytest.mark.parametrize(
    ("family", "model_type", "tail"),
    [
        ("gpt2", "gpt2", "attn.c_proj"),
        ("llama", "mistral", "self_attn.o_proj"),
        ("qwen2", "qwen2", "self_attn.o_proj"),
        ("qwen3", "qwen3", "self_attn.o_proj"),
    ],
)
def test_each_family_has_its_stack(graph_folder, train_graph, family, model_type, tail):
    folder = graph_folder / f"family-{model_type}"
    write_checkpoint(folder, family, **(SQUARE if family in ("llama", "qwen3") else {}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    report = train_graph(
        folder.name, f"of-{model_type}", "--objective", "projection-stack", iters=2
    )
    assert [path.partition(".0.")[2] for path in report["objective"]["stack"]][0] == tail
    assert len(report["objective"]["stack"]) == 2


def test_projection_stack_without_square_projections_trains_the_head(graph_folder, train_graph):
    write_checkpoint(graph_folder / "narrow", "qwen3")  # 128 -> 64, as 4096 -> 2560 in Qwen3-4B
    report = train_graph("narrow", "head", "--objective", "projection-stack", iters=2)
    assert (
        list(modules(graph_folder / "head")) == ["lm_head"] and report["objective"]["stack"] == []
    )
    assert "only the head, since o_proj is 128 -> 64" in report["objective"]["note"]


def test_stack_without_trainable_weights_names_what_works(graph_folder, run):
    write_checkpoint(graph_folder / "tied", "qwen3", tie_word_embeddings=True)
    arguments = (
        "-q",
        "--model",
        graph_folder / "tied",
        "--data",
        graph_folder / "d",
        "--out",
        graph_folder / "none",
    )
    code, out, err = run("train", *arguments, "--objective", "projection-stack")
    assert (code, out, err.count("\n")) == (2, "", 1) and not (graph_folder / "none").exists()
    check(run.error, "unsupported", "objective", "--objective transformer")


def test_gpt2_trains_a_rank_for_each_slice_and_merges_into_fp32_shards(
    graph_folder, train_graph, run
):
    train_graph("gpt2", "slices", "--target-modules", "c_attn", "--rank-pattern", SLICES)
    ranks = [s["rank"] for s in modules(graph_folder / "slices")["model.h.0.attn.c_attn"]["slices"]]
    assert ranks == [8, 2, 4]
    code, printed, err = run(
        "merge",
        graph_folder / "slices",
        "--model",
        graph_folder / "gpt2",
        "--out",
        graph_folder / "merged",
        "--dtype",
        "float32",
        "--data",
        graph_folder / "d",
        "--max-drift",
        0.02,
        "--json",
    )
    assert code == 0, err
    assert layout(graph_folder / "merged") == layout(
        graph_folder / "gpt2"
    )  # Conv1D lies [in, out] in both
    assert layout(graph_folder / "merged")["h.0.attn.c_attn.weight"] == ("F32", [64, 192])
    base = load_base(graph_folder / "gpt2")
    with base.applied(graph_folder / "slices"):
        attached = logits(base)
    assert np.abs(attached - logits(base)).max() > 1e-2
    assert np.abs(attached - logits(load_base(graph_folder / "merged"))).max() < 1e-4


def test_ranks_of_slices_from_yaml_are_those_from_flags(graph_folder, train_graph):
    (graph_folder / "slices.yaml").write_text(
        "target_modules: [c_attn]\nrank_pattern: {c_attn.q: 8, c_attn.k: 2, c_attn.v: 4}\n"
    )
    train_graph("gpt2", "by-yaml", "-c", graph_folder / "slices.yaml", iters=1)
    train_graph("gpt2", "by-flag", "--target-modules", "c_attn", "--rank-pattern", SLICES, iters=1)
    one, other = (Pack.open(graph_folder / name).load_tensors() for name in ("by-yaml", "by-flag"))
    assert all(mx.array_equal(one[name], other[name]) for name in one)


def test_the_last_k_targets_are_the_loss(train_graph):
    report = train_graph("llama", "suffix", "--objective", "projection-stack", "--ce-last-k", 2)
    assert report["trained_tokens"] == 4 * 4 * 2
    assert train_graph("llama", "suffix-true", "--ce-last-k", 2)["trained_tokens"] == 4 * 4 * 2


def test_the_table_is_frozen_and_mapped_from_its_file(graph_folder, train_graph):
    write_checkpoint(graph_folder / "wide", "llama", **SQUARE, intermediate_size=20_000)
    weights = (graph_folder / "wide" / "model.safetensors").read_bytes()
    others = active_bytes() / 1e9  # of other tests
    stack = train_graph("wide", "mapped", "--objective", "projection-stack", iters=1)
    assert stack["objective"]["embedding"] == "frozen, mapped from its file"
    assert (graph_folder / "wide" / "model.safetensors").read_bytes() == weights
    assert not any("embed" in path for path in modules(graph_folder / "mapped"))
    added = stack["peak_gb"] - others
    others = active_bytes() / 1e9
    whole = train_graph("wide", "whole", iters=1)
    assert added < 0.2 * (whole["peak_gb"] - others)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_manifest_maps_adapters_to_tensors_and_merge_changes_just_those(
    graph_folder, train_graph, run, family
):
    train_graph(family, f"keys-{family}", iters=2)
    keys = {m["base_key"] for m in modules(graph_folder / f"keys-{family}").values()}
    out = graph_folder / f"keys-{family}-merged"
    code, _, err = run(
        "merge",
        graph_folder / f"keys-{family}",
        "--model",
        graph_folder / family,
        "--out",
        out,
        "--dtype",
        "float32",
        "--data",
        graph_folder / "d",
    )
    assert code == 0, err
    before, after = (mx.load(str(f / "model.safetensors")) for f in (graph_folder / family, out))
    assert {n for n in before if not mx.array_equal(before[n], after[n])} == keys
    _, shown, _ = run("inspect", graph_folder / f"keys-{family}", "-v")
    assert all(f"base key {key}" in shown for key in keys)


def test_double_quantization_is_the_default_and_can_be_turned_off(graph_folder, train_graph, run):
    nf4 = ("--quantize", "nf4", "--keep", "lm_head,embed_tokens", "--target-modules", "q_proj")
    double_quant = {}
    for name, more in (("double", ()), ("single", ("--no-double-quant",))):
        train_graph("llama", name, *nf4, *more, iters=1)
        double_quant[name] = Pack.open(graph_folder / name).manifest["base"]["quantization"][
            "double_quant"
        ]
        _, shown, _ = run("inspect", graph_folder / name)
        assert ("nf4 4-bit g64 double-quantized" in shown) == (name == "double")
    assert double_quant == {"double": True, "single": False}


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
    ("family", "changes", "counts"),
    [
        ("gpt2", {"n_layer": 3, "n_head": 8}, (3, 8, 8, 8, 64)),
        ("llama", {"num_hidden_layers": 3, "num_key_value_heads": 1}, (3, 4, 1, 32, 64)),
    ],
)
def test_layers_and_heads_of_the_manifest_are_the_bases_own(
    graph_folder, train_graph, family, changes, counts
):
    folder = graph_folder / f"counts-{family}"
    write_checkpoint(folder, family, **changes)
    config = json.loads((folder / "config.json").read_text())
    if family == "gpt2":
        config.pop("num_attention_heads")  # GPT-2's own config has n_head
        (folder / "config.json").write_text(json.dumps(config))
    train_graph(folder.name, f"counted-{family}", iters=1)
    base = Pack.open(graph_folder / f"counted-{family}").manifest["base"]
    names = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size")
    assert tuple(base[name] for name in names) == counts


def test_4_bit_base_trains_both_objectives_and_swaps_the_pack(graph_folder, train_graph):
    write_quantized(graph_folder / "packed", graph_folder / "llama")
    train_graph("packed", "packed-stack", "--objective", "projection-stack", iters=2)
    base = load_base(graph_folder / "packed")
    before = logits(base)
    with base.applied(graph_folder / "packed-stack"):
        assert np.abs(logits(base) - before).max() > 0
    assert np.array_equal(logits(base), before)
