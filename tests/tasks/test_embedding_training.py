"""packs train --task embedding: what it trains, keeps, resumes, reports and rejects; and what the
other commands make of its packs."""

import json
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from mlx_packs import LoRAConfig, Pack, TrainConfig, evaluate, load_base, train_pack
from mlx_packs.bases.encoder import Encoder, tensor_name
from mlx_packs.bases.sentence_config import SentenceConfig
from mlx_packs.convert.interop import export_pack
from mlx_packs.convert.merge import merge_pack
from mlx_packs.evaluation.embeddings import pearson, retrieval, spearman
from mlx_packs.memory.estimate import estimate, remedies
from mlx_packs.memory.headers import Headers, tensors_of
from mlx_packs.memory.read import read_headers
from mlx_packs.memory.recommend import recommend, table
from mlx_packs.packs.manifest import check_manifest
from mlx_packs.reading import sha256
from mlx_packs.runtime import mx
from mlx_packs.training.step import Stepper
from tests.helpers.encoders import (
    MINILM,
    all_pairs,
    all_scored,
    all_triplets,
    write_encoder,
    write_pairs,
)
from tests.helpers.errors import check, raises
from tests.helpers.headers import dense_headers

TEXTS = ["how do i fix a car?", "steps to repair the vehicle", "a"]
LORA = LoRAConfig(rank=8)


def settings(**changes) -> TrainConfig:
    plain = {"batch_size": 16, "iters": 4, "learning_rate": 1e-3, "steps_per_report": 2}
    return TrainConfig(task="embedding", **{**plain, **changes})


