"""A run: what it writes; it is repeatable and resumable; every way of stepping agrees."""

import json
import os
import signal

import mlx.nn as nn
import pytest
from click.testing import CliRunner
from mlx.utils import tree_flatten

from mlx_packs import LoRAConfig, Pack, TrainConfig, evaluate, runtime, train_pack
from mlx_packs.adapters.lora import attach
from mlx_packs.cli.main import packs
from mlx_packs.cli.train import train as train_command
from mlx_packs.data.batches import make_batch
from mlx_packs.data.encoding import Example
from mlx_packs.data.rows import tiny_path
from mlx_packs.errors import Interrupted
from mlx_packs.memory.plan import ERROR
from mlx_packs.objectives.causal_lm import as_arrays, loss_sum, split_head
from mlx_packs.optim import make_optimizer
from mlx_packs.runtime import mx
from tests.helpers.errors import raises
from tests.helpers.models import base_of
from tests.helpers.observers import observe
from tests.helpers.rows import chat, write_rows
from tests.helpers.steps import examples_of, largest_difference, lm_stepper, update

LORA = LoRAConfig(rank=4)
QUICK = TrainConfig(
    iters=4, batch_size=2, learning_rate=1e-3, matmul_path="dense", steps_per_eval=2, save_every=2
)


@pytest.fixture
def rows(tmp_path):
    """A handful of the embedded rows."""

    def head(split: str, n: int) -> list[dict]:
        lines = (tiny_path() / f"{split}.jsonl").read_text().split("\n")
        short = sorted((line for line in lines if line), key=len)[:n]
        return [json.loads(line) for line in short]

    return write_rows(
        tmp_path / "rows", train=head("train", 12), valid=head("valid", 4), test=head("test", 4)
    )


def pack_bytes(pack: Pack) -> dict[str, bytes]:
    """Every file of a pack; the manifest without what a clock decides."""
    files = {f.name: f.read_bytes() for f in pack.path.iterdir()}
    manifest = json.loads(files["pack.json"])
    manifest.pop("measured")
    files["pack.json"] = json.dumps(manifest).encode()
    return files


def test_two_runs_with_one_seed_give_the_same_bytes(tiny, rows, tmp_path):
    lora = LoRAConfig(rank=4, dropout=0.1)
    first = train_pack(tiny, rows, lora, QUICK, tmp_path / "a" / "p").pack
    second = train_pack(tiny, rows, lora, QUICK, tmp_path / "b" / "p").pack
    assert pack_bytes(first) == pack_bytes(second)


