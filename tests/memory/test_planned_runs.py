"""Runs and their plans: what is rejected before it starts, what is tight, what `auto` takes."""

import gc
import json
import shutil
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from benchmarks.plan_accuracy import Case
from benchmarks.plan_accuracy import run as measure
from mlx_packs import LoRAConfig, TrainConfig, runtime, train_pack
from mlx_packs.bases.files import tiny_checkpoint
from mlx_packs.config.recipe import Recipe
from mlx_packs.config.schema import DataConfig
from mlx_packs.display import QUIET, Display
from mlx_packs.memory.estimate import plan_run
from mlx_packs.memory.headers import Headers
from mlx_packs.memory.memory_choice import MatmulPathChoice
from mlx_packs.memory.plan import ERROR
from mlx_packs.tasks.phases import resolve_phases
from mlx_packs.training import planning
from mlx_packs.training.planning import choose_path
from mlx_packs.training.run_folder import write_identity
from mlx_packs.training.settings import Place, Request, Run
from tests.helpers.errors import check, raises
from tests.helpers.headers import dense_headers, write_headers
from tests.helpers.rows import chat, write_rows


@pytest.fixture
def long_chats(tmp_path) -> Path:
    turns = [chat(f"What is {n}?", f"It is {n}, and {n} again. " * 12) for n in range(8)]
    return write_rows(tmp_path / "rows", train=turns, valid=turns[:2], test=turns[:2])


@pytest.fixture
def memory(monkeypatch):
    """Set the bytes of memory that this machine appears to have."""

    def set_memory(size: float) -> None:
        monkeypatch.setattr(runtime, "total_memory", lambda: int(size))

    return set_memory


@pytest.fixture
def measured(monkeypatch) -> list:
    """The calls that measure matmul paths; dense is the fastest."""
    calls = []

    def choose(*arguments):
        calls.append(arguments)
        return MatmulPathChoice("dense", {}, "")

    monkeypatch.setattr(planning, "load", lambda name: choose)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recomputed", "method"),
    [
        (True, "lora"),
        *(pytest.param(False, m, marks=pytest.mark.slow) for m in ("lora", "dora", "pissa")),
    ],
)
def test_the_estimate_is_within_its_error_of_the_measured_peak(
    recomputed, method, tiny, long_chats, tmp_path
):
    train = TrainConfig(
        iters=2,
        batch_size=4,
        max_seq_length=128,
        matmul_path="dense",
        grad_checkpoint=recomputed,
        method=method,
        val_batches=0,
    )
    gc.collect()
    own = sum(array.nbytes for _, array in tree_flatten(tiny.model.parameters()))
    held = (mx.get_active_memory() - own) / 1e9  # by other tests of this process
    report = train_pack(tiny, long_chats, LoRAConfig(rank=8), train, tmp_path / "p").report
    assert report["plan_peak_gb"] == pytest.approx(report["peak_gb"] - held, rel=ERROR)


@pytest.mark.parametrize("recompute", ["block", pytest.param("none", marks=pytest.mark.slow)])
def test_the_estimate_of_trees_is_within_its_error_of_the_measured_peak(recompute, tmp_path):
    """Rows of which three quarters are common, in a process of its own."""
    case = Case(
        "tiny", "dense", 8, 256, 16, recompute, 2, common=120, options=("--share-prefix", "on")
    )
    result = measure(case, tmp_path)
    assert abs(result.error) < ERROR


def test_a_base_that_cannot_fit_is_rejected_before_it_is_loaded(
    nothing_is_loaded, long_chats, tmp_path, memory, run
):
    memory(4e9)
    base = write_headers(tmp_path / "base", dense_headers("llama-3-8b"))
    arguments = ["train", "--model", base, "--data", long_chats, "--out", tmp_path / "p"]
    code, _, err = run(*arguments)
    assert code == 2 and len(err.splitlines()) == 1 and not (tmp_path / "p").exists()
    check(run.error, "memory", None, "at least 3", "GB", "--quantize nf4", "--force")
    assert run(*arguments, "--quantize", "nf4")[0] == 2
    check(run.error, "memory", None, "of 4.00 GB")
    assert "--quantize" not in run.error.message
    memory(64e9)
    for more in (["--quantize", "nf4"], []):
        with pytest.raises(AssertionError, match="weights were loaded"):
            run(*arguments, *more)
    memory(4e9)
    with pytest.raises(AssertionError, match="weights were loaded"):
        run(*arguments, "--force")


def test_a_base_whose_headers_cannot_be_read_is_left_to_loading(monkeypatch, tmp_path, run):
    def unreachable(*_, **__):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", unreachable)
    arguments = ("--model", "owner/name", "--data", "tiny", "--out", tmp_path / "p")
    assert run("train", *arguments)[0] == 2
    check(run.error, "network", "model", "`hf download owner/name`")


def test_training_that_cannot_fit_is_rejected_unless_forced(
    long_chats, tmp_path, measured, memory, run
):
    memory(60e6)
    out = tmp_path / "p"
    arguments = ["train", "--data", long_chats, "--out", out, "--iters", "1", "--recompute", "none"]
    code, _, err = run(*arguments)
    assert code == 2 and not out.exists()
    check(run.error, "memory", None, "--force", "--recompute block")
    assert "at least" not in run.error.message and "data" in err, "the rows are known by now"
    assert not measured, "rejected before any weight is dequantized"
    short = ("--matmul-path", "transient", "--test-batches", 1, "--val-batches", 0)
    assert run(*arguments, "--force", "-q", *short)[0] == 0
    assert json.loads((out / "pack.json").read_text())["measured"]["plan_peak_gb"] > 0.06


