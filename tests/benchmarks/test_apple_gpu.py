"""What a step costs on an Apple GPU is counted from its graph, and few primitives are dispatched."""

import dataclasses
from importlib.metadata import version

import mlx.core as mx
import pytest

from benchmarks import graph, history
from benchmarks.apple_gpu import command, costs, lazy_graph, libmlx
from benchmarks.apple_gpu.capture import MLX_LM, OURS, StepJob
from benchmarks.apple_gpu.peak import Queue, peak_bytes
from benchmarks.apple_gpu.published import TASK, compare, predicted_s
from benchmarks.apple_gpu.seconds import CHIPS, STEP_S
from benchmarks.apple_gpu.step import Costs, Step, lay_out
from benchmarks.workloads import QWEN3_4B
from tests.helpers.memory import active_bytes

# Primitives that a block of Qwen3-4B dispatches in a step of 1 x 2048, forward, backward and update,
# and the GB that they move. `python -m benchmarks graph ops` shows them. Whoever adds some says why.
LIMITS = {
    ("quantized", "none"): (118, 4.85),
    ("transient", "none"): (132, 5.65),
    ("quantized", "block"): (156, 5.75),
}
MLX_LM_PRIMITIVES = {"none": 114, "block": 148}

# A step with made-up costs, for what only adds them up.
COSTS = Costs(100.0, 90.0, 4e9, 1e12, 1e9, {chip: 0.01 for chip in CHIPS})
STEP = Step(OURS, StepJob(QWEN3_4B, 1, 2048), 2048, COSTS, {}, COSTS, 0)


@pytest.fixture(scope="module", autouse=True)
def _supported():
    try:
        libmlx.check_supported()
    except libmlx.Unsupported as error:
        pytest.skip(str(error))


def check_products(step, times: int) -> None:
    last, others = 2560 * 9728, 2560 * (2 * 4096 + 2 * 1024 + 2 * 9728)
    fused = {kind.split()[0] for kind in step.block_kinds}
    assert {"ScaledDotProductAttentionVJP", "RMSNormVJP", "RoPE", "Compiled"} <= fused
    kinds = [kind for kind in step.block_kinds if kind.startswith("QuantizedMatmul")]
    operations = sum(step.block_kinds[kind].operations for kind in kinds)
    assert operations == 2048 * (times * others + 4 * last)


@pytest.mark.slow
def test_a_block_dispatches_few_primitives():
    job = StepJob(QWEN3_4B, 1, 2048)
    asked = [(MLX_LM, dataclasses.replace(job, recompute=policy)) for policy in MLX_LM_PRIMITIVES]
    asked += [(OURS, dataclasses.replace(job, path=way[0], recompute=way[1])) for way in LIMITS]
    theirs, theirs_recomputed, *ours = lay_out(asked)
    if version("mlx-lm") == "0.32.2":  # of which they were counted
        counted = [each.block.primitives for each in (theirs, theirs_recomputed)]
        assert counted == list(MLX_LM_PRIMITIVES.values())
    for (primitives, gigabytes), step in zip(LIMITS.values(), ours, strict=True):
        assert step.block.primitives <= primitives, step.name
        assert step.block.bytes / 1e9 <= gigabytes, step.name

    kept, _, recomputed = ours
    for step, times in ((theirs, 4), (theirs_recomputed, 6), (kept, 4), (recomputed, 6)):
        check_products(step, times)
    assert recomputed.whole.peak_bytes < 0.1 * kept.whole.peak_bytes
    assert 1.2 < recomputed.whole.seconds["M3 Max"] / kept.whole.seconds["M3 Max"] < 1.4


@pytest.fixture
def evaluated_peak():
    """The peak of an evaluation on this machine; if it waits, ten ops are in flight at most."""
    limit = mx.set_memory_limit(0)
    mx.set_memory_limit(limit)

    def peak(make, waits: bool) -> int:
        outputs = make()
        mx.synchronize()
        before = active_bytes()
        mx.reset_peak_memory()
        mx.set_memory_limit(0 if waits else limit)
        mx.eval(outputs)
        return mx.get_peak_memory() - before

    yield peak
    mx.set_memory_limit(limit)


def test_the_estimated_peak_is_that_of_mlx(evaluated_peak):
    """Of a chain whose arrays are read again in the opposite order."""
    weights = [mx.random.normal((256, 256)) for _ in range(6)]
    x = mx.random.normal((2048, 256))
    mx.eval(weights, x)

    def chain():
        kept, h = [], x
        for weight in weights:
            h = mx.exp(h @ weight)
            kept.append(h)
        return [sum((h * k).sum() for k in reversed(kept))]

    outputs = chain()
    nodes = lazy_graph.read(outputs, [*weights, x])
    laid_out = costs.priced(nodes, [lazy_graph.address(output) for output in outputs])
    expected = peak_bytes(laid_out)
    assert expected <= evaluated_peak(chain, waits=True) <= 1.2 * expected
    in_flight = peak_bytes(laid_out, Queue(dispatches=9, elements=1 << 40))  # of MLX's CPU streams
    assert expected < in_flight
    assert evaluated_peak(chain, waits=False) <= 1.02 * in_flight


@pytest.mark.slow
def test_what_is_predicted_is_near_what_was_published():
    shares = {each.name: predicted_s(each, step) / each.seconds for each, step in compare()}
    fixed = {name for name in shares if name.endswith("x 84")}
    assert len(fixed) == 2 and all(0.4 < shares[name] < 0.5 for name in fixed)
    assert all(0.79 < share < 0.97 for name, share in shares.items() if name not in fixed)

    recorded = [r for r in history.read(history.HISTORY) if r.task == TASK]
    newest = max(r.date for r in recorded)
    for r in recorded:
        if r.date == newest and r.metric == "predicted over published":
            name = r.shape.partition(", rank")[0]
            assert r.p50 == pytest.approx(shares[name], rel=0.01), name


@pytest.fixture
def laid_out(monkeypatch):
    """`steps` lays out this step, as if it were the one of both implementations."""
    theirs = dataclasses.replace(STEP, implementation=MLX_LM)
    monkeypatch.setattr(command, "lay_out", lambda *_: [theirs, theirs, STEP])


def test_the_command_prints_and_records_steps(laid_out, tmp_path, capsys):
    file = tmp_path / "history.jsonl"
    arguments = ["steps", "--model", "qwen3-4b", "--batch", "1", "--path", "quantized"]
    assert graph.main([*arguments, "--chip", "m3-max,M4 Max", "--history", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "no Mac was timed" in printed and max(map(len, printed.splitlines())) <= 100
    records = [r for r in history.read(file) if r.implementation == "mlx_packs quantized"]
    values = {r.metric: r.p50 for r in records}
    assert values["primitives"] == STEP.whole.primitives
    assert values["M3 Max"] == pytest.approx(STEP.whole.seconds["M3 Max"], rel=1e-3)
    assert values["time over mlx-lm"] == 1 and "M2 Pro" not in values
    assert {r.device for r in records} == {"Apple GPUs, predicted (no Mac timed)"}
    assert STEP_S < values["M4 Max"]
