"""packs train --task embedding: what it trains, keeps, resumes, reports and rejects; and what the
other commands make of its packs."""

import json
from pathlib import Path

import numpy as np
import pytest

from mlx_packs import LoRAConfig, Pack, TrainConfig, evaluate, load_base, train_pack
from mlx_packs.bases.encoder import Encoder
from mlx_packs.bases.sentence_config import SentenceConfig
from mlx_packs.convert.interop import export_pack
from mlx_packs.convert.merge import merge_pack
from mlx_packs.errors import PackError
from mlx_packs.memory.headers import Headers, tensors_of
from mlx_packs.memory.plan_text import answer
from mlx_packs.memory.read import read_headers
from mlx_packs.memory.recommend import recommend
from mlx_packs.objectives.embedding import DecoderVectors
from mlx_packs.packs.manifest import check_manifest
from mlx_packs.runtime import mx
from tests.helpers.decoder_embedders import PROMPT, write_decoder, write_embedder
from tests.helpers.encoders import (
    MINILM,
    MODERN,
    all_pairs,
    all_scored,
    all_triplets,
    write_encoder,
    write_pairs,
)
from tests.helpers.errors import check, raises
from tests.helpers.models import base_of
from tests.helpers.runs import Lines

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
    """A run that learned something; tests only read it."""
    out = tmp_path_factory.mktemp("runs") / "pairs"
    train = settings(iters=40, learning_rate=2e-3, steps_per_eval=20, steps_per_report=10)
    return train_pack(encoder, str(pair_data["pairs"]), LoRAConfig(rank=16), train, out)


def test_it_learns_what_belongs_together(run_of_pairs):
    report = run_of_pairs.report
    assert report["mrr_at_10_after"] > report["mrr_at_10_before"] + 0.2
    assert report["ndcg_at_10_after"] > report["ndcg_at_10_before"] + 0.2
    losses = [line["loss"] for line in run_of_pairs.curve if "loss" in line]
    assert losses[-1] < 0.7 * losses[0]
    valid = [line for line in run_of_pairs.curve if "valid_mrr_at_10" in line]
    assert [line["batch"] for line in valid] == [20] and valid[0]["valid_loss"] > 0


def test_a_cut_text_is_said_to_exceed_what_the_encoder_reads(encoder, tmp_path):
    longest = load_base(encoder).embedder.vectors.longest
    rows = [{"anchor": f"{i} {'car ' * 2 * longest}", "positive": f"car {i}"} for i in range(8)]
    display = Lines()
    train = settings(batch_size=2, iters=1, max_seq_length=4 * longest)
    data = {"train": rows[:6], "valid": rows[6:]}
    train_pack(encoder, data, LORA, train, tmp_path / "p", progress=display)
    assert f"data longer than {longest} tokens (--max-seq-length): 8 texts cut" in display.lines


@pytest.mark.parametrize(
    ("rows", "loss", "metric"),
    [
        ("scored", "cosent", "spearman"),
        ("triplets", "triplet", "triplet_accuracy"),
        ("pairs", "cached-mnrl", "mrr_at_10"),
    ],
)
def test_a_loss_is_reported_with_the_metric_of_its_rows(
    encoder, pair_data, tmp_path, rows, loss, metric
):
    train = settings(loss=loss, iters=2)
    result = train_pack(encoder, str(pair_data[rows]), LORA, train, tmp_path / "pack")
    assert result.report["loss"] == result.pack.manifest["objective"]["loss"] == loss
    scores = result.pack.manifest["eval"]
    assert next(key for key in scores if key.endswith("_before")) == f"{metric}_before"