@pytest.fixture(scope="module")
def pair_data(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("data")
    rows = {"pairs": all_pairs(), "triplets": all_triplets(), "scored": all_scored()}
    return {name: write_pairs(folder / name, result) for name, result in rows.items()}


@pytest.fixture(scope="module")
def run_of_pairs(encoder, pair_data, tmp_path_factory):
    """A run that learned something, and its base."""
    out = tmp_path_factory.mktemp("runs") / "pairs"
    train = settings(iters=60, steps_per_eval=30, steps_per_report=10)
    return train_pack(encoder, str(pair_data["pairs"]), LoRAConfig(rank=16), train, out)


def test_it_learns_what_belongs_together(run_of_pairs):
    report = run_of_pairs.report
    assert report["mrr_at_10_after"] > report["mrr_at_10_before"] + 0.2
    assert report["ndcg_at_10_after"] > report["ndcg_at_10_before"] + 0.2
    losses = [line["loss"] for line in run_of_pairs.curve if "loss" in line]
    assert losses[-1] < 0.7 * losses[0]
    valid = [line for line in run_of_pairs.curve if "valid_mrr_at_10" in line]
    assert [line["batch"] for line in valid] == [30] and valid[0]["valid_loss"] > 0


def parts_of(loss: str, size: int) -> dict:
    return {"mini_batch_size": size} if loss == "cached-mnrl" else {}


@pytest.mark.parametrize(
    ("rows", "loss", "metric"),
    [
        ("scored", "cosine", "spearman"),
        ("scored", "cosent", "spearman"),
        ("triplets", "triplet", "triplet_accuracy"),
        ("triplets", "mnrl", "triplet_accuracy"),
        ("pairs", "cached-mnrl", "mrr_at_10"),
    ],
)
def test_every_loss_goes_down_and_is_reported(encoder, pair_data, tmp_path, rows, loss, metric):
    train = settings(loss=loss, iters=12, steps_per_report=4, **parts_of(loss, 5))
    result = train_pack(encoder, str(pair_data[rows]), LORA, train, tmp_path / "pack")
    losses = [line["loss"] for line in result.curve]
    assert losses[-1] < losses[0]
    assert result.report["loss"] == result.pack.manifest["objective"]["loss"] == loss
    scores = result.pack.manifest["eval"]
    assert next(key for key in scores if key.endswith("_before")) == f"{metric}_before"


def test_report_and_manifest_say_what_was_done(run_of_pairs, encoder):
    report, manifest = run_of_pairs.report, run_of_pairs.pack.manifest
    for key in (
        "pack run steps mrr_at_10_before mrr_at_10_after trained_pairs pairs_per_s train_s peak_gb "
        "pack_mb matmul_path plan_peak_gb gates learned_weights base_weights"
    ).split():
        assert key in report
    assert not [key for key in report if key.startswith("ppl") or "tokens" in key]
    described = {"split": "test", "rows": 22, "available": 22, "format": "pairs"}
    assert report["held_out"] == described
    base = load_base(encoder)
    shapes = [tensor["shape"] for tensor in tensors_of(base.model).values()]
    assert report["base_weights"] == sum(map(np.prod, shapes))
    assert report["learned_weights"] == manifest["adapters"]["parameters"]
    assert manifest["objective"] == {
        "task": "embedding",
        "loss": "mnrl",
        "pooling": "mean",
        "normalize": True,
    }
    assert manifest["base"]["model_type"] == "bert" and manifest["base"]["num_heads"] == 4
    assert manifest["recipe"]["task"] == "embedding" and manifest["eval"]["rows"] == 22
    check_manifest(manifest)
    assert {spec.rpartition(".")[2] for spec in run_of_pairs.pack.specs} == {
        "query",
        "key",
        "value",
        "dense",
    }
    folder = run_of_pairs.pack.path
    assert not (folder / "adapter_config.json").exists()  # mlx-lm has no encoder to open it on
    card = (folder / "README.md").read_text()
    assert "pipeline_tag: sentence-similarity" in card and "MRR@10 0.0" in card
    assert "packs merge" in card and "perplexity" not in card


def adapters(out: Path) -> str:
    return sha256(out / "adapters.safetensors")


@pytest.mark.parametrize("loss", ["mnrl", "cached-mnrl"])
def test_a_resumed_run_equals_an_unbroken_one_to_the_bit(
    encoder, pair_data, tmp_path, monkeypatch, loss
):
    lora = LoRAConfig(rank=4, dropout=0.1)
    train = settings(iters=5, save_every=100, loss=loss, **parts_of(loss, 6))
    whole = train_pack(encoder, str(pair_data["pairs"]), lora, train, tmp_path / "whole")
    taken = []

    def interrupt(stepper, *_):
        taken.append(stepper)
        if len(taken) == 3:
            signal.raise_signal(signal.SIGINT)
        return called(stepper, *_)

    called = Stepper.start
    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "start", interrupt)
        with raises("interrupted", None, "step-000003"):
            train_pack(encoder, str(pair_data["pairs"]), lora, train, tmp_path / "cut")
    assert not (tmp_path / "cut").exists()
    again = train_pack(encoder, str(pair_data["pairs"]), lora, train, tmp_path / "cut", resume=True)
    assert adapters(tmp_path / "cut") == adapters(tmp_path / "whole")
    assert again.report["mrr_at_10_after"] == whole.report["mrr_at_10_after"]
    losses = [[line["loss"] for line in result.curve] for result in (whole, again)]
    assert losses[0][-1] == losses[1][-1]


@pytest.mark.parametrize(
    "changes",
    [{"loss": "mnrl"}, {"similarity_scale": 10.0}, {"mini_batch_size": 8}],
    ids=["loss", "scale", "mini-batch"],
)
def test_resume_holds_the_settings_of_the_loss(encoder, pair_data, tmp_path, changes):
    begun = {"loss": "cached-mnrl"}
    train_pack(
        encoder, str(pair_data["pairs"]), LORA, settings(iters=1, **begun), tmp_path / "pack"
    )
    name, changes = next(iter(changes)), begun | changes
    with raises("mismatch", name):
        train_pack(
            encoder,
            str(pair_data["pairs"]),
            LORA,
            settings(iters=2, **changes),
            tmp_path / "pack",
            resume=True,
        )


def test_recomputed_blocks_give_the_same_steps(encoder, pair_data, tmp_path):
    losses = []
    for policy in ("none", "block"):
        train = settings(recompute=policy, steps_per_report=1, iters=3, batch_size=8)
        result = train_pack(encoder, str(pair_data["pairs"]), LORA, train, tmp_path / policy)
        losses.append([line["loss"] for line in result.curve])
    assert np.abs(np.subtract(*losses)).max() < 1e-5


def test_targets_and_accumulation_are_as_asked(encoder, pair_data, tmp_path):
    lora = LoRAConfig(rank=4, target_modules=("query", "value"), num_layers=1)
    train = settings(grad_accumulation_steps=2)
    result = train_pack(encoder, str(pair_data["scored"]), lora, train, tmp_path / "pack")
    assert list(result.pack.specs) == [
        "encoder.layer.1.attention.self.query",
        "encoder.layer.1.attention.self.value",
    ]
    assert result.report["steps"] == 2 and result.report["batches"] == 4


