"""A run: what it writes and reports; it is repeatable, resumable, and held to its gates."""

import json
from dataclasses import replace

import pytest

from mlx_packs import Pack, evaluate
from mlx_packs.runtime import mx
from mlx_packs.training.run_folder import RunFolder
from tests.helpers.observers import observe
from tests.helpers.rows import write_rows
from tests.helpers.runs import LORA
from tests.training.conftest import ROWS


def pack_bytes(pack: Pack) -> dict[str, bytes]:
    """Every file of a pack; the manifest without what a clock decides."""
    files = {f.name: f.read_bytes() for f in pack.path.iterdir()}
    manifest = json.loads(files["pack.json"])
    del manifest["measured"], manifest["sha256"], manifest["files"]["README.md"]
    files["pack.json"] = json.dumps(manifest).encode()
    return files


def test_two_runs_with_one_seed_give_the_same_bytes_and_validations_change_no_weight(train):
    settings = {"lora": replace(LORA, dropout=0.2), "iters": 4, "save_every": 2}
    first, second, rarely = (
        train(f"{name}/p", steps_per_eval=every, **settings).pack
        for name, every in (("a", 2), ("b", 2), ("c", 1000))
    )
    assert pack_bytes(first) == pack_bytes(second)
    for name, tensor in first.tensors.items():
        assert mx.array_equal(tensor, rarely.tensors[name]).item(), name


@pytest.mark.usefixtures("sample_text")
def test_run_reports_what_it_wrote_and_learns(small, train):
    data = {"train": ROWS, "valid": ROWS[:2], "test": ROWS[2:5]}
    settings = {"iters": 6, "batch_size": 4, "learning_rate": 1e-2, "steps_per_report": 4}
    run = train(data=data, **settings)

    report = run.report
    assert report["ppl_after"] < report["ppl_before"]
    assert all(report["sample"].values())
    entries = (
        "pack run steps ppl_before ppl_after ppl_before_se ppl_after_se trained_tokens".split()
    )
    entries += "tokens_per_s train_s peak_gb pack_mb matmul_path plan_peak_gb gates".split()
    assert set(entries) <= set(report)
    assert [line["batch"] for line in RunFolder(run.run).metrics()] == [4, 6]

    again = evaluate(small, "p", data["test"], matmul_path="dense")
    assert abs(again.pack.ppl / report["ppl_after"] - 1) < 1e-4
    assert abs(again.base.ppl / report["ppl_before"] - 1) < 1e-4


def test_gates_are_checked_and_recorded_in_the_manifest(small_folder, here, run):
    write_rows(here / "d", train=ROWS, valid=ROWS[:1])
    words = f"train --model {small_folder} --data d --iters 1 --batch-size 2 --out p --json"
    code, out, err = run(*words.split(), *"--max-ppl-ratio 0.001 --max-pack-mb 50".split())
    assert code == 1
    assert "gate --max-ppl-ratio failed: " in err and " > 0.001" in err
    assert err.count("packs: gate") == 1

    report = json.loads(out)
    gates = report["gates"]
    passed = {name: gate["passed"] for name, gate in gates.items()}
    assert passed == {"max_ppl_ratio": False, "max_pack_mb": True}
    ratio = report["ppl_after"] / report["ppl_before"]
    assert gates["max_ppl_ratio"]["value"] == pytest.approx(ratio)

    pack = Pack.open("p")
    pack.verify()
    assert pack.manifest["gates"] == gates
    assert gates["max_pack_mb"]["value"] == pytest.approx(report["pack_mb"], abs=2e-5)
    assert report["pack_mb"] == pack.size_mb

    shown = run("inspect", "p")[1]
    assert "PPL ratio" in shown and "0.001 FAILED" in shown


def test_a_run_has_the_cache_limit_that_it_was_told(train, monkeypatch):
    seen = []
    observe(monkeypatch, on_step=lambda line: seen.append(mx.set_cache_limit(1 << 30)))
    train(iters=1, val_batches=0, clear_cache_threshold=1 << 30)
    assert seen == [1 << 30]