def test_report_and_manifest_say_what_was_done(run_of_pairs):
    report, manifest = run_of_pairs.report, run_of_pairs.pack.manifest
    assert {"mrr_at_10_before", "trained_pairs", "pairs_per_s", "plan_peak_gb"} <= set(report)
    assert not [key for key in report if key.startswith("ppl") or "tokens" in key]

    described = {"split": "test", "rows": 22, "available": 22, "format": "pairs"}
    assert report["held_out"] == described and report["recompute"] == "none"

    assert manifest["objective"] == {
        "task": "embedding",
        "loss": "mnrl",
        "pooling": "mean",
        "normalize": True,
    }
    assert manifest["base"]["model_type"] == "bert" and manifest["base"]["num_heads"] == 4
    assert manifest["recipe"]["task"] == "embedding" and manifest["eval"]["rows"] == 22
    check_manifest(manifest)

    targets = {spec.rpartition(".")[2] for spec in run_of_pairs.pack.specs}
    assert targets == {"query", "key", "value", "dense"}

    folder = run_of_pairs.pack.path
    assert not (folder / "adapter_config.json").exists()  # mlx-lm has no encoder to open it on
    card = (folder / "README.md").read_text()
    assert "pipeline_tag: sentence-similarity" in card and "MRR@10 0.0" in card
    assert "packs merge" in card and "perplexity" not in card


@pytest.mark.parametrize(
    ("rows", "changes", "code", "names"),
    [
        ("pairs", {"packing": True}, "conflict", []),
        ("pairs", {"quantize": "nf4"}, "conflict", []),
        ("pairs", {"matmul_path": "quantized"}, "conflict", []),
        ("pairs", {"min_tps_ratio": 0.5}, "conflict", []),
        ("pairs", {"recompute": "selective"}, "unsupported", []),
        ("pairs", {"mini_batch_size": 4}, "conflict", ["cached-mnrl"]),
        ("pairs", {"triplet_margin": 0.3}, "conflict", ["run's is mnrl"]),
        ("scored", {"similarity_scale": 9.0}, "conflict", ["mnrl or cached-mnrl or cosent"]),
    ],
    ids=str,
)
def test_a_setting_that_would_have_no_effect_is_refused(
    encoder, pair_data, tmp_path, rows, changes, code, names
):
    with raises(code, next(iter(changes)), *names):
        train_pack(encoder, str(pair_data[rows]), LORA, settings(**changes), tmp_path / "p")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "code", "flag", "names"),
    [
        ("--model ENCODER --data PAIRS", "mismatch", "task", ["bert", "--task embedding"]),
        ("--model ENCODER --task lm --data PAIRS", "mismatch", "task", ["bert", "embedding"]),
        ("--data PAIRS", "conflict", "task", ["train.jsonl:1", "pairs", "--task embedding"]),
        ("--model ENCODER --task embedding", "invalid", "data", ["tiny"]),
        ("--model ENCODER --task embedding --show-mask", "conflict", "show_mask", []),
    ],
)
def test_base_that_does_not_fit_the_task_names_what_does(
    run, encoder, pair_data, flags, code, flag, names
):
    places = {"ENCODER": encoder, "PAIRS": pair_data["pairs"]}
    assert run("train", *(places.get(word, word) for word in flags.split()))[0] == 2
    check(run.error, code, flag, *names)


@pytest.mark.parametrize(
    ("rows", "batch_size", "flag", "names"),
    [
        ([{"anchor": "a", "positive": "fix"}] * 14, 16, "loss", ["--batch-size 2"]),
        (all_pairs()[:14], 1, "loss", ["--batch-size 2"]),
        ([{"sentence1": "a", "sentence2": "b", "score": 0.5}] * 14, 16, None, ["5"]),
    ],
    ids=["same", "one", "constant"],
)
def test_rows_that_make_no_batch_are_refused(encoder, tmp_path, rows, batch_size, flag, names):
    data = write_pairs(tmp_path / "rows", rows, 10)
    with raises("data", flag, *names):
        train_pack(encoder, str(data), LORA, settings(batch_size=batch_size), tmp_path / "pack")