MISPLACED = {
    "packing": True,
    "loss_on": "all",
    "ce_last_k": 4,
    "quantize": "nf4",
    "z_loss": 0.1,
    "matmul_path": "quantized",
    "cache_frozen": "on",
    "compute_dtype": "float16",
    "min_tps_ratio": 0.5,
    "train_fp16_fallback": True,
}


@pytest.mark.parametrize("name", MISPLACED)
def test_settings_of_the_next_token_are_refused(encoder, pair_data, tmp_path, name):
    with raises("conflict", name):
        train = settings(**{name: MISPLACED[name]})
        train_pack(encoder, str(pair_data["pairs"]), LORA, train, tmp_path / "pack")
    assert not (tmp_path / "pack").exists() and not (tmp_path / "pack-run").exists()


def test_selective_recomputation_is_refused(encoder, pair_data, tmp_path):
    with raises("unsupported", "recompute"):
        train_pack(
            encoder, str(pair_data["pairs"]), LORA, settings(recompute="selective"), tmp_path / "p"
        )


@pytest.mark.parametrize(
    ("rows", "changes", "names"),
    [
        ("pairs", {"mini_batch_size": 4}, ["cached-mnrl"]),
        ("pairs", {"triplet_margin": 0.3}, ["run's is mnrl"]),
        ("triplets", {"triplet_distance": "cosine"}, ["--loss triplet"]),
        ("scored", {"similarity_scale": 9.0}, ["mnrl or cached-mnrl or cosent", "is cosine"]),
    ],
)
def test_a_setting_of_another_loss_is_refused(encoder, pair_data, tmp_path, rows, changes, names):
    with raises("conflict", next(iter(changes)), *names):
        train_pack(encoder, str(pair_data[rows]), LORA, settings(**changes), tmp_path / "p")
    assert not (tmp_path / "p").exists() and not (tmp_path / "p-run").exists()


def test_flags_of_a_resumed_run_need_not_say_its_task_again(run, encoder, pair_data, tmp_path):
    out = str(tmp_path / "pack")
    arguments = [
        "--model",
        encoder,
        "--task",
        "embedding",
        "--data",
        pair_data["pairs"],
        "--out",
        out,
    ]
    assert run("train", *arguments, "--iters", 1, "--method", "full")[0] == 0
    code, _, _ = run("train", "--out", out, "--resume", "--similarity-scale", 10)
    assert code == 2
    check(run.error, "mismatch", "similarity_scale", "20.0", "10.0")


def test_settings_of_embeddings_are_refused_without_the_task():
    for changes in ({"loss": "mnrl"}, {"mini_batch_size": 4}, {"triplet_distance": "cosine"}):
        with raises("conflict", next(iter(changes)), "--task embedding"):
            TrainConfig(**changes)
    for changes, code in (
        ({"similarity_scale": 0.0}, "invalid"),
        ({"triplet_margin": -1.0}, "invalid"),
        ({"mini_batch_size": 0}, "invalid"),
        ({"loss": "mse"}, "unknown"),
        ({"triplet_distance": "far"}, "unknown"),
    ):
        with raises(code, next(iter(changes))):
            TrainConfig(task="embedding", **changes)


def test_base_that_does_not_fit_the_task_names_what_does(run, encoder, pair_data):
    assert run("train", "--model", encoder, "--data", pair_data["pairs"])[0] == 2
    check(run.error, "mismatch", "task", str(encoder), "bert", "--task embedding")
    assert run("train", "--task", "embedding", "--data", pair_data["pairs"])[0] == 2
    check(run.error, "mismatch", "task", "tiny", "qwen3", "--task lm")
    assert run("train", "--data", pair_data["pairs"])[0] == 2
    check(run.error, "conflict", "task", "train.jsonl:1", "pairs", "--task embedding")
    assert run("train", "--model", encoder, "--task", "embedding")[0] == 2
    check(run.error, "invalid", "data", str(encoder), "tiny")
    assert run("train", "--model", encoder, "--task", "embedding", "--data", "tiny")[0] == 2
    check(run.error, "data", "task", "train.jsonl:1", "{anchor, positive}", "['messages']")
    assert run("train", "--model", encoder, "--task", "embedding", "--show-mask")[0] == 2
    check(run.error, "conflict", "show_mask")