def short_run(rows: Path, out: Path) -> list:
    return [
        *("train", "--data", rows, "--iters", 1, "--matmul-path", "dense", "--json"),
        *("--test-batches", 1, "--val-batches", 0, "--overwrite", "--out", out),
    ]


def test_what_is_tight_is_trained_with_a_warning(long_chats, tmp_path, memory, run):
    arguments = [*short_run(long_chats, tmp_path / "p"), "--batch-size", 1, "--recompute", "none"]
    arguments += ["--max-seq-length", 64]
    peak = json.loads(run(*arguments)[1])["plan_peak_gb"]
    for size, warned in ((1.05 * peak, True), (1.2 * peak, False)):
        memory(size * 1e9)
        code, _, err = run(*arguments)
        assert code == 0 and ("tight: " in err) is warned


def test_a_run_has_the_plans_of_the_paths_that_fit_best(tiny, memory):
    train = TrainConfig(batch_size=4, max_seq_length=128, recompute="none")
    headers, shapes = Headers.of(tiny), {(96, 300), (64, 200)}

    def plans(size: float, force: bool = False) -> dict:
        memory(size)
        return plan_run(headers, LoRAConfig(), train, shapes, force)

    every = plans(64e9)
    assert list(every) == ["quantized", "transient", "dense"]
    assert set(plans(every["dense"].peak_bytes * (1 + ERROR) - 1)) == {"quantized", "transient"}
    cheapest = min(every, key=lambda path: every[path].peak_bytes)
    least = every[cheapest].peak_bytes
    assert cheapest in plans(least)
    with raises("memory", None, "--force"):
        plans(least - 1)
    assert list(plans(least - 1, force=True)) == [cheapest]


def run_of(base, folder: Path, **settings) -> Run:
    train, columns = TrainConfig(**settings), DataConfig(data="tiny")
    recipe = Recipe(LoRAConfig(), train, columns, names_data=True)
    return Run(
        recipe.lora,
        train,
        columns,
        resolve_phases(train, columns),
        Request(recipe, base, Display(QUIET)),
        Place(folder / "p", folder / "p-run"),
    )


def test_auto_is_measured_on_the_rows_and_batches_of_the_run(shared_tiny, tmp_path, measured):
    plans = dict.fromkeys(("quantized", "dense"))
    run = run_of(shared_tiny, tmp_path, iters=40)
    assert choose_path(run, shared_tiny, (96, 30), plans).matmul_path == "dense"
    assert measured == [(shared_tiny.model, 96, 30, {"quantized", "dense"}, 40)]
    asked = run_of(shared_tiny, tmp_path, matmul_path="transient")
    assert choose_path(asked, shared_tiny, (96, 30), plans).line() == "transient (as specified)"
    assert choose_path(run, shared_tiny, None, {}).matmul_path == "dense" and len(measured) == 1


@pytest.mark.parametrize(
    ("recorded", "taken"),
    [("quantized", "quantized"), ("transient", "dense"), (None, "dense"), (["x"], "dense")],
)
def test_a_resumed_run_takes_its_path_while_it_fits(
    shared_tiny, tmp_path, measured, recorded, taken
):
    run = run_of(shared_tiny, tmp_path)
    run = replace(run, place=replace(run.place, resume=True))
    run.folder.mkdir()
    identity = {"recipe": {}, "base": "", "data": {}}
    write_identity(run.folder, identity | ({"matmul_path": recorded} if recorded else {}))
    plans = dict.fromkeys(("quantized", "dense"))
    choice = choose_path(run, shared_tiny, (96, 30), plans)
    assert choice.matmul_path == taken
    assert len(measured) == (recorded != "quantized")
    asked = replace(run, train=replace(run.train, matmul_path="transient"))
    assert choose_path(asked, shared_tiny, (96, 30), plans).matmul_path == "transient"


@pytest.mark.slow
def test_plan_takes_the_first_policy_that_fits(long_chats, tmp_path, memory, run):
    arguments = short_run(long_chats, tmp_path / "p")
    peaks = {}
    for policy in ("none", "selective", "block"):
        report = json.loads(run(*arguments, "--recompute", policy)[1])
        assert report["recompute"] == policy
        peaks[policy] = report["plan_peak_gb"]
    assert peaks["none"] > peaks["selective"] > peaks["block"]
    for policy, peak in peaks.items():
        memory((1 + ERROR) * peak * 1e9 + 1000)
        code, out, err = run(*arguments, "-v")
        assert code == 0 and json.loads(out)["recompute"] == policy
        assert f"recompute {policy}" in err


@pytest.mark.slow
def test_a_dense_base_has_its_estimate(long_chats, tmp_path, run):
    vocab_size = json.loads((tiny_checkpoint() / "config.json").read_text())["vocab_size"]
    base = write_headers(tmp_path / "base", dense_headers("small", vocab_size))
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_checkpoint() / file, base / file)
    arguments = [
        "--model",
        base,
        "--data",
        long_chats,
        "--iters",
        "1",
        "--val-batches",
        "0",
        "--json",
    ]
    code, out, err = run("train", *arguments, "--out", tmp_path / "p")
    assert code == 0, err
    assert json.loads(out)["plan_peak_gb"] > 0 and json.loads(out)["matmul_path"] == "dense"


def test_a_base_without_a_plan_is_trained_all_the_same(monkeypatch, tiny, long_chats, tmp_path):
    monkeypatch.setattr("mlx_packs.memory.decoder_sizes.FAMILIES", ())
    train = TrainConfig(iters=1, batch_size=2, matmul_path="dense", val_batches=0)
    run = train_pack(tiny, long_chats, LoRAConfig(rank=4), train, tmp_path / "p")
    assert run.report["plan_peak_gb"] is None