def test_eval_gives_the_numbers_of_the_run(run, run_of_pairs, encoder, pair_data):
    pack = run_of_pairs.pack.path
    report = run_of_pairs.report
    pairs = ("--model", encoder, "--data", pair_data["pairs"])
    code, out, _ = run("eval", pack, *pairs, "--json")
    result = json.loads(out)
    assert code == 0 and result["rows"] == 22 and result["format"] == "pairs"
    for name, value in result["pack"].items():
        assert value == pytest.approx(report[f"{name}_after"], abs=1e-6)
        assert result["base"][name] == pytest.approx(report[f"{name}_before"], abs=1e-6)

    triplets = ("--model", encoder, "--data", pair_data["triplets"])
    code, out, _ = run("eval", pack, *triplets, "--limit", 7)
    assert code == 0 and "triplet accuracy" in out and "7 examples (triplets)" in out

    assert run("eval", "--pack", f"{pack}=0.5", *pairs)[0] == 0
    assert run("eval", pack, *pairs, "--loss-on", "all")[0] == 2
    check(run.error, "conflict", "loss_on", str(encoder), "--loss-on")
    assert evaluate(load_base(encoder), None, pair_data["pairs"]).pack is None


def test_inspect_list_and_apply_say_what_it_is(run, run_of_pairs, encoder):
    pack = run_of_pairs.pack.path
    code, out, _ = run("inspect", pack)
    assert code == 0 and "embeddings, loss mnrl" in out and "held-out MRR@10" in out

    code, out, _ = run("list", pack.parent, "--json")
    entry = json.loads(out)["packs"][0]
    assert entry["metric"] == "mrr_at_10" and entry["ppl_after"] is None
    assert entry["metric_after"] == run_of_pairs.report["mrr_at_10_after"]

    code, out, _ = run("apply", pack, "--model", encoder)
    assert code == 0 and "embeddings moved by up to" in out
    code, out, _ = run("apply", pack, "--model", encoder, "--dry-run", "--json")
    assert code == 0 and json.loads(out)["geometry"] == "checked"

    assert run("apply", pack, "--model", "tiny", "--dry-run")[0] == 2
    check(run.error, "mismatch", None, str(pack), "bert", "tiny")


def test_a_pack_is_of_one_pooling(run_of_pairs, tmp_path):
    other = load_base(write_encoder(tmp_path, pooling="cls"))  # the same tensors
    with raises("mismatch", None, "pooling mean", "pooling cls", "modules.json"):
        with other.applied(run_of_pairs.pack):
            pass


def test_full_fine_tuning_of_an_encoder_is_scored_and_merged_and_not_exported(
    encoder, pair_data, tmp_path
):
    data = str(pair_data["pairs"])
    train = settings(method="full", save_every=2, lr_schedule="constant")
    run = train_pack(encoder, data, train=train, out=tmp_path / "full")
    report, pack = run.report, run.pack
    assert report["method"] == "full" and report["trainable_parameters"] == report["base_weights"]

    base = load_base(encoder)
    plain = base.encode(TEXTS)
    result = evaluate(base, pack, data).to_json()
    assert result["base"]["mrr_at_10"] == pytest.approx(report["mrr_at_10_before"])
    assert result["pack"]["mrr_at_10"] == pytest.approx(report["mrr_at_10_after"])
    assert np.array_equal(base.encode(TEXTS), plain)

    merged = merge_pack(pack, encoder, tmp_path / "merged", data=data)
    assert merged["passed"] and merged["changed"] == len(pack.tensors) == 37
    with base.applied(pack):
        wanted = base.encode(TEXTS)
    assert np.array_equal(load_base(tmp_path / "merged").encode(TEXTS), wanted)
    with raises("unsupported", None, "PEFT"):
        export_pack(pack, "peft", tmp_path / "peft")


def test_merge_writes_a_folder_with_the_same_embeddings(pair_data, tmp_path):
    folder = write_encoder(tmp_path / "base", prefix="bert.")
    train = settings(iters=1, test_batches=1)
    pack = train_pack(folder, str(pair_data["pairs"]), LORA, train, tmp_path / "pack").pack

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