def test_rows_that_make_no_batch_are_refused(encoder, tmp_path):
    same = [{"anchor": "a", "positive": "fix"}] * 40
    data = write_pairs(tmp_path / "same", same, 10)
    with raises("data", "loss", "--batch-size 2"):
        train_pack(encoder, str(data), LORA, settings(), tmp_path / "pack")
    data = write_pairs(tmp_path / "one", all_pairs())
    with raises("data", "loss", "--batch-size 2"):
        train_pack(encoder, str(data), LORA, settings(batch_size=1), tmp_path / "pack")
    rows = [{"sentence1": "a", "sentence2": "b", "score": 0.5}] * 40
    data = write_pairs(tmp_path / "constant", rows, 10)
    with raises("data", None, "5"):
        train_pack(encoder, str(data), LORA, settings(), tmp_path / "pack")


def test_one_row_held_out_is_enough_for_ranking(encoder, tmp_path):
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(r) + "\n" for r in all_pairs()[:12]))
    train = settings(batch_size=4, iters=3, steps_per_eval=1)
    result = train_pack(encoder, str(tmp_path / "few.jsonl"), LORA, train, tmp_path / "pack")
    assert result.report["held_out"]["rows"] == 1 and result.report["mrr_at_10_after"] == 1
    assert [line["valid_loss"] for line in result.curve if "valid_loss" in line] == [0, 0]


def test_eval_gives_the_numbers_of_the_run(run, run_of_pairs, encoder, pair_data):
    pack = run_of_pairs.pack.path
    code, out, _ = run("eval", pack, "--model", encoder, "--data", pair_data["pairs"], "--json")
    result = json.loads(out)
    assert code == 0 and result["rows"] == 22 and result["format"] == "pairs"
    for name, value in result["pack"].items():
        assert value == pytest.approx(run_of_pairs.report[f"{name}_after"], abs=1e-6)
        assert result["base"][name] == pytest.approx(
            run_of_pairs.report[f"{name}_before"], abs=1e-6
        )
    code, out, _ = run(
        "eval", pack, "--model", encoder, "--data", pair_data["triplets"], "--limit", 7
    )
    assert code == 0 and "triplet accuracy" in out and "7 examples (triplets)" in out
    half = run("eval", "--pack", f"{pack}=0.5", "--model", encoder, "--data", pair_data["pairs"])
    assert half[0] == 0
    args = ("eval", pack, "--model", encoder, "--data", pair_data["pairs"])
    assert run(*args, "--loss-on", "all")[0] == 2
    check(run.error, "conflict", "loss_on", str(encoder), "--loss-on")
    base = load_base(encoder)
    assert evaluate(base, None, pair_data["pairs"]).pack is None


def test_inspect_list_and_apply_say_what_it_is(run, run_of_pairs, encoder):
    pack = run_of_pairs.pack.path
    code, out, _ = run("inspect", pack)
    assert code == 0 and "embeddings, loss mnrl" in out and "held-out MRR@10" in out
    code, out, _ = run("list", pack.parent)
    assert code == 0 and "MRR@10 0." in out
    code, out, _ = run("list", pack.parent, "--json")
    entry = json.loads(out)[0]
    assert entry["metric"] == "mrr_at_10" and entry["ppl_after"] is None
    assert entry["metric_after"] == run_of_pairs.report["mrr_at_10_after"]
    code, out, _ = run("apply", pack, "--model", encoder)
    assert code == 0 and "embeddings moved by up to" in out
    code, out, _ = run("apply", pack, "--model", encoder, "--dry-run", "--json")
    assert code == 0 and json.loads(out)["geometry"] == "checked"
    assert run("apply", pack, "--model", "tiny", "--dry-run")[0] == 2
    check(run.error, "mismatch", None, str(pack), "bert", "tiny")
    code, out, _ = run("diff", pack, pack)
    assert code == 0


def test_applied_changes_embeddings_and_leaves_none_behind(run_of_pairs, encoder):
    base = load_base(encoder)
    before = base.encode(TEXTS)
    with base.applied(run_of_pairs.pack):
        inside = base.encode(TEXTS)
    assert np.abs(inside - before).max() > 1e-2
    assert np.array_equal(base.encode(TEXTS), before)