def test_run_reports_what_it_wrote_and_learns(tiny, rows, tmp_path):
    train = TrainConfig(iters=12, batch_size=4, learning_rate=1e-3, matmul_path="dense")
    run = train_pack(tiny, rows, LORA, train, tmp_path / "p")
    report = run.report
    assert report["ppl_after"] < report["ppl_before"]
    assert {
        *("pack run steps ppl_before ppl_after ppl_before_se ppl_after_se trained_tokens").split(),
        *("tokens_per_s train_s peak_gb pack_mb matmul_path plan_peak_gb gates").split(),
    } <= set(report)
    lines = (tmp_path / "p-run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["batch"] for line in lines] == [10, 12]
    again = evaluate(tiny, tmp_path / "p", rows)
    assert abs(again.pack.ppl / report["ppl_after"] - 1) < 1e-4
    assert abs(again.base.ppl / report["ppl_before"] - 1) < 1e-4


def test_resumed_run_equals_an_unbroken_one(tiny, rows, tmp_path):
    lora = LoRAConfig(rank=4, dropout=0.2)
    long = TrainConfig(**{**vars(QUICK), "lr_schedule": "constant"})
    short = TrainConfig(**{**vars(long), "iters": 2})
    whole = train_pack(tiny, rows, lora, long, tmp_path / "whole")
    train_pack(tiny, rows, lora, short, tmp_path / "broken")
    resumed = train_pack(tiny, rows, lora, long, tmp_path / "broken", resume=True, overwrite=True)
    for name, tensor in whole.pack.tensors.items():
        assert mx.array_equal(tensor, resumed.pack.tensors[name]).item(), name


def test_interrupted_run_goes_on_to_the_same_weights(tiny, rows, tmp_path, monkeypatch):
    lora = LoRAConfig(rank=4, dropout=0.2)
    train = TrainConfig(**{**vars(QUICK), "grad_accumulation_steps": 2, "save_every": 100})
    whole = train_pack(tiny, rows, lora, train, tmp_path / "whole")

    def interrupt(line):
        if line["batch"] == 1:  # in the middle of an update, which is finished first
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        observe(patch, on_step=interrupt)
        with pytest.raises(Interrupted, match="step-000002"):
            train_pack(tiny, rows, lora, train, tmp_path / "broken")
    assert not (tmp_path / "broken").exists()
    resumed = train_pack(tiny, rows, lora, train, tmp_path / "broken", resume=True)
    for name, tensor in whole.pack.tensors.items():
        assert mx.array_equal(tensor, resumed.pack.tensors[name]).item(), name


def test_resume_refuses_another_recipe(tiny, rows, tmp_path):
    train_pack(tiny, rows, LORA, QUICK, tmp_path / "p")
    other = TrainConfig(**{**vars(QUICK), "learning_rate": 2e-3})
    with raises("mismatch", "learning_rate", "0.001", "0.002"):
        train_pack(tiny, rows, LORA, other, tmp_path / "p", resume=True)


def test_evaluation_cadence_does_not_change_training(tiny, rows, tmp_path):
    lora = LoRAConfig(rank=4, dropout=0.2)
    often = train_pack(tiny, rows, lora, QUICK, tmp_path / "often")
    seldom = TrainConfig(**{**vars(QUICK), "steps_per_eval": 1000})
    never = train_pack(tiny, rows, lora, seldom, tmp_path / "seldom")
    for name, tensor in often.pack.tensors.items():
        assert mx.array_equal(tensor, never.pack.tensors[name]).item(), name


def small_examples() -> list[Example]:
    return examples_of((9, 17, 5, 30))


def weights_after(batches, accumulate: int, recompute: bool = False) -> dict[str, mx.array]:
    return update(batches, accumulate, recompute)[0]


def test_accumulated_batches_equal_one_large_batch_whatever_their_lengths():
    rows = small_examples()
    large = weights_after([make_batch(rows, range(4), 4, 64)], 1)
    parts = [make_batch(rows, [i], 1, 64) for i in range(4)]
    assert largest_difference(large, weights_after(parts, 4)) < 1e-6


def test_recomputed_blocks_give_the_same_step():
    batch = [make_batch(small_examples(), range(4), 4, 64)]
    kept = weights_after(batch, 1)
    assert largest_difference(kept, weights_after(batch, 1, recompute=True)) < 1e-6


def test_recomputed_blocks_drop_the_same_inputs_in_forward_and_backward():
    """The gradient of a recomputed block with dropout is that of its own loss."""
    base = base_of("qwen3", num_hidden_layers=1)
    attached = attach(base, LoRAConfig(rank=2, dropout=0.4))
    for slot in attached.slots.values():
        slot.lora.lora_b[:] = [0.3 * mx.random.normal(b.shape) for b in slot.lora.lora_b]
    attached.recompute("block")
    base.model.train()
    head = split_head(base.model)
    batch = as_arrays(make_batch(small_examples(), range(4), 4, 64))

    def loss(*arrays):
        mx.random.seed(5)
        return loss_sum(base.model, head, *arrays)

    _, grads = nn.value_and_grad(base.model, loss)(*batch)
    flat, start = tree_flatten(grads), dict(tree_flatten(base.model.trainable_parameters()))
    direction = {name: g / mx.sqrt(sum(v.square().sum() for _, v in flat)) for name, g in flat}
    values = []
    for step in (1e-2, -1e-2):
        moved = [(name, start[name] + step * d) for name, d in direction.items()]
        base.model.load_weights(moved, strict=False)
        values.append(loss(*batch).item())
    slope = mx.sqrt(sum(g.square().sum() for _, g in flat)).item()
    assert abs((values[0] - values[1]) / 2e-2 / slope - 1) < 1e-2


def test_padding_rows_do_not_change_the_step():
    rows = small_examples()
    alone = weights_after([make_batch(rows, range(2), 2, 64)], 1)
    padded = weights_after([make_batch(rows, range(2), 8, 64)], 1)
    assert largest_difference(alone, padded) < 1e-6


def test_one_block_at_true_qwen3_4b_geometry_trains(tmp_path):
    import mlx.nn as nn

    sizes = {"hidden_size": 2560, "num_attention_heads": 32, "num_key_value_heads": 8}
    base = base_of(
        "qwen3", **sizes, head_dim=128, intermediate_size=9728, num_hidden_layers=1, vocab_size=512
    )
    nn.quantize(base.model, group_size=64, bits=4)
    attached = attach(base, LoRAConfig(rank=8), matmul_path="transient")
    described = [g.describe() for group in attached.groups for g in group.members]
    assert any("q_proj: 2560 -> 4096 (affine 4-bit g64, stored width 320" in d for d in described)
    optimizer = make_optimizer(TrainConfig(learning_rate=1e-3, iters=3, lr_schedule="constant"))
    optimizer.init(base.model.trainable_parameters())
    stepper = lm_stepper(base.model, optimizer)
    batch = make_batch(small_examples(), range(4), 4, 64)
    mx.reset_peak_memory()
    losses = [stepper(as_arrays(batch), batch.count, True, True)[0] for _ in range(3)]
    assert losses[-1] < losses[0] - 0.01
    assert mx.get_peak_memory() > 0


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "adafactor", "sgd", "muon", "lion"])
def test_every_optimizer_lowers_the_loss(optimizer):
    rate = {"sgd": 0.3, "lion": 1e-3}.get(optimizer, 1e-2)
    config = TrainConfig(optimizer=optimizer, learning_rate=rate, iters=8)
    base = base_of("qwen3")
    attach(base, LORA)
    made = make_optimizer(config)
    made.init(base.model.trainable_parameters())
    stepper = lm_stepper(base.model, made)
    batch = make_batch(small_examples(), range(4), 4, 64)
    losses = [stepper(as_arrays(batch), batch.count, True, True)[0] for _ in range(8)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "lr_schedule",
    [
        "cosine",
        "linear",
        "constant",
        {"name": "cosine_decay", "arguments": ["1e-3", 10], "warmup": 3, "warmup_init": 1e-7},
        {"name": "exponential_decay", "arguments": [1e-3, 0.9]},
    ],
)
def test_schedules_start_low_when_warmed_up_and_stay_positive(lr_schedule):
    warmup = 0 if isinstance(lr_schedule, dict) else 3
    config = TrainConfig(lr_schedule=lr_schedule, warmup_steps=warmup, iters=10, learning_rate=1e-3)
    rate = make_optimizer(config)
    values = []
    for _ in range(10):
        rate.update(base_of("qwen3", num_hidden_layers=1).model, {})
        values.append(float(rate.learning_rate))
    assert all(v >= 0 for v in values) and 0 < max(values) <= 1.001e-3
    if not isinstance(lr_schedule, dict) or "warmup" in lr_schedule:
        assert values[0] < values[3]


