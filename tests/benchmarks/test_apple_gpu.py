"""What a step costs on an Apple GPU is counted from its graph, and few primitives are dispatched."""

import dataclasses
from importlib.metadata import version

import mlx.core as mx
import pytest

from benchmarks import graph, history, report
from benchmarks.apple_gpu import command, costs, lazy_graph, libmlx, trees
from benchmarks.apple_gpu import epoch as epoch_module
from benchmarks.apple_gpu.capture import MLX_LM, OURS, StepJob
from benchmarks.apple_gpu.peak import Queue, evaluation_order, peak_bytes
from benchmarks.apple_gpu.published import TASK, compare, predicted_s
from benchmarks.apple_gpu.seconds import CHIPS, STEP_S, TRACE_S, rate, seconds
from benchmarks.apple_gpu.step import Costs, Step, lay_out
from benchmarks.apple_gpu.trees import TreeShape
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

PATHS = ("quantized", "transient")


@pytest.fixture(scope="module", autouse=True)
def _supported():
    try:
        libmlx.check_supported()
    except libmlx.Unsupported as error:
        pytest.skip(str(error))


def check_products(step, times: int) -> None:
    """Forward and input gradient of all projections; recomputed, all but the last come again."""
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


# A step with made-up costs, for what only adds them up.
COSTS = Costs(100.0, 90.0, 4e9, 1e12, 1e9, {chip: 0.01 for chip in CHIPS})
STEP = Step(OURS, StepJob(QWEN3_4B, 1, 2048), 2048, COSTS, {}, COSTS, 0)


@pytest.fixture
def laid_out(monkeypatch):
    """`steps` lays out this step, as if it were the one of both implementations."""
    theirs = dataclasses.replace(STEP, implementation=MLX_LM)
    monkeypatch.setattr(command, "lay_out", lambda *_: [theirs, theirs, STEP])


def graph_of(outputs: list[mx.array], leaves: list[mx.array]) -> costs.Graph:
    nodes = lazy_graph.read(outputs, leaves)
    return costs.priced(nodes, [lazy_graph.address(output) for output in outputs])


def test_a_lazy_graph_is_read_as_mlx_laid_it_out():
    x = mx.zeros((3, 4), mx.float16)
    mx.eval(x)
    y = mx.exp(x.T) @ mx.ones((3, 5), mx.float16)
    nodes = lazy_graph.read([y[:, ::2]], [x])
    names = [node.name for node in nodes]
    assert names.index("leaf") < names.index("Exp") < names.index("Matmul")
    by_name = {node.name: node for node in nodes}
    assert by_name["Transpose"].attributes == [1, 0]
    assert by_name["Slice"].attributes == [1, 2]
    assert [out[1:] for out in by_name["Matmul"].outputs] == [([4, 5], "float16")]


def test_views_are_free_and_broadcasts_are_read_once():
    x, row = mx.zeros((64, 32)), mx.zeros((32,))
    mx.eval(x, row)
    ops = {op.name: op for op in graph_of([(x + row).T.reshape(-1)], [x, row]).ops}
    assert ops["Add"].bytes == 4 * (64 * 32 + 32 + 64 * 32)
    assert ops["Broadcast"].dispatches == ops["Transpose"].dispatches == 0
    assert ops["Reshape"].dispatches == 1 and ops["Reshape"].bytes == 2 * 4 * 64 * 32


def test_products_count_whole_tiles():
    a, b = mx.zeros((33, 64), mx.bfloat16), mx.zeros((64, 16), mx.bfloat16)
    mx.eval(a, b)
    (op,) = [op for op in graph_of([a @ b], [a, b]).ops if op.name == "Matmul"]
    assert op.operations == 2 * 64 * 32 * 64
    assert op.bytes == 2 * (33 * 64 + 64 * 16 + 33 * 16)
    chip = CHIPS["M3 Max"]
    launch = 1e-6 * chip.launch_us
    assert seconds(op, chip) == pytest.approx(launch + op.operations / (14.2e12 * 0.7 * 0.68))
    op.operations = 0
    assert seconds(op, chip) == pytest.approx(launch + op.bytes / (400e9 * 0.75))