def test_a_pack_is_of_one_pooling(run_of_pairs, tmp_path):
    other = load_base(write_encoder(tmp_path, pooling="cls"))  # the same tensors
    with raises("mismatch", None, "pooling mean", "pooling cls", "modules.json"):
        with other.applied(run_of_pairs.pack):
            pass


@pytest.fixture(scope="module")
def full_encoder_run(encoder, pair_data, tmp_path_factory):
    out = tmp_path_factory.mktemp("full") / "pack"
    train = settings(method="full", iters=6, lr_schedule="constant")
    return train_pack(encoder, str(pair_data["pairs"]), train=train, out=out)


def test_full_fine_tuning_of_an_encoder_is_scored_by_eval(full_encoder_run, encoder, pair_data):
    report = full_encoder_run.report
    assert report["method"] == "full" and report["learned_weights"] == report["base_weights"]
    losses = [line["loss"] for line in full_encoder_run.curve if "loss" in line]
    assert losses[-1] < losses[0]
    base = load_base(encoder)
    plain = base.encode(TEXTS)
    result = evaluate(base, full_encoder_run.pack, str(pair_data["pairs"])).to_json()
    assert result["base"]["mrr_at_10"] == pytest.approx(report["mrr_at_10_before"])
    assert result["pack"]["mrr_at_10"] == pytest.approx(report["mrr_at_10_after"])
    assert np.array_equal(base.encode(TEXTS), plain)


def test_full_fine_tuning_of_an_encoder_resumes_to_the_bit(
    full_encoder_run, encoder, pair_data, tmp_path
):
    for iters in (4, 6):
        train = settings(method="full", iters=iters, lr_schedule="constant")
        resumed = train_pack(
            encoder, str(pair_data["pairs"]), train=train, out=tmp_path / "pack", resume=iters > 4
        )
    assert adapters(tmp_path / "pack") == adapters(full_encoder_run.pack.path)
    assert resumed.report["mrr_at_10_after"] == full_encoder_run.report["mrr_at_10_after"]


def test_full_fine_tuning_of_an_encoder_is_merged_and_not_exported(
    full_encoder_run, encoder, pair_data, tmp_path
):
    report = merge_pack(
        full_encoder_run.pack, encoder, tmp_path / "merged", data=pair_data["pairs"]
    )
    assert report["passed"] and report["changed"] == len(full_encoder_run.pack.tensors) == 37
    base = load_base(encoder)
    with base.applied(full_encoder_run.pack):
        wanted = base.encode(TEXTS)
    assert np.array_equal(load_base(tmp_path / "merged").encode(TEXTS), wanted)
    with raises("unsupported", None, "PEFT"):
        export_pack(full_encoder_run.pack, "peft", tmp_path / "peft")


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_merge_writes_a_folder_with_the_same_embeddings(pair_data, tmp_path, prefix):
    folder = write_encoder(tmp_path / "base", prefix=prefix)
    pack = train_pack(folder, str(pair_data["pairs"]), LORA, settings(), tmp_path / "pack").pack
    report = merge_pack(pack, folder, tmp_path / "merged", data=pair_data["pairs"])
    assert report["passed"] and report["changed"] == 12 and report["names"] == "base"
    assert report["drift_mean"] < 1e-6 < report["drift_of_pack"]
    base, merged = load_base(folder), load_base(tmp_path / "merged")
    with base.applied(pack):
        wanted = base.encode(TEXTS)
    assert np.abs(merged.encode(TEXTS) - wanted).max() < 1e-5
    assert np.abs(base.encode(TEXTS) - wanted).max() > 1e-4
    assert merged.model.sentence_config == base.model.sentence_config  # pooling, Normalize, length
    stored = [mx.load(str(f)) for f in (tmp_path / "merged").glob("model*.safetensors")]
    names = {name for tensors in stored for name in tensors}
    assert names == set(mx.load(str(folder / "model.safetensors")))
    with raises("exists", "out", str(tmp_path / "merged")):
        merge_pack(pack, folder, tmp_path / "merged", data=pair_data["pairs"])
    merge_pack(pack, folder, tmp_path / "merged", data=pair_data["pairs"], overwrite=True)