def test_export_to_peft_names_modules_in_full_and_comes_back(run, run_of_pairs, encoder, tmp_path):
    pack = run_of_pairs.pack.path
    code, _, _ = run("export", pack, "--to", "peft", "--out", tmp_path / "peft")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert code == 0 and config["task_type"] == "FEATURE_EXTRACTION"
    assert len(config["target_modules"]) == 12 and "dense" not in config["target_modules"]

    code, _, _ = run("import", tmp_path / "peft", "--model", encoder, "--out", tmp_path / "back")
    files = [folder / "adapters.safetensors" for folder in (tmp_path / "back", pack)]
    assert code == 0 and files[0].read_bytes() == files[1].read_bytes()

    (tmp_path / "peft" / "mlx_packs.json").unlink()  # by its own config, as of a stranger
    code, _, _ = run("import", tmp_path / "peft", "--model", encoder, "--out", tmp_path / "new")
    assert code == 0 and set(Pack.open(tmp_path / "new").specs) == set(run_of_pairs.pack.specs)

    assert run("export", pack, "--to", "mlx-lm", "--out", tmp_path / "mlx")[0] == 2
    check(run.error, "unsupported", None, str(pack), "mlx-lm")
    assert not (tmp_path / "mlx").exists()


def test_plan_of_minilm_recommends_lora_in_float32():
    config = MINILM | {"vocab_size": 30522}
    tensors = tensors_of(Encoder(config, SentenceConfig()))
    headers = Headers("all-MiniLM-L6-v2", config, tensors)
    options = recommend(headers, 8 * 10**9)
    best = options[0]
    assert best.method == "lora-fp32" and best.fits and best.plan.peak_gb < 8
    assert best.why.startswith("small base: full precision fits")
    assert best.train.batch_size == 32 and best.quantize == "none"
    assert "--task embedding" in best.command("x") and "--batch-size 32" in best.command("x")
    lines = "\n".join(answer(options, headers, 8 * 10**9, verbose=True))
    assert "lora-fp32" in lines and "qlora" not in lines
    least = min(option.train.batch_size for option in recommend(headers, 10**8))  # fits nowhere
    assert least == 2, "one pair has no negatives"


def test_a_plan_of_a_folder_reads_how_long_texts_are(run, encoder, tiny):
    code, out, _ = run("plan", "--model", encoder, "--memory", 8, "--json")
    result = json.loads(out)["options"]
    assert code == 0 and result[0]["max_seq_length"] == 48 and result[0]["method"] == "lora-fp32"
    assert "--task embedding" in result[0]["command"]
    assert run("plan", "--model", encoder, "--memory", 8, "--quantize", "nf4")[0] == 2
    check(run.error, "conflict", "quantize", "nf4", "float32")
    assert run("plan", "--memory", 8, "--task", "embedding")[0] == 0
    with raises("unknown", "target_modules", "q_proj"):
        recommend(read_headers(encoder), 10**10, LoRAConfig(target_modules=("q_proj",)))


def test_modern_bert_is_planned_and_trains(pair_data, tmp_path):
    folder = write_encoder(tmp_path / "modern", **MODERN)
    report = train_pack(folder, str(pair_data["pairs"]), LORA, settings(), tmp_path / "pack").report
    assert {"Wqkv", "Wo", "Wi"} == {
        path.rpartition(".")[2] for path in Pack.open(tmp_path / "pack").specs
    }
    assert report["plan_peak_gb"] > 0 and report["mrr_at_10_after"] > 0


@pytest.fixture(scope="module")
def embedder(tmp_path_factory) -> Path:
    return write_embedder(tmp_path_factory.mktemp("embedder") / "base")