def test_a_costly_primitive_without_a_rule_is_rejected():
    x = mx.zeros((8,))
    with pytest.raises(costs.Unpriced, match="FFT"):
        graph_of([mx.fft.fft(x)], [x])


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

    laid_out = graph_of(chain(), [*weights, x])
    expected = peak_bytes(laid_out)
    assert expected <= evaluated_peak(chain, waits=True) <= 1.2 * expected
    in_flight = peak_bytes(laid_out, Queue(dispatches=9, elements=1 << 40))  # of MLX's CPU streams
    assert expected < in_flight
    assert evaluated_peak(chain, waits=False) <= 1.02 * in_flight


def test_every_op_is_evaluated_after_what_it_reads():
    x = mx.zeros((4, 4))
    y = mx.exp(x) @ mx.sin(x)
    laid_out = graph_of([y + y.sum(), mx.cos(y)], [x])
    made = set()
    for op in evaluation_order(laid_out):
        sources = {id(a) for other in laid_out.ops for a in other.outputs}
        assert {id(a) for a in op.inputs} & sources <= made
        made |= {id(a) for a in op.outputs}
    assert len(made) == len(laid_out.ops)


def test_kernels_of_ours_are_priced_as_declared():
    outputs = [(1, [8, 8], "float32")]
    nodes = [
        lazy_graph.Node("leaf", 0, [], [(0, [8, 8], "float32")]),
        lazy_graph.Node("kernel:grouped_lora_down", 7, [0], outputs, [4096, 1e9, True]),
    ]
    (op,) = costs.priced(nodes, [1]).ops
    assert (op.bytes, op.operations, op.rate) == (4096, 1e9, "kernel product")


def test_an_epoch_sums_batches_and_compiles_each_step_once(monkeypatch):
    batches = [(4, 64, 256, 0), (4, 64, 256, 0), (4, 64, 256, 1), (4, 32, 128, 0)]
    monkeypatch.setattr(epoch_module, "capture", lambda *_: [batches])
    monkeypatch.setattr(epoch_module, "lay_out", lambda asked, _: [STEP] * len(asked))
    examples = epoch_module.Examples(40, 0.5, 0.5, 12, 64)
    (result,) = epoch_module.epochs([(OURS, StepJob(QWEN3_4B, 4, 0))], examples, ["M2 Pro"])
    whole = STEP.whole.seconds["M2 Pro"]
    compiled = 3 * TRACE_S * STEP.whole.primitives
    assert result.seconds["M2 Pro"] == pytest.approx(4 * whole + compiled)
    assert (result.batches, result.steps, result.targets) == (4, 3, examples.targets())
    assert result.fill == sum(n - 1 for n in examples.lengths()) / (3 * 4 * 64 + 4 * 32)


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


def test_a_run_has_one_date_so_that_a_report_shows_all_of_it(laid_out, monkeypatch, tmp_path):
    here, days = history.Environment.here(), iter("123456789")
    monkeypatch.setattr(
        history.Environment, "here", lambda: dataclasses.replace(here, date=next(days))
    )
    file = tmp_path / "history.jsonl"
    models = ["--model", "qwen3-4b,llama3-8b"]
    assert graph.main(["steps", *models, "--path", "quantized", "--history", str(file)]) == 0
    (run,) = report.latest(history.read(file))
    assert len({r.shape for r in run}) == 4


def test_bad_options_are_named(capsys):
    for arguments, message in (
        (["--model", "qwen9"], "no 'qwen9'; there are qwen3_4b"),
        (["--batch", "0"], "'0' is no number of 1 or more"),
        (["--supervised", "1.5"], "'1.5' has a share"),
        (["batches", "--length", "512"], "batches takes no --length"),
    ):
        with pytest.raises(SystemExit, match="2"):
            graph.main(arguments)
        assert message in capsys.readouterr().err


def test_another_mlx_is_rejected_with_what_to_do(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(libmlx, "version", lambda _: "0.99")
    file = tmp_path / "history.jsonl"
    assert graph.main(["steps", "--history", str(file)]) == 2
    assert "0.99 is installed: pip install 'mlx[cpu]==" in capsys.readouterr().err
    assert not file.exists()


def small_config() -> dict:
    small = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2}
    small |= {"num_key_value_heads": 1, "head_dim": 64, "vocab_size": 512}
    return QWEN3_4B | small