def test_merge_refuses_what_it_cannot_do(run, run_of_pairs, encoder, pair_data, tmp_path):
    pack = run_of_pairs.pack.path
    arguments = ["merge", pack, "--model", encoder, "--data", pair_data["pairs"]]
    assert run(*arguments, "--out", tmp_path / "m", "--requantize", "affine4")[0] == 2
    check(run.error, "unsupported", "requantize", "affine4")
    code, _, err = run(
        *arguments, "--out", tmp_path / "m", "--dtype", "bfloat16", "--max-drift", 1e-8
    )
    assert code == 1 and "--max-drift" in err and "none --dtype float32" in err
    assert not (tmp_path / "m").exists()
    code, out, _ = run(*arguments, "--out", tmp_path / "m")
    assert code == 0 and "1 - cosine" in out and (tmp_path / "m" / "1_Pooling").is_dir()


def test_export_to_peft_names_modules_in_full_and_comes_back(run, run_of_pairs, encoder, tmp_path):
    pack = run_of_pairs.pack.path
    code, _, _ = run("export", pack, "--to", "peft", "--out", tmp_path / "peft")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert code == 0 and config["task_type"] == "FEATURE_EXTRACTION"
    assert len(config["target_modules"]) == 12 and "dense" not in config["target_modules"]
    code, _, _ = run("import", tmp_path / "peft", "--model", encoder, "--out", tmp_path / "back")
    assert code == 0 and adapters(tmp_path / "back") == adapters(pack)
    (tmp_path / "peft" / "mlx_packs.json").unlink()  # by its own config, as of a stranger
    code, _, _ = run("import", tmp_path / "peft", "--model", encoder, "--out", tmp_path / "new")
    assert code == 0 and set(Pack.open(tmp_path / "new").specs) == set(run_of_pairs.pack.specs)
    assert run("export", pack, "--to", "mlx-lm", "--out", tmp_path / "mlx")[0] == 2
    check(run.error, "unsupported", None, str(pack), "mlx-lm")
    assert not (tmp_path / "mlx").exists()
    both = (f"{pack}=1", f"{tmp_path / 'new'}=1")
    assert run("combine", *both, "--model", encoder, "--out", tmp_path / "c")[0] == 2
    check(run.error, "unsupported", "model", "combine", "bert")


def test_correlations_are_those_of_the_definition():
    a = np.array([1.0, 2.0, 2.0, 4.0, 0.5])
    b = np.array([0.1, 0.9, 0.3, 0.5, 0.5])
    assert pearson(a, b) == pytest.approx(np.corrcoef(a, b)[0, 1])
    ranks = np.array([2, 3.5, 3.5, 5, 1]), np.array([1, 5, 2, 3.5, 3.5])
    assert spearman(a, b) == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert pearson(a, np.ones(5)) == 0.0


def test_retrieval_counts_every_positive_of_an_anchor():
    vectors = np.eye(4, dtype=np.float32)
    vectors = np.concatenate([vectors, [[0.9, 0.1, 0, 0]], [[0, 0, 1, 0]]]).astype(np.float32)
    result = retrieval(vectors, np.array([0, 0, 1]), np.array([4, 3, 5]))
    # anchor 0: 4 and 3, both right, stand first; anchor 1: 4, 3 and then 5, which is right
    assert result["mrr_at_10"] == pytest.approx((1 + 1 / 3) / 2)
    assert result["ndcg_at_10"] == pytest.approx((1 + 1 / 2) / 2)
    assert result["recall_at_1"] == pytest.approx((1 / 2 + 0) / 2)


def minilm() -> Headers:
    config = MINILM | {"vocab_size": 30522}
    return Headers("all-MiniLM-L6-v2", config, tensors_of(Encoder(config, SentenceConfig())))


