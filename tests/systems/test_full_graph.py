"""docs/systems.md, section 4: full-graph QLoRA and the stack of projections, as a user has them."""

import json
from pathlib import Path

import numpy as np
import pytest

from mlx_packs import Pack, load_base
from mlx_packs.runtime import mx
from tests.helpers.checkpoints import layout, logits, write_checkpoint, write_quantized
from tests.helpers.errors import check
from tests.helpers.memory import active_bytes
from tests.helpers.rows import write_rows

pytestmark = pytest.mark.systems

SQUARE = {"head_dim": 16}
SLICES = "c_attn.q=8,c_attn.k=2,c_attn.v=4"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """Small bases by family, and rows, in one folder."""
    folder = tmp_path_factory.mktemp("full-graph")
    write_checkpoint(folder / "llama", "llama", **SQUARE)
    write_checkpoint(folder / "gpt2", "gpt2")
    rows = [{"text": f"row {i} has {i + 1} after it and then {i + 2}"} for i in range(32)]
    write_rows(folder / "d", train=rows, valid=rows[:8], test=rows[8:16])
    return folder


@pytest.fixture
def train(here, run):
    """`packs train` on a base of ``here``; its report."""

    def go(model: str, out: str, *args, iters: int = 4) -> dict:
        code, printed, err = run(
            "train",
            "--model",
            here / model,
            "--data",
            here / "d",
            "--out",
            here / out,
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


def test_the_default_is_the_true_forward_with_all_projections(here, train):
    report = train("llama", "true")
    manifest = Pack.open(here / "true").manifest
    assert (
        report["objective"] == {"graph": "transformer"} == {"graph": manifest["objective"]["graph"]}
    )
    assert {path.rpartition(".")[2] for path in modules(here / "true")} == set(PROJECTIONS)
    tensors = Pack.open(here / "true").load_tensors()
    assert all(mx.abs(t).max().item() > 0 for t in tensors.values())  # each B has moved
    assert report["ppl_after"] < report["ppl_before"]


def test_the_stack_of_projections_is_named_in_the_manifest_and_evaluates_on_the_true_forward(
    here, train, run
):
    report = train("llama", "stack", "--objective", "projection-stack")
    objective = report["objective"]
    assert objective["graph"] == "projection-stack" and "not the transformer" in objective["note"]
    assert objective["stack"] == [f"model.layers.{i}.self_attn.o_proj" for i in range(2)]
    assert list(modules(here / "stack")) == [*objective["stack"], "lm_head"]
    assert objective["ppl_after"] < objective["ppl_before"]
    _, shown, _ = run("inspect", here / "stack")
    assert "Trained by projection-stack" in shown and "no attention" in shown
    code, printed, _ = run(
        "eval", here / "stack", "--model", here / "llama", "--data", here / "d", "--json"
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
def test_each_family_has_its_stack(here, train, family, model_type, tail):
    folder = here / f"family-{model_type}"
    write_checkpoint(folder, family, **(SQUARE if family in ("llama", "qwen3") else {}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    report = train(folder.name, f"of-{model_type}", "--objective", "projection-stack", iters=2)
    assert [path.partition(".0.")[2] for path in report["objective"]["stack"]][0] == tail
    assert len(report["objective"]["stack"]) == 2


def test_without_square_projections_the_head_alone_is_trained_and_the_note_says_so(here, train):
    write_checkpoint(here / "narrow", "qwen3")  # 128 -> 64, as 4096 -> 2560 in Qwen3-4B
    report = train("narrow", "head", "--objective", "projection-stack", iters=2)
    assert list(modules(here / "head")) == ["lm_head"] and report["objective"]["stack"] == []
    assert "the head alone, since o_proj is 128 -> 64" in report["objective"]["note"]


def test_where_nothing_is_left_to_train_the_objective_that_works_is_named(here, run):
    write_checkpoint(here / "tied", "qwen3", tie_word_embeddings=True)
    arguments = ("-q", "--model", here / "tied", "--data", here / "d", "--out", here / "none")
    code, out, err = run("train", *arguments, "--objective", "projection-stack")
    assert (code, out, err.count("\n")) == (2, "", 1) and not (here / "none").exists()
    check(run.error, "unsupported", "objective", "--objective transformer")


def test_gpt2_learns_a_rank_for_each_slice_and_merges_into_base_shaped_fp32_shards(
    here, train, run
):
    train("gpt2", "slices", "--target-modules", "c_attn", "--rank-pattern", SLICES)
    ranks = [s["rank"] for s in modules(here / "slices")["model.h.0.attn.c_attn"]["slices"]]
    assert ranks == [8, 2, 4]
    code, printed, err = run(
        "merge",
        here / "slices",
        "--model",
        here / "gpt2",
        "--out",
        here / "merged",
        "--dtype",
        "float32",
        "--data",
        here / "d",
        "--max-drift",
        0.02,
        "--json",
    )
    assert code == 0, err
    assert layout(here / "merged") == layout(here / "gpt2")  # Conv1D lies [in, out] in both
    assert layout(here / "merged")["h.0.attn.c_attn.weight"] == ("F32", [64, 192])
    base = load_base(here / "gpt2")
    with base.applied(here / "slices"):
        attached = logits(base)
    assert np.abs(attached - logits(base)).max() > 1e-2
    assert np.abs(attached - logits(load_base(here / "merged"))).max() < 1e-4


def test_ranks_of_slices_from_yaml_are_those_from_flags(here, train):
    (here / "slices.yaml").write_text(
        "target_modules: [c_attn]\nrank_pattern: {c_attn.q: 8, c_attn.k: 2, c_attn.v: 4}\n"
    )
    train("gpt2", "by-yaml", "-c", here / "slices.yaml", iters=1)
    train("gpt2", "by-flag", "--target-modules", "c_attn", "--rank-pattern", SLICES, iters=1)
    one, other = (Pack.open(here / name).load_tensors() for name in ("by-yaml", "by-flag"))
    assert all(mx.array_equal(one[name], other[name]) for name in one)


def test_the_last_k_targets_are_the_loss(train):
    report = train("llama", "suffix", "--objective", "projection-stack", "--ce-last-k", 2)
    assert report["trained_tokens"] == 4 * 4 * 2
    assert train("llama", "suffix-true", "--ce-last-k", 2)["trained_tokens"] == 4 * 4 * 2


def test_the_table_is_frozen_and_mapped_from_its_file(here, train):
    write_checkpoint(here / "wide", "llama", **SQUARE, intermediate_size=20_000)
    weights = (here / "wide" / "model.safetensors").read_bytes()
    others = active_bytes() / 1e9  # of other tests
    stack = train("wide", "mapped", "--objective", "projection-stack", iters=1)
    assert stack["objective"]["embedding"] == "frozen, mapped from its file"
    assert (here / "wide" / "model.safetensors").read_bytes() == weights
    assert not any("embed" in path for path in modules(here / "mapped"))
    added = stack["peak_gb"] - others
    others = active_bytes() / 1e9
    whole = train("wide", "whole", iters=1)
    assert added < 0.2 * (whole["peak_gb"] - others)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_manifest_maps_adapters_to_the_bases_tensors_and_a_merge_changes_just_those(
    here, train, run, family
):
    train(family, f"keys-{family}", iters=2)
    keys = {m["base_key"] for m in modules(here / f"keys-{family}").values()}
    out = here / f"keys-{family}-merged"
    code, _, err = run(
        "merge",
        here / f"keys-{family}",
        "--model",
        here / family,
        "--out",
        out,
        "--dtype",
        "float32",
        "--data",
        here / "d",
    )
    assert code == 0, err
    before, after = (mx.load(str(f / "model.safetensors")) for f in (here / family, out))
    assert {n for n in before if not mx.array_equal(before[n], after[n])} == keys
    _, shown, _ = run("inspect", here / f"keys-{family}", "-v")
    assert all(f"base key {key}" in shown for key in keys)


def test_double_quantization_is_the_default_and_can_be_turned_off(here, train, run):
    nf4 = ("--quantize", "nf4", "--keep", "lm_head,embed_tokens", "--target-modules", "q_proj")
    double_quant = {}
    for name, more in (("double", ()), ("single", ("--no-double-quant",))):
        train("llama", name, *nf4, *more, iters=1)
        double_quant[name] = Pack.open(here / name).manifest["base"]["quantization"]["double_quant"]
        _, shown, _ = run("inspect", here / name)
        assert ("nf4 4-bit g64 double-quantized" in shown) == (name == "double")
    assert double_quant == {"double": True, "single": False}


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (lambda f: (f / "model.safetensors").rename(f / "m.gguf"), ("GGUF", "--quantize nf4")),
        (
            lambda f: (f / "tokenizer.json").rename(f / "tokenizer.model"),
            ("tokenizer.model alone", "A tokenizer.json works"),
        ),
        (lambda f: _claim(f, "hqq"), ("quantized by hqq", "mlx-community")),
    ],
    ids=["gguf", "sentencepiece", "hqq"],
)
def test_what_cannot_be_read_is_refused_and_what_works_is_named(tmp_path, here, run, spoil, parts):
    spoil(write_checkpoint(tmp_path / "base", "llama"))
    code, out, err = run(
        "train", "--model", tmp_path / "base", "--data", here / "d", "--out", tmp_path / "o"
    )
    assert (code, out) == (2, "") and all(part in err for part in parts)
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
def test_layers_and_heads_of_the_manifest_are_the_bases_own(here, train, family, changes, counts):
    folder = here / f"counts-{family}"
    write_checkpoint(folder, family, **changes)
    config = json.loads((folder / "config.json").read_text())
    if family == "gpt2":
        config.pop("num_attention_heads")  # GPT-2's own config has n_head
        (folder / "config.json").write_text(json.dumps(config))
    train(folder.name, f"counted-{family}", iters=1)
    base = Pack.open(here / f"counted-{family}").manifest["base"]
    names = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size")
    assert tuple(base[name] for name in names) == counts


def test_a_4_bit_base_trains_both_objectives_and_the_same_pack_is_swapped(here, train):
    write_quantized(here / "packed", here / "llama")
    train("packed", "packed-stack", "--objective", "projection-stack", iters=2)
    base = load_base(here / "packed")
    before = logits(base)
    with base.applied(here / "packed-stack"):
        assert np.abs(logits(base) - before).max() > 0
    assert np.array_equal(logits(base), before)
