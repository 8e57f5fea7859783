"""docs/systems.md, section 1: LoRA on a quantized Qwen3-4B, as a user has it.

The base is one block of Qwen3-4B's true geometry in 4 bits, with random weights, or a small one.
"""

import importlib.util
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from mlx_packs import Pack
from mlx_packs.cli.main import packs
from mlx_packs.reading import read_header
from mlx_packs.runtime import mx
from tests.helpers.checkpoints import write_checkpoint, write_quantized
from tests.helpers.errors import check
from tests.helpers.models import base_of
from tests.helpers.packs import random_pack
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
def folder(tmp_path_factory) -> Path:
    """A small base in bf16, its copy in 4 bits, and rows."""
    folder = tmp_path_factory.mktemp("qwen3-4b")
    write_checkpoint(folder / "bf16", "qwen3", dtype=mx.bfloat16)
    write_quantized(folder / "4-bit", folder / "bf16")
    rows = [{"text": f"row {i} has {i + 1} after it"} for i in range(12)]
    return write_rows(folder / "d", train=rows, valid=rows[:2], test=rows[2:4]).parent


@pytest.fixture(scope="module")
def train(folder):
    """`packs train` on a base of the folder, for one short batch; the report and other output."""

    def go(model: str, out: str, *args) -> tuple[dict, str]:
        arguments = ["--model", folder / model, "--data", folder / "d", "--out", folder / out]
        arguments += "--iters 1 --batch-size 2 --max-seq-length 32 --json".split()
        result = CliRunner().invoke(packs, ["train", *map(str, [*arguments, *args])])
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout), result.stderr

    return go


@pytest.fixture(scope="module")
def pack_of_block(folder, train) -> tuple[Path, str]:
    """A pack of the 4B block with a rank for each slice; and what was printed beside the report."""
    spec = importlib.util.spec_from_file_location("c", ROOT / "examples" / "random_checkpoint.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.write_checkpoint(folder / "qwen3-4b", "qwen3-4b", 1, 4096, 0)
    pattern = ",".join(f"{name}={rank}" for name, rank in RANKS.items())
    ranks = ("--rank", 4, "--rank-pattern", pattern)
    _, printed = train("qwen3-4b", "pack", *ranks, "--matmul-path", "dense", "-v")
    return folder / "pack", printed


@pytest.mark.slow
def test_grouped_projections_train_at_the_true_geometry_of_qwen3_4b(folder, pack_of_block):
    stored, _ = read_header(folder / "qwen3-4b" / "model.safetensors")
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

    names = ("num_layers", "num_heads", "num_kv_heads", "head_dim")
    assert [pack.manifest["base"][name] for name in names] == [1, 32, 8, 128]


@pytest.mark.slow
def test_each_slice_has_the_rank_that_it_was_given(pack_of_block):
    specs = Pack.open(pack_of_block[0]).specs
    ranks = {path.rpartition(".")[2]: spec.slices[0].rank for path, spec in specs.items()}
    assert ranks == {"o_proj": 4, "gate_proj": 4, "up_proj": 4, **RANKS}


@pytest.mark.slow
def test_the_probed_geometry_is_logged(pack_of_block):
    _, printed = pack_of_block
    for path, (inputs, outputs) in SHAPES.items():
        width = f"stored width {inputs // 8} = {inputs} x 4 / 32"
        assert f"{BLOCK}.{path}: {inputs} -> {outputs} (affine 4-bit g64, {width})" in printed


PRUNED = """
from mlx_lm.models import qwen3

ModelArgs = qwen3.ModelArgs


class Model(qwen3.Model):
    def __init__(self, args):
        super().__init__(args)
        self.model.layers[-1].mlp = qwen3.MLP(args.hidden_size, args.intermediate_size // 2)
"""


@pytest.fixture(scope="module")
def pruned(folder) -> str:
    """A base whose last feed-forward is narrower than its config says, by code of its own."""
    base = write_checkpoint(folder / "pruned", "qwen3")
    tensors = mx.load(str(base / "model.safetensors"))
    for name in ("gate_proj", "up_proj", "down_proj"):
        key = f"model.layers.1.mlp.{name}.weight"
        half = [n // 2 if n == 128 else n for n in tensors[key].shape]
        tensors[key] = mx.contiguous(tensors[key][: half[0], : half[1]])
    mx.save_safetensors(str(base / "model.safetensors"), tensors)
    (base / "pruned.py").write_text(PRUNED)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "model_file": "pruned.py"}))
    return "pruned"


def test_geometry_that_contradicts_the_config_names_module_and_shapes(folder, pruned, run):
    places = ("--model", folder / pruned, "--data", folder / "d", "--out", folder / "no")
    assert run("train", *places, "--trust-remote-code")[0] == 2
    shapes = ("[64, 64]", "[128, 64]")
    check(run.error, "unreadable", None, "model.layers.1.mlp.", *shapes, "--train-fp16-fallback")
    assert not (folder / "no").exists()


def test_the_fp16_fallback_trains_on_all_the_same_and_says_where(folder, train, pruned, run):
    report, err = train(pruned, "fallback", "--trust-remote-code", "--train-fp16-fallback")
    notes = [line for line in err.splitlines() if "fp16" in line]
    for name in ("gate", "up", "down"):
        assert any(f"model.layers.1.mlp.{name}_proj: " in line for line in notes), name
    places = ("--model", folder / pruned, "--data", folder / "d", "--trust-remote-code")
    code, out, _ = run("eval", folder / "fallback", *places, "--json")
    assert code == 0 and abs(json.loads(out)["pack"]["ppl"] / report["ppl_after"] - 1) < 1e-3


@pytest.mark.parametrize(("rank", "profile"), [(2, "lite"), (32, "heavy")])
def test_packs_are_lite_up_to_10_mb_and_heavy_beyond(tmp_path, run, rank, profile):
    base = base_of("qwen3", intermediate_size=20_000)
    pack = random_pack(base, rank=rank, targets=("up_proj", "down_proj")).save(tmp_path / "p")
    assert (pack.size_mb < 10) == (profile == "lite")
    assert pack.manifest["profile"] == profile
    assert f"MB, {profile})" in run("inspect", tmp_path / "p")[1]


def test_detach_leaves_the_quantized_base_bit_identical(folder, train, run):
    train("4-bit", "of-4-bit")
    code, out, _ = run("apply", folder / "of-4-bit", "--model", folder / "4-bit")
    assert code == 0 and "after detaching they are bit-identical to before" in out