def test_a_folder_with_the_config_alone_is_planned(run, encoder, tmp_path):
    config = json.loads((encoder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = read_headers(tmp_path)
    of_weights = {n: t["shape"] for n, t in read_headers(encoder).tensors.items()}
    assert {n: t["shape"] for n, t in result.tensors.items()} == {
        n: shape for n, shape in of_weights.items() if tensor_name(n)
    }
    code, out, _ = run("plan", "--model", tmp_path, "--memory", 8, "--json")
    assert code == 0 and json.loads(out)[0]["method"] == "lora-fp32"
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": None}))
    assert run("plan", "--model", tmp_path, "--memory", 8)[0] == 2
    check(run.error, "unreadable", None, "config.json: hidden_size", "None")


def test_a_plan_leaves_no_batch_without_negatives():
    headers = minilm()
    full = TrainConfig(method="full")
    (only,) = recommend(headers, 8 * 10**9, train=full)
    assert only.train.batch_size == 32 and "--batch-size 32" in only.command("m")
    result = recommend(headers, 10**8)  # fits nowhere
    assert result[0].fit == "no" and min(o.train.batch_size for o in result) == 2


def test_plan_of_minilm_recommends_lora_in_float32():
    headers = minilm()
    for memory in (8, 16, 24, 64):
        best = recommend(headers, memory * 10**9)[0]
        assert best.method == "lora-fp32" and best.fits and best.plan.peak_gb < memory
        assert "not QLoRA" in best.why and "22.6 M weights" in best.why
        assert best.train.batch_size == 32 and best.quantize == "none"
        command = best.command("x")
        assert "--task embedding" in command and "--batch-size 32" in command
    lines = "\n".join(table(recommend(headers, 8 * 10**9), headers, 8 * 10**9))
    assert "lora-fp32" in lines and "qlora" not in lines


def test_a_plan_counts_what_a_batch_holds():
    headers = minilm()

    def peak(lora=LORA, **changes) -> int:
        train = TrainConfig(**({"task": "embedding", "max_seq_length": 128} | changes))
        return estimate(headers, lora, train).peak_bytes

    plain = peak(batch_size=32)
    assert 1.8 < peak(batch_size=64) / plain < 2.1
    assert peak(batch_size=32, loss="triplet") > 1.3 * plain
    assert peak(batch_size=32, recompute="block") < 0.5 * plain
    assert peak(batch_size=256, loss="cached-mnrl", mini_batch_size=16) < plain
    assert peak(LoRAConfig(rank=8, num_layers=1), batch_size=32) < 0.6 * plain
    assert plain == peak(batch_size=32, loss="auto", quantize="none")


def test_full_fine_tuning_is_not_sent_to_fewer_layers():
    """`--method full` trains all of an encoder, and rejects --num-layers."""
    headers, train = minilm(), TrainConfig(task="embedding", method="full", matmul_path="dense")
    ways = remedies(headers, LoRAConfig(), train, partial(estimate, headers))
    assert "a smaller --batch-size" in ways and "a smaller --num-layers" not in ways
    causal = dense_headers("small")
    ways = remedies(causal, LoRAConfig(), replace(train, task="lm"), partial(estimate, causal))
    assert "a smaller --num-layers" in ways


def test_a_plan_of_a_folder_reads_how_long_texts_are(run, encoder, tiny):
    code, out, _ = run("plan", "--model", encoder, "--memory", 8, "--json")
    result = json.loads(out)
    assert code == 0 and result[0]["max_seq_length"] == 48 and result[0]["method"] == "lora-fp32"
    assert "--task embedding" in result[0]["command"]
    assert run("plan", "--model", encoder, "--memory", 8, "--quantize", "nf4")[0] == 2
    check(run.error, "conflict", "quantize", "nf4", "float32")
    assert run("plan", "--memory", 8, "--task", "embedding")[0] == 2
    check(run.error, "mismatch", "task", "tiny", "qwen3")
    with raises("unknown", "target_modules", "q_proj"):
        recommend(read_headers(encoder), 10**10, LoRAConfig(target_modules=("q_proj",)))


def test_a_run_that_cannot_fit_is_refused(encoder, pair_data, tmp_path, monkeypatch):
    monkeypatch.setattr("mlx_packs.runtime.total_memory", lambda: 10**6)
    with raises("memory", None, "--force"):
        train_pack(encoder, str(pair_data["pairs"]), LORA, settings(), tmp_path / "pack")
    assert not (tmp_path / "pack").exists()
    result = train_pack(
        encoder, str(pair_data["pairs"]), LORA, settings(), tmp_path / "p", force=True
    )
    assert result.report["recompute"] == "block"  # what takes least
    monkeypatch.undo()
    result = train_pack(encoder, str(pair_data["pairs"]), LORA, settings(), tmp_path / "q")
    assert result.report["recompute"] == "none"