@pytest.mark.slow
def test_ops_and_batches_of_a_small_model(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(command.CONFIGS, "qwen3_0_6b", small_config())
    file = tmp_path / "history.jsonl"
    arguments = ["--model", "qwen3_0_6b", "--history", str(file)]
    few = ["--examples", "12", "--supervised", "1", "--path", "dense"]
    assert graph.main(["batches", *few, *arguments]) == 0
    records = history.read(file)
    names = {r.implementation for r in records}
    assert names == {"mlx-lm", "mlx_packs dense", "mlx_packs dense, packed"}
    assert {r.p50 for r in records if r.metric == "batches"} >= {3}
    assert graph.main(["ops", *arguments]) == 0
    assert "RoPE bf16 > bf16" in capsys.readouterr().out
    assert history.read(file) == records


@pytest.mark.slow
def test_a_tree_computes_a_prefix_once(monkeypatch, tmp_path, capsys):
    shape = TreeShape("two documents", common=100, own=30, rows=8, groups=2)
    assert (shape.prefix, shape.length) == (96, 160)
    assert shape.promised == pytest.approx(8 * 130 / (2 * 100 + 8 * 30))

    monkeypatch.setitem(command.CONFIGS, "qwen3_0_6b", small_config())
    monkeypatch.setattr(trees, "SHAPES", (shape,))
    file = tmp_path / "history.jsonl"
    assert graph.main(["trees", "--model", "qwen3_0_6b", "--history", str(file)]) == 0
    assert "a tree: " in capsys.readouterr().out

    records = [r for r in history.read(file) if r.task == "graph trees"]
    values = {(r.implementation, r.metric): r.p50 for r in records}
    rows, tree = "mlx_packs quantized", "mlx_packs quantized, tree"
    share = values[tree, "operations"] / values[rows, "operations"]
    assert share == pytest.approx((2 * 96 + 8 * 40) / (8 * 160), rel=0.1)
    assert values[tree, "peak activations"] < 0.8 * values[rows, "peak activations"]


def test_products_of_few_rows_and_of_emulated_bfloat16_are_slower():
    kind, new, old = "quantized product", CHIPS["M3 Max"], CHIPS["M1 Max"]
    for rows, share in ((16, 0.68), (128, 0.85), (256, 1), (None, 1)):
        assert rate(kind, new, rows) == pytest.approx(share * rate(kind, new)), rows
    nominal = old.matrix_tflops / new.matrix_tflops
    assert rate(kind, old) / rate(kind, new) / nominal == pytest.approx(0.48 / 0.64)
    assert rate("product", old) / rate("product", new) == pytest.approx(nominal)


def test_gradients_through_fp4_do_not_use_matrix_units():
    kind, m4, m5 = "floating gradient", CHIPS["M4 Max"], CHIPS["M5 Max"]
    assert rate(kind, m4) == rate("quantized product", m4)
    assert rate(kind, m5) == pytest.approx(rate("quantized product", m5) / 4, rel=0.25)


@pytest.mark.slow  # 2 s: four steps of a 4B are laid out
def test_steps_through_fp4_in_place_are_slower():
    job = StepJob(QWEN3_4B, 1, 512, weights="nvfp4")
    affine = dataclasses.replace(job, weights="affine4")
    jobs = [dataclasses.replace(j, path=p) for j in (job, affine) for p in PATHS]
    steps = lay_out([(OURS, each) for each in jobs], ["M5 Max"])
    fp4_slower, affine_slower = (
        first.whole.seconds["M5 Max"] / other.whole.seconds["M5 Max"]
        for first, other in (steps[:2], steps[2:])
    )
    assert fp4_slower > 1.4 > affine_slower
    assert steps[0].name == "mlx_packs nvfp4 quantized"


def test_a_suffix_attends_to_the_whole_prefix():
    for queries, keys, share in ((256, 256, 0.625), (128, 4096, 0.9921875), (8, 40, 1)):
        rows, seen = (costs.Array((1, 4, n, 64), "bfloat16") for n in (queries, keys))
        op = costs.Op("ScaledDotProductAttention", [rows, seen, seen], [rows], attributes=True)
        costs._attention(op)
        assert op.operations == 4 * 4 * queries * keys * 64 * share


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
