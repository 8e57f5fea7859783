"""Section 2 of docs/systems.md: QLoRA for an 8B Llama 3, in two phases (ADR-001)."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from mlx_lm.models import llama as llama_family

from mlx_packs import LoRAConfig, load_base
from mlx_packs.adapters.attach import attach
from mlx_packs.cli.main import packs
from mlx_packs.packs.base import Base
from mlx_packs.packs.making import pack_of
from mlx_packs.runtime import mx
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.rows import write_rows

pytestmark = pytest.mark.systems
ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "examples" / "llama3_8b_qlora.yaml"
TARGETS = "q_proj k_proj v_proj o_proj up_proj down_proj gate_proj".split()
LLAMA_3 = {
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    **{"max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": False},
    "rope_scaling": {
        **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 8192,
    },
}
SMALL = {"hidden_size": 128, "intermediate_size": 448, "num_hidden_layers": 2, "head_dim": 4}
CODE = [{"text": f"def f{i}(x):\n    return x * {i} + {i % 7}\n" * 3} for i in range(40)]


@pytest.fixture
def llama(tmp_path) -> Path:
    """A Llama 3.1 of true ratios, vocabulary and RoPE, 1/32 as wide, with random weights."""
    config = {**LLAMA_3, **SMALL, "torch_dtype": "bfloat16"}
    return write_checkpoint(tmp_path / "llama-3.1", "llama", mx.bfloat16, **config)


@pytest.mark.slow
def test_the_recipe_of_the_note_trains_a_llama_3_1_as_it_stands(llama, tmp_path):
    """But for the size of the run."""
    data = write_rows(tmp_path / "code", train=CODE[:30], valid=CODE[30:34])
    out = tmp_path / "p"
    short = "--iters 6 --grad-accumulation-steps 1 --warmup-steps 0 --max-seq-length 64"
    short += " --batch-size 4 --learning-rate 5e-3 --json"
    paths = ("-c", RECIPE, "--model", llama, "--data", data, "--out", out)
    result = CliRunner().invoke(packs, ["train", *map(str, paths), *short.split()])
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    manifest = json.loads((out / "pack.json").read_text())
    q = manifest["base"]["quantization"]
    assert (q["mode"], q["double_quant"], q["group_size"]) == ("nf4", True, 64)
    recipe = manifest["recipe"]
    assert (recipe["rank"], recipe["alpha"], recipe["dropout"]) == (16, 16, 0.05)
    assert recipe["compute_dtype"] == "bfloat16" and recipe["target_modules"] == TARGETS
    base = manifest["base"]
    heads = base["num_heads"], base["num_kv_heads"], base["num_layers"]
    assert heads == (32, 8, 2)
    assert report["ppl_after"] < 0.9 * report["ppl_before"]
    rope = load_base(llama).model.layers[0].self_attn.rope
    assert type(rope).__name__ == "Llama3RoPE"


def test_a_plan_for_8b_says_what_full_lora_and_qlora_need(tmp_path, run):
    config = LLAMA_3 | {"model_type": "llama", "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    how = "--memory 24 --device gpu --batch-size 1 --max-seq-length 2048 --recompute block"
    how += " --rank 16"
    code, out, _ = run("plan", "--model", tmp_path, *how.split(), "--json")
    assert code == 0

    options = {(o["method"], o["quantize"]): o for o in json.loads(out)["options"]}
    assert options["full", "none"]["peak_gb"] > 60 and not options["full", "none"]["fits"]
    assert 16 < options["lora", "none"]["peak_gb"] < 32
    assert options["qlora", "nf4"]["peak_gb"] < 16 and options["qlora", "nf4"]["fits"]
    assert {o["adapter_weights"] for o in options.values() if o["method"] != "full"} == {41_943_040}
    assert all(o["why"] for o in options.values())


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "mb"), [("float32", 167.8), ("bfloat16", 83.9)])
def test_adapters_of_8b_at_rank_16_take_168_mb_or_84_in_half(dtype, mb, tmp_path):
    """With the true shapes; the base's weights are described, never allocated."""
    config = {"model_type": "llama", "rms_norm_eps": 1e-5, **LLAMA_3}
    model = llama_family.Model(llama_family.ModelArgs.from_dict(config))  # no array is computed
    model.freeze()
    base = Base("meta-llama/Meta-Llama-3-8B", Path("nowhere"), model, None, config, "0" * 64)
    attached = attach(base, LoRAConfig(rank=16, alpha=16, target_modules=tuple(TARGETS)))
    assert attached.parameter_count() == 41_943_040
    pack = pack_of(attached, dtype).save(tmp_path / "p")
    file = tmp_path / "p" / "adapters.safetensors"
    assert file.stat().st_size / 1e6 == pytest.approx(mb, abs=0.1) and pack.size_mb < mb + 0.2


@pytest.mark.slow
def test_two_phase_example_trains_and_shows_what_was_forgotten(tmp_path, run, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "examples" / "two_phases.yaml").read_text()
    short = tmp_path / "two_phases.yaml"
    short.write_text(text.replace("iters: 40", "iters: 4").replace("iters: 20", "iters: 3"))

    flags = ["--test-batches", 2, "--val-batches", 0, "--matmul-path", "dense"]
    flags += ["--max-seq-length", 128, "--metric", "none"]
    code, out, err = run("train", "-c", short, "--out", tmp_path / "p", "--json", *flags)
    assert code == 0, err

    broad, narrow = json.loads(out)["phases"]
    assert [(p["name"], p["steps"]) for p in (broad, narrow)] == [("broad", 4), ("code", 3)]
    assert narrow["replay"] == 0.2 and narrow["optimizer_state"] == "carry"
    assert narrow["after"]["code"]["ppl"] < narrow["before"]["code"]["ppl"]
    assert set(narrow["after"]) == {"broad", "code"}
    assert json.loads((tmp_path / "p" / "pack.json").read_text())["adapters"]["dtype"] == "bfloat16"

    code, out, _ = run("inspect", tmp_path / "p")
    assert code == 0 and out.count("phase   ") == 2
