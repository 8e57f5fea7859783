"""A run: what it writes and reports; it is repeatable, resumable, and held to its gates."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from mlx_packs import LoRAConfig, Pack, TrainConfig, evaluate, runtime, train_pack
from mlx_packs.cli.main import packs
from mlx_packs.cli.train import train as train_command
from mlx_packs.config.choices import MATMUL_PATHS
from mlx_packs.memory import matmul_path
from mlx_packs.runtime import mx
from mlx_packs.training.run_folder import RunFolder
from tests.helpers.observers import observe
from tests.helpers.rows import chat, write_rows

LORA = LoRAConfig(rank=4)
DROPOUT = LoRAConfig(rank=4, dropout=0.2)
QUICK = TrainConfig(
    iters=4, batch_size=2, learning_rate=1e-3, matmul_path="dense", steps_per_eval=2, save_every=2
)


@pytest.fixture
def numbers(tmp_path):
    """Short rows of each split."""
    words = "one two three four five six seven eight nine ten eleven twelve".split()
    rows = [chat(f"Say {word}.", f"{word}, I say, {word}.") for word in words]
    return write_rows(tmp_path / "rows", train=rows, valid=rows[:4], test=rows[4:8])


def pack_bytes(pack: Pack) -> dict[str, bytes]:
    """Every file of a pack; the manifest without what a clock decides."""
    files = {f.name: f.read_bytes() for f in pack.path.iterdir()}
    manifest = json.loads(files["pack.json"])
    del manifest["measured"], manifest["sha256"], manifest["files"]["README.md"]
    files["pack.json"] = json.dumps(manifest).encode()
    return files


def test_two_runs_with_one_seed_give_the_same_bytes_and_validations_change_no_weight(
    small, numbers, tmp_path
):
    first, second, rarely = (
        train_pack(small, numbers, DROPOUT, train, tmp_path / name / "p").pack
        for name, train in (("a", QUICK), ("b", QUICK), ("c", replace(QUICK, steps_per_eval=1000)))
    )
    assert pack_bytes(first) == pack_bytes(second)
    for name, tensor in first.tensors.items():
        assert mx.array_equal(tensor, rarely.tensors[name]).item(), name


@pytest.mark.usefixtures("sample_text")
def test_run_reports_what_it_wrote_and_learns(small, numbers, tmp_path):
    settings = {"iters": 6, "batch_size": 4, "learning_rate": 1e-2, "steps_per_report": 4}
    train = TrainConfig(**settings, matmul_path="dense")
    run = train_pack(small, numbers, LORA, train, tmp_path / "p")

    report = run.report
    assert report["ppl_after"] < report["ppl_before"]
    assert all(report["sample"].values())
    entries = (
        "pack run steps ppl_before ppl_after ppl_before_se ppl_after_se trained_tokens".split()
    )
    entries += "tokens_per_s train_s peak_gb pack_mb matmul_path plan_peak_gb gates".split()
    assert set(entries) <= set(report)
    assert [line["batch"] for line in RunFolder(run.run).metrics()] == [4, 6]

    again = evaluate(small, tmp_path / "p", numbers, matmul_path="dense")
    assert abs(again.pack.ppl / report["ppl_after"] - 1) < 1e-4
    assert abs(again.base.ppl / report["ppl_before"] - 1) < 1e-4


def test_gates_are_checked_and_recorded_in_the_manifest(small_folder, numbers, tmp_path):
    arguments = f"--model {small_folder} --data {numbers} --iters 1 --batch-size 2"
    limits = "--max-ppl-ratio 0.001 --max-pack-mb 50"
    words = [*arguments.split(), *limits.split(), "--out", str(tmp_path / "p"), "--json"]
    result = CliRunner().invoke(train_command, words)
    assert result.exit_code == 1
    assert "gate --max-ppl-ratio failed: " in result.stderr and " > 0.001" in result.stderr
    assert result.stderr.count("packs: gate") == 1

    report = json.loads(result.stdout)
    gates = report["gates"]
    passed = {name: gate["passed"] for name, gate in gates.items()}
    assert passed == {"max_ppl_ratio": False, "max_pack_mb": True}
    ratio = report["ppl_after"] / report["ppl_before"]
    assert gates["max_ppl_ratio"]["value"] == pytest.approx(ratio)

    pack = Pack.open(tmp_path / "p")
    pack.verify()
    assert pack.manifest["gates"] == gates
    assert gates["max_pack_mb"]["value"] == pytest.approx(report["pack_mb"], abs=2e-5)
    assert report["pack_mb"] == pack.size_mb

    shown = CliRunner().invoke(packs, ["inspect", str(tmp_path / "p")])
    assert "PPL ratio" in shown.stdout and "0.001 FAILED" in shown.stdout


@pytest.mark.slow
def test_json_reports_the_matmul_path(numbers, tmp_path, monkeypatch):
    monkeypatch.setattr(matmul_path, "_SHARE", 100)  # two batches are little to measure for
    arguments = (
        f"--data {numbers} --out {tmp_path / 'p'} --iters 2 --batch-size 1 --rank 2 "
        "--target-modules q_proj --test-batches 1"
    )
    result = CliRunner().invoke(train_command, [*arguments.split(), "--json", "-v"])
    assert result.exit_code == 0, result.stderr

    report = json.loads(result.stdout)
    assert report["matmul_path"] in MATMUL_PATHS
    assert f"{report['batch_shapes']} of batches" in result.stderr


def test_a_run_has_its_own_cache_limit_and_leaves_that_of_before(
    small, numbers, tmp_path, monkeypatch
):
    seen = []

    def look(line):
        seen.append(mx.set_cache_limit(7 << 20))
        mx.set_cache_limit(seen[-1])

    observe(monkeypatch, on_step=look)
    before = mx.set_cache_limit(5 << 20)
    try:
        for threshold, limit in ((None, runtime.cache_limit()), (1 << 30, 1 << 30)):
            config = replace(QUICK, iters=1, val_batches=0, clear_cache_threshold=threshold)
            train_pack(small, numbers, LORA, config, tmp_path / str(limit))
            assert seen.pop() == limit and mx.set_cache_limit(5 << 20) == 5 << 20
    finally:
        mx.set_cache_limit(before)
