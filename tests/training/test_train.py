"""A run: what it writes and reports; it is repeatable, resumable, and held to its gates."""

import json
import os
import signal

import pytest
from click.testing import CliRunner

from mlx_packs import LoRAConfig, Pack, TrainConfig, evaluate, runtime, train_pack
from mlx_packs.cli.main import packs
from mlx_packs.cli.train import train as train_command
from mlx_packs.memory import matmul_path
from mlx_packs.runtime import mx
from tests.helpers.errors import raises
from tests.helpers.observers import observe
from tests.helpers.rows import chat, write_rows

LORA = LoRAConfig(rank=4)
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
    del manifest["measured"], manifest["sha256"]
    files["pack.json"] = json.dumps(manifest).encode()
    return files


@pytest.mark.slow
def test_two_runs_with_one_seed_give_the_same_bytes(dense_tiny, numbers, tmp_path):
    lora = LoRAConfig(rank=4, dropout=0.1)
    first = train_pack(dense_tiny, numbers, lora, QUICK, tmp_path / "a" / "p").pack
    second = train_pack(dense_tiny, numbers, lora, QUICK, tmp_path / "b" / "p").pack
    assert pack_bytes(first) == pack_bytes(second)


@pytest.mark.usefixtures("sample_text")
def test_run_reports_what_it_wrote_and_learns(dense_tiny, numbers, tmp_path):
    settings = {"iters": 6, "batch_size": 4, "learning_rate": 2e-3, "steps_per_report": 4}
    train = TrainConfig(**settings, matmul_path="dense")
    run = train_pack(dense_tiny, numbers, LORA, train, tmp_path / "p")
    report = run.report
    assert report["ppl_after"] < report["ppl_before"]
    assert all(report["sample"].values())
    assert {
        *("pack run steps ppl_before ppl_after ppl_before_se ppl_after_se trained_tokens").split(),
        *("tokens_per_s train_s peak_gb pack_mb matmul_path plan_peak_gb gates").split(),
    } <= set(report)
    lines = (tmp_path / "p-run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["batch"] for line in lines] == [4, 6]
    again = evaluate(dense_tiny, tmp_path / "p", numbers, matmul_path="dense")
    assert abs(again.pack.ppl / report["ppl_after"] - 1) < 1e-4
    assert abs(again.base.ppl / report["ppl_before"] - 1) < 1e-4


@pytest.mark.slow
def test_resumed_run_equals_an_unbroken_one(dense_tiny, numbers, tmp_path):
    lora = LoRAConfig(rank=4, dropout=0.2)
    long = TrainConfig(**{**vars(QUICK), "lr_schedule": "constant"})
    short = TrainConfig(**{**vars(long), "iters": 2})
    whole = train_pack(dense_tiny, numbers, lora, long, tmp_path / "whole")
    train_pack(dense_tiny, numbers, lora, short, tmp_path / "broken")
    resumed = train_pack(
        dense_tiny, numbers, lora, long, tmp_path / "broken", resume=True, overwrite=True
    )
    for name, tensor in whole.pack.tensors.items():
        assert mx.array_equal(tensor, resumed.pack.tensors[name]).item(), name


def test_interrupted_run_goes_on_to_the_same_weights(dense_tiny, numbers, tmp_path, monkeypatch):
    lora = LoRAConfig(rank=4, dropout=0.2)
    few = {"save_every": 100, "val_batches": 0, "test_batches": 1}
    train = TrainConfig(**{**vars(QUICK), "grad_accumulation_steps": 2, **few})
    whole = train_pack(dense_tiny, numbers, lora, train, tmp_path / "whole")

    def interrupt(line):
        if line["batch"] == 1:  # in the middle of an update, which is finished first
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        observe(patch, on_step=interrupt)
        with raises("interrupted", None, "step-000002"):
            train_pack(dense_tiny, numbers, lora, train, tmp_path / "broken")
    assert not (tmp_path / "broken").exists()
    resumed = train_pack(dense_tiny, numbers, lora, train, tmp_path / "broken", resume=True)
    for name, tensor in whole.pack.tensors.items():
        assert mx.array_equal(tensor, resumed.pack.tensors[name]).item(), name


def test_resume_refuses_another_recipe(dense_tiny, numbers, tmp_path):
    once = TrainConfig(**{**vars(QUICK), "iters": 1, "test_batches": 1})
    train_pack(dense_tiny, numbers, LORA, once, tmp_path / "p")
    other = TrainConfig(**{**vars(once), "learning_rate": 2e-3})
    with raises("mismatch", "learning_rate", "0.001", "0.002"):
        train_pack(dense_tiny, numbers, LORA, other, tmp_path / "p", resume=True)


@pytest.mark.slow
def test_evaluation_cadence_does_not_change_training(dense_tiny, numbers, tmp_path):
    lora = LoRAConfig(rank=4, dropout=0.2)
    often = train_pack(dense_tiny, numbers, lora, QUICK, tmp_path / "often")
    seldom = TrainConfig(**{**vars(QUICK), "steps_per_eval": 1000})
    never = train_pack(dense_tiny, numbers, lora, seldom, tmp_path / "seldom")
    for name, tensor in often.pack.tensors.items():
        assert mx.array_equal(tensor, never.pack.tensors[name]).item(), name


def test_size_gate_fails_with_exit_code_1_and_names_the_gate(numbers, tmp_path):
    arguments = (
        f"--data {numbers} --iters 1 --batch-size 1 --matmul-path dense --out {tmp_path / 'p'} "
        "--num-layers 1 --test-batches 1"
    )
    result = CliRunner().invoke(
        train_command, [*arguments.split(), "--max-pack-mb", "0.001", "--json"]
    )
    assert result.exit_code == 1
    assert "gate --max-pack-mb failed" in result.stderr
    report = json.loads(result.stdout)
    assert report["gates"]["max_pack_mb"]["passed"] is False
    assert (tmp_path / "p" / "pack.json").is_file()


@pytest.mark.slow
def test_gates_are_checked_and_recorded_in_the_manifest(numbers, tmp_path):
    arguments = (
        f"--data {numbers} --iters 1 --batch-size 2 --matmul-path dense --out {tmp_path / 'p'}"
    )
    limits = "--max-ppl-ratio 0.001 --min-tps-ratio 0.001 --max-pack-mb 50"
    result = CliRunner().invoke(train_command, [*arguments.split(), *limits.split(), "--json"])
    assert result.exit_code == 1
    assert "gate --max-ppl-ratio failed: " in result.stderr and " > 0.001" in result.stderr
    assert result.stderr.count("packs: gate") == 1
    report = json.loads(result.stdout)
    gates = report["gates"]
    assert {name: gate["passed"] for name, gate in gates.items()} == {
        "max_ppl_ratio": False,
        "min_tps_ratio": True,
        "max_pack_mb": True,
    }
    ratio = report["ppl_after"] / report["ppl_before"]
    assert gates["max_ppl_ratio"]["value"] == pytest.approx(ratio)
    pack = Pack.open(tmp_path / "p")
    pack.verify()
    assert pack.manifest["gates"] == gates
    assert gates["max_pack_mb"]["value"] == pytest.approx(report["pack_mb"], abs=2e-5)
    assert report["pack_mb"] == pack.size_mb
    shown = CliRunner().invoke(packs, ["inspect", str(tmp_path / "p")])
    assert "PPL ratio" in shown.stdout and "0.001 FAILED" in shown.stdout


def test_single_rows_and_last_k_targets_train(dense_tiny, tmp_path):
    rows = write_rows(
        tmp_path / "rows",
        train=[chat("a b c", "d e f g h"), chat("one", "two three")],
        valid=[chat("hello", "world")],
    )
    train = TrainConfig(iters=1, batch_size=4, ce_last_k=1, matmul_path="dense")
    run = train_pack(dense_tiny, rows, LORA, train, tmp_path / "p")
    assert run.report["trained_tokens"] == 2


@pytest.mark.parametrize("adapted", ["", "--target-modules q_proj"])
def test_json_reports_the_matmul_path_of_each_weight(numbers, tmp_path, adapted, monkeypatch):
    monkeypatch.setattr(matmul_path, "_SHARE", 100)  # two batches are little to measure for
    arguments = (
        f"--data {numbers} --out {tmp_path / 'p'} --iters 2 --batch-size 1 --rank 2 {adapted} "
        "--test-batches 1"
    )
    result = CliRunner().invoke(train_command, [*arguments.split(), "--json", "-v"])
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    at_work = report["matmul_paths"]
    projections = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
    assert set(at_work) == {*projections, "embed_tokens"}
    for name, actual in at_work.items():
        assert actual["paths"] == {report["matmul_path"]: 1 if name == "embed_tokens" else 6}
        assert set(actual["step_ms"]) == {"quantized", "transient", "dense"}
    assert "24 x" not in result.stderr and "12 x [768, 256] gate_proj, up_proj:" in result.stderr
    assert f"{report['batch_shapes']} of batches" in result.stderr


def test_a_run_has_its_own_cache_limit_and_leaves_that_of_before(
    dense_tiny, numbers, tmp_path, monkeypatch
):
    seen = []

    def stop(line, batches_per_s):
        seen.append(mx.set_cache_limit(7 << 20))
        mx.set_cache_limit(seen[-1])
        raise KeyboardInterrupt

    observe(monkeypatch, on_report=stop)
    before = mx.set_cache_limit(5 << 20)
    try:
        for threshold, limit in ((None, runtime.cache_limit()), (1 << 30, 1 << 30)):
            config = TrainConfig(
                **{**vars(QUICK), "steps_per_report": 1, "clear_cache_threshold": threshold}
            )
            with pytest.raises(KeyboardInterrupt):
                train_pack(dense_tiny, numbers, LORA, config, tmp_path / str(limit))
            assert seen.pop() == limit and mx.set_cache_limit(5 << 20) == 5 << 20
    finally:
        mx.set_cache_limit(before)