def test_size_gate_fails_with_exit_code_1_and_names_the_gate(rows, tmp_path):
    arguments = f"--data {rows} --iters 1 --batch-size 2 --matmul-path dense --out {tmp_path / 'p'}"
    result = CliRunner().invoke(
        train_command, [*arguments.split(), "--max-pack-mb", "0.001", "--json"]
    )
    assert result.exit_code == 1
    assert "gate --max-pack-mb failed" in result.stderr
    report = json.loads(result.stdout)
    assert report["gates"]["max_pack_mb"]["passed"] is False
    assert (tmp_path / "p" / "pack.json").is_file()


def test_gates_are_held_at_the_end_and_their_results_are_in_the_manifest(rows, tmp_path):
    arguments = f"--data {rows} --iters 1 --batch-size 2 --matmul-path dense --out {tmp_path / 'p'}"
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


def test_single_rows_and_last_k_targets_train(tiny, tmp_path):
    rows = write_rows(
        tmp_path / "rows",
        train=[chat("a b c", "d e f g h"), chat("one", "two three")],
        valid=[chat("hello", "world")],
    )
    train = TrainConfig(iters=1, batch_size=4, ce_last_k=1, matmul_path="dense")
    run = train_pack(tiny, rows, LORA, train, tmp_path / "p")
    assert run.report["trained_tokens"] == 2


@pytest.mark.parametrize("adapted", ["", "--target-modules q_proj"])
def test_json_says_which_path_every_kind_of_weight_ran_on_and_why(rows, tmp_path, adapted):
    arguments = f"--data {rows} --out {tmp_path / 'p'} --iters 2 --batch-size 1 --rank 2 {adapted}"
    result = CliRunner().invoke(train_command, [*arguments.split(), "--json", "-v"])
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    at_work = report["matmul_paths"]
    projections = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
    assert set(at_work) == {*projections, "embed_tokens"}
    for name, found in at_work.items():
        assert found["paths"] == {report["matmul_path"]: 1 if name == "embed_tokens" else 6}
        assert set(found["step_ms"]) == {"quantized", "transient", "dense"}
    assert "24 x" not in result.stderr and "12 x [768, 256] gate_proj, up_proj:" in result.stderr
    assert f"{report['batch_shapes']} of batches" in result.stderr