@pytest.fixture(scope="module")
def decoder_run(embedder, pair_data, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "pairs"
    train = settings(iters=40, learning_rate=1e-2)
    return train_pack(embedder, str(pair_data["pairs"]), LoRAConfig(rank=16), train, out)


@pytest.mark.slow
def test_prompt_goes_before_anchors_alone_and_into_the_pack(decoder_run, embedder):
    report = decoder_run.report
    assert report["mrr_at_10_after"] > report["mrr_at_10_before"] + 0.2
    objective = decoder_run.pack.manifest["objective"]
    assert objective["query_prompt"] == PROMPT and objective["pooling"] == "lasttoken"
    check_manifest(decoder_run.pack.manifest)

    base = load_base(embedder)
    texts = [row["anchor"] for row in all_pairs()[-22:]]
    with base.applied(decoder_run.pack):
        anchors = base.encode(texts, prompt_name="query")
        positives = base.encode([row["positive"] for row in all_pairs()[-22:]])
    ranks = (anchors @ positives.T > np.diag(anchors @ positives.T)[:, None]).sum(axis=1)
    reciprocal = np.where(ranks < 10, 1 / (ranks + 1), 0).mean()
    assert reciprocal == pytest.approx(report["mrr_at_10_after"], abs=1e-6)


def test_plain_decoder_gets_an_end_token_and_learns_quantized(tmp_path, pair_data):
    folder = write_decoder(tmp_path / "base")
    base = load_base(folder)
    tokens = base.embedder.tokenizer("a car")["input_ids"]
    assert tokens == [*base.tokenizer.encode("a car"), base.tokenizer.eos_token_id]
    assert base.embedder.tokenizer("car " * 99, truncation=True, max_length=9)["input_ids"][-1] == (
        base.tokenizer.eos_token_id
    )
    assert np.linalg.norm(base.encode(["a car"])) == pytest.approx(1, abs=1e-5)

    train = settings(quantize="nf4", query_prompt="Q: ", iters=1)
    pack = train_pack(folder, str(pair_data["pairs"]), LORA, train, tmp_path / "pack").pack
    assert pack.manifest["objective"]["query_prompt"] == "Q: "
    assert pack.manifest["base"]["quantization"]


def test_rows_without_anchors_train_without_a_prompt(embedder, pair_data, tmp_path):
    data = str(pair_data["scored"])
    with raises("conflict", None, "train.jsonl:1", "scored pairs"):
        train_pack(embedder, data, LORA, settings(query_prompt="Q: "), tmp_path / "pack")
    assert not (tmp_path / "pack").exists()
    result = train_pack(embedder, data, LORA, settings(iters=1), tmp_path / "pack")
    assert "query_prompt" not in result.pack.manifest["objective"]


def test_padding_changes_no_vector(embedder):
    base = load_base(embedder)
    together = base.encode(TEXTS)
    alone = np.concatenate([base.encode([text]) for text in TEXTS])
    assert np.abs(together - alone).max() < 1e-5


def test_tokenizer_without_an_end_token_is_rejected(tmp_path, run, pair_data):
    folder = write_decoder(tmp_path / "base")
    file = folder / "tokenizer_config.json"
    config = {k: v for k, v in json.loads(file.read_text()).items() if k != "eos_token"}
    file.write_text(json.dumps(config))

    arguments = ("--task", "embedding", "--model", folder, "--data", pair_data["pairs"])
    assert run("train", *arguments, "--out", tmp_path / "pack")[0] == 2
    check(run.error, "unsupported", None, str(folder), "eos_token")
    assert not (tmp_path / "pack").exists()


def test_base_that_scales_its_logits_is_rejected():
    with pytest.raises(PackError, match="embedding: gemma2"):
        DecoderVectors(base_of("gemma2"))


def test_prompt_that_the_base_lacks_is_named(embedder):
    base = load_base(embedder)
    with pytest.raises(PackError, match="'passage'.*query, document"):
        base.encode(["a"], prompt_name="passage")
