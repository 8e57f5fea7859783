"""docs/systems.md, section 1: LoRA on a quantized Qwen3-4B, as a user has it.

The base is one block of Qwen3-4B's true geometry in 4 bits, with random weights.
"""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from mlx_packs import Pack
from mlx_packs.cli.main import packs
from mlx_packs.reading import read_header
from mlx_packs.runtime import mx
from tests.helpers.checkpoints import write_checkpoint, write_quantized
from tests.helpers.errors import check
from tests.helpers.rows import write_rows

pytestmark = pytest.mark.systems

ROOT = Path(__file__).parents[2]
BLOCK = "model.layers.0"
RANKS = {"q_proj": 8, "k_proj": 2, "v_proj": 4, "down_proj": 3}
SHAPES = {  # in, out
    "self_attn.q_proj": (2560, 4096),
    "self_attn.k_proj": (2560, 1024),
    "self_attn.v_proj": (2560, 1024),
    "self_attn.o_proj": (4096, 2560),
    "mlp.gate_proj": (2560, 9728),
    "mlp.up_proj": (2560, 9728),
    "mlp.down_proj": (9728, 2560),
}


@pytest.fixture(scope="module")
def block_folder(tmp_path_factory) -> Path:
    """The block of Qwen3-4B, a small base in bf16, and rows."""
    folder = tmp_path_factory.mktemp("qwen3-4b")
    spec = importlib.util.spec_from_file_location("c", ROOT / "examples" / "random_checkpoint.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.write_checkpoint(folder / "qwen3-4b", "qwen3-4b", 1, 4096, 0)
    write_checkpoint(folder / "bf16", "qwen3", dtype=mx.bfloat16)
    rows = [{"text": f"row {i} has {i + 1} after it"} for i in range(12)]
    write_rows(folder / "d", train=rows, valid=rows[:2], test=rows[2:4])
    return folder


def training(here: Path, model: str, out: str, *args: object) -> list[str]:
    """Arguments of `packs train` on a base of ``here``, for one short batch."""
    arguments = ["--model", here / model, "--data", here / "d", "--out", here / out]
    arguments += "--iters 1 --batch-size 2 --max-seq-length 32 --overwrite --json".split()
    return ["train", *map(str, [*arguments, *args])]


@pytest.fixture
def train_block(block_folder, run):
    """`packs train` on a base of ``here``; its report and its output."""

    def go(model: str, out: str, *args, code: int = 0) -> tuple[dict, str]:
        exit_code, printed, err = run(*training(block_folder, model, out, *args))
        assert exit_code == code, err
        return json.loads(printed) if printed else {}, err

    return go


@pytest.fixture(scope="module")
def pack_of_block(block_folder) -> tuple[Path, str]:
    """A pack of the 4B block with a rank for each slice; and what was printed beside the report."""
    pattern = ",".join(f"{name}={rank}" for name, rank in RANKS.items())
    more = ("--rank", 4, "--rank-pattern", pattern, "--matmul-path", "dense", "-v")
    result = CliRunner().invoke(packs, training(block_folder, "qwen3-4b", "pack", *more))
    assert result.exit_code == 0, result.stderr
    return block_folder / "pack", result.stderr


@pytest.mark.slow
def test_grouped_projections_train_at_the_true_geometry_of_qwen3_4b(block_folder, pack_of_block):
    stored, _ = read_header(block_folder / "qwen3-4b" / "model.safetensors")
    assert stored[f"{BLOCK}.self_attn.q_proj.weight"]["shape"] == [4096, 320]  # what once crashed
    pack = Pack.open(pack_of_block[0])
    tensors = pack.load_tensors()
    for path, (inputs, outputs) in SHAPES.items():
        a, b = (tensors[f"{BLOCK}.{path}.lora_{part}"] for part in "ab")
        assert (a.shape[0], b.shape[1]) == (inputs, outputs)
        assert mx.abs(b).max().item() > 0
    groups = [[p.rpartition(".")[2] for p in g] for g in pack.manifest["adapters"]["groups"]]
    assert sorted(groups) == sorted(
        [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]
    )
    base = pack.manifest["base"]
    assert [base[k] for k in ("num_layers", "num_heads", "num_kv_heads", "head_dim")] == [
        1,
        32,
        8,
        128,
    ]


@pytest.mark.slow
def test_each_slice_has_the_rank_that_it_was_given(pack_of_block):
    specs = Pack.open(pack_of_block[0]).specs
    ranks = {path.rpartition(".")[2]: spec.slices[0].rank for path, spec in specs.items()}
    assert ranks == {"o_proj": 4, "gate_proj": 4, "up_proj": 4, **RANKS}


@pytest.mark.slow
def test_the_probed_geometry_is_logged(pack_of_block):
    assert "7 projections" in pack_of_block[1]
    for path, (inputs, outputs) in SHAPES.items():
        width = f"stored width {inputs // 8} = {inputs} x 4 / 32"
        assert (
            f"{BLOCK}.{path}: {inputs} -> {outputs} (affine 4-bit g64, {width})" in pack_of_block[1]
        )


PRUNED = """
from mlx_lm.models import qwen3

ModelArgs = qwen3.ModelArgs


class Model(qwen3.Model):
    def __init__(self, args):
        super().__init__(args)
        self.model.layers[-1].mlp = qwen3.MLP(args.hidden_size, args.intermediate_size // 2)
"""


@pytest.fixture(scope="module")
def pruned(block_folder) -> str:
    """A base whose last feed-forward is narrower than its config says, by code of its own."""
    folder = write_checkpoint(block_folder / "pruned", "qwen3")
    tensors = mx.load(str(folder / "model.safetensors"))
    for name in ("gate_proj", "up_proj", "down_proj"):
        key = f"model.layers.1.mlp.{name}.weight"
        half = [n // 2 if n == 128 else n for n in tensors[key].shape]
        tensors[key] = mx.contiguous(tensors[key][: half[0], : half[1]])
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    (folder / "pruned.py").write_text(PRUNED)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_file": "pruned.py"}))
    return "pruned"


def test_geometry_that_contradicts_the_config_names_module_and_shapes(
    block_folder, train_block, pruned, run
):
    train_block(pruned, "no", "--trust-remote-code", code=2)
    shapes = ("[64, 64]", "[128, 64]")
    check(run.error, "unreadable", None, "model.layers.1.mlp.", *shapes, "--train-fp16-fallback")
    assert not (block_folder / "no").exists()


def test_the_fp16_fallback_trains_on_all_the_same_and_says_where(
    block_folder, train_block, pruned, run
):
    report, err = train_block(pruned, "fallback", "--trust-remote-code", "--train-fp16-fallback")
    notes = [line for line in err.splitlines() if "fp16" in line]
    for name in ("gate", "up", "down"):
        assert any(f"model.layers.1.mlp.{name}_proj: " in line for line in notes), name
    assert np.isfinite(report["ppl_after"])
    code, out, _ = run(
        "eval",
        block_folder / "fallback",
        "--model",
        block_folder / pruned,
        "--data",
        block_folder / "d",
        "--trust-remote-code",
        "--json",
    )
    assert code == 0 and abs(json.loads(out)["pack"]["ppl"] / report["ppl_after"] - 1) < 1e-3


@pytest.mark.slow
def test_eval_batch_measures_ppl_and_speed_and_fails_gates(block_folder, train_block, run):
    train_block("bf16", "evaluated")
    evaluate = (
        "eval-batch",
        "--model",
        block_folder / "bf16",
        "--pack",
        block_folder / "evaluated",
        "--data",
        block_folder / "d",
        "--batch-size",
        1,
        "--sequence-length",
        16,
        "--max-tokens",
        4,
    )
    code, out, _ = run(*evaluate, "--json", "--max-pack-mb", 10)
    base, pack = json.loads(out)
    assert code == 0 and pack["pack_mb"] < 10
    for key in ("ppl", "ppl_se", "prompt_tps", "decode_tps", "first_token_ms", "peak_gb"):
        assert base[key] > 0 and pack[key] > 0
    for gate, value in (
        ("ppl-ratio", ("--max", 0.01)),
        ("tps-ratio", ("--min", 99)),
        ("pack-mb", ("--max", 0.001)),
    ):
        code, _, err = run(*evaluate, f"{value[0]}-{gate}", value[1])
        assert code == 1 and gate.replace("-", "_") in err.replace("-", "_")


@pytest.mark.slow
def test_size_gate_of_training_keeps_the_pack(block_folder, train_block):
    report, err = train_block("bf16", "small", "--max-pack-mb", 0.001, code=1)
    assert report["gates"]["max_pack_mb"]["passed"] is False
    assert "--max-pack-mb" in err
    assert Pack.open(block_folder / "small").manifest["gates"] == report["gates"]


def test_packs_are_lite_up_to_10_mb_and_heavy_beyond(block_folder, train_block, run):
    write_checkpoint(block_folder / "wide", "qwen3", intermediate_size=20_000)
    sizes = {}
    for profile, rank in (("lite", 2), ("heavy", 32)):
        report, _ = train_block(
            "wide", profile, "--target-modules", "up_proj,down_proj", "--rank", rank
        )
        sizes[profile] = report["pack_mb"]
        assert Pack.open(block_folder / profile).manifest["profile"] == profile
        _, shown, _ = run("inspect", block_folder / profile)
        assert f"MB, {profile})" in shown
    assert sizes["lite"] < 10 < sizes["heavy"]


def test_pack_fits_its_own_quantized_base_alone(block_folder, pack_of_block, run):
    code, out, _ = run(
        "apply", pack_of_block[0], "--model", block_folder / "qwen3-4b", "--dry-run", "--json"
    )
    assert code == 0 and json.loads(out)["geometry"] == "checked"
    assert run("apply", pack_of_block[0], "--model", block_folder / "bf16", "--dry-run")[0] == 2
    check(run.error, "mismatch", None, str(block_folder / "bf16"))


def test_detach_leaves_the_quantized_base_bit_identical(block_folder, train_block, run):
    write_quantized(block_folder / "4-bit", block_folder / "bf16")
    train_block("4-bit", "off")
    code, out, _ = run("apply", block_folder / "off", "--model", block_folder / "4-bit")
    assert code == 0 and "after detaching they are bit-identical to before" in out


def test_a_bf16_checkpoint_trains_by_the_same_command(block_folder, train_block):
    report, _ = train_block("bf16", "dense")
    manifest = Pack.open(block_folder / "dense").manifest
    assert manifest["base"]["quantization"] is None and np.isfinite(report["ppl_after"])
    assert {m["path"].rpartition(".")[2] for m in manifest["adapters"]["modules"]} == {
        path.rpartition(".")[2] for path in SHAPES
    }


def test_runbook_says_what_a_pack_checks_of_a_base(block_folder, train_block, run):
    text = (ROOT / "runbook.md").read_text().partition("## Pack compatibility")[2]
    assert "another quantization of the same model is another base" in text
    write_quantized(block_folder / "packed", block_folder / "bf16")
    train_block("packed", "of-packed")
    for model, code in (("packed", 0), ("bf16", 2)):
        assert (
            run("apply", block_folder / "of-packed", "--model", block_folder / model, "--dry-run")[
                0
            ]
            == code
        )