def test_a_run_has_its_own_cache_limit_and_leaves_that_of_before(tiny, rows, tmp_path, monkeypatch):
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
                train_pack(tiny, rows, LORA, config, tmp_path / str(limit))
            assert seen.pop() == limit and mx.set_cache_limit(5 << 20) == 5 << 20
    finally:
        mx.set_cache_limit(before)


def stand_in_for_metal(monkeypatch) -> list[int]:
    """Wired limits in the order in which they are set, on a Mac that recommends 1000 bytes."""
    wired = [0]

    def set_wired_limit(limit):
        wired.append(limit)
        return wired[-2]

    monkeypatch.setattr(runtime, "on_cpu", lambda: False)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "set_wired_limit", set_wired_limit)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 1000})
    return wired


def test_on_a_mac_memory_is_wired_for_the_run_and_released_whatever_ends_it(monkeypatch):
    wired = stand_in_for_metal(monkeypatch)
    with runtime.memory_limits():
        assert wired == [0, 1000]
    assert wired == [0, 1000, 0]
    with pytest.raises(KeyboardInterrupt), runtime.memory_limits():
        raise KeyboardInterrupt
    assert wired == [0, 1000, 0, 1000, 0]


def test_a_refused_wired_limit_leaves_the_cache_limit_of_before(monkeypatch):
    stand_in_for_metal(monkeypatch)

    def refuse(_):
        raise ValueError("refused")

    monkeypatch.setattr(mx, "set_wired_limit", refuse)
    before = mx.set_cache_limit(5 << 20)
    try:
        with pytest.raises(ValueError, match="refused"), runtime.memory_limits():
            pass
        assert mx.set_cache_limit(before) == 5 << 20
    finally:
        mx.set_cache_limit(before)


def test_without_metal_nothing_is_wired(monkeypatch):
    monkeypatch.setattr(mx, "set_wired_limit", None)
    with runtime.memory_limits():
        pass


def test_on_a_mac_that_computes_on_its_cpu_nothing_is_wired(monkeypatch):
    wired = stand_in_for_metal(monkeypatch)
    monkeypatch.setattr(runtime, "on_cpu", lambda: True)
    with runtime.memory_limits():
        assert wired == [0]


@pytest.mark.parametrize(
    ("on_cpu", "info", "limits", "total"),
    [
        (False, {"max_recommended_working_set_size": 1000}, ["7"], 1000),
        (False, {"total_memory": 2000}, ["7"], 2000),
        (True, {"total_memory": 2000}, ["max", "4096\n"], 4096),
    ],
)
def test_total_memory_is_that_of_the_device(monkeypatch, tmp_path, on_cpu, info, limits, total):
    files = [tmp_path / str(i) for i in range(len(limits))]
    for file, limit in zip(files, limits, strict=True):
        file.write_text(limit)
    monkeypatch.setattr(runtime, "_MEMORY_LIMITS", [tmp_path / "none", *files])
    monkeypatch.setattr(runtime, "on_cpu", lambda: on_cpu)
    monkeypatch.setattr(mx, "device_info", lambda: info)
    assert runtime.total_memory() == total


def test_cache_limit_on_a_gpu_is_less_than_a_fitting_plan_leaves_free(monkeypatch):
    monkeypatch.setattr(runtime, "on_cpu", lambda: False)
    monkeypatch.setattr(runtime, "total_memory", lambda: 8 << 30)
    assert runtime.cache_limit() == 1 << 30
    assert runtime.cache_limit() < (1 - 1 / (1 + ERROR)) * (8 << 30)


def test_three_hundred_steps_leave_memory_as_it_was(tmp_path):
    attached = attach(base_of("qwen3"), LORA, None, "quantized", 0)
    optimizer = make_optimizer(QUICK)
    optimizer.init(attached.model.trainable_parameters())
    stepper = lm_stepper(attached.model, optimizer)
    batches = [
        as_arrays(make_batch(small_examples(), range(n), 4, limit))
        for n in (1, 4)
        for limit in (29, 40, 64)
    ]
    active = []
    with runtime.memory_limits():
        for number in range(300):
            stepper(batches[number % len(batches)], 10, True, True)
            active.append(mx.get_active_memory())
            assert mx.get_cache_memory() <= runtime.cache_limit()
    assert max(active[100:]) <= max(active[:20]) and max(active[290:]) <= max(active[10:20])
    assert 1 < len(stepper.shapes) <= len(batches)
    assert stepper.traces == 0 or runtime.COMPILES
