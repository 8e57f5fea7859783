"""`packs bench`: a record of the bundled base, its text, what it rejects, and what uses it."""

import getpass
import json
import re
import socket
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from mlx_packs import chips, runtime
from mlx_packs.bases.nf4 import NF4Format
from mlx_packs.bases.precision import ComputeDtype
from mlx_packs.bench import record, run, steps
from mlx_packs.bench.run import BenchSettings, Conditions
from mlx_packs.cli.main import packs
from mlx_packs.display import QUIET, Display
from mlx_packs.errors import Float16Overflow
from mlx_packs.files import CACHE_VARIABLE
from mlx_packs.memory import matmul_path, step_time
from mlx_packs.memory.plan import MatmulPathChoice
from mlx_packs.ops import diagnostics
from mlx_packs.packs.base import load_base
from mlx_packs.runtime import mx
from mlx_packs.training import step
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.errors import raises

DOCUMENT = Path(__file__).parents[2] / "benchmarks" / "README.md"
KERNEL = {
    **{"op": "nf4", "instance": "float32 small", "backend": "reference"},
    **{"max_error": 1e-7, "ok": True, "fault": None, "reference_us": 12.5},
    **dict.fromkeys(("kernel_us", "choice")),
}
QUIET_MACHINE = Conditions(load=0.1)


def use_clock(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let the clock go forward by so much whenever it is read."""
    clock = count(0.0, seconds)
    for module in (run, steps):
        patch.setattr(module, "monotonic", lambda: next(clock))


def fake_race(adapters, entries, turns, tolerance):
    for entry in entries:
        entry.checked_ms = [30.0, 10.0]
    for _ in turns:
        entries[0].step_ms.append([20.0] * entries[0].steps)
        entries[1].step_ms.append([10.0] * entries[1].steps)


def examine(patch: pytest.MonkeyPatch, *kernels: dict) -> None:
    found = iter(kernels)
    instances = [SimpleNamespace(op=k["op"], name=k["instance"]) for k in kernels]
    patch.setattr(diagnostics, "kernel_instances", lambda: instances)
    patch.setattr(diagnostics, "examine_kernel", lambda _: dict(next(found)))
    patch.setattr(diagnostics, "examine_machine", dict)


def quick(patch: pytest.MonkeyPatch, cache: Path) -> None:
    """Nothing but steps takes time: kernels are known, rates too, products are timed for 0.1 s."""
    patch.setenv(CACHE_VARIABLE, str(cache))
    examine(patch, KERNEL)
    patch.setattr(chips, "least_seconds", lambda compute: 0.001)
    patch.setattr(run, "BUSY_CPU", 1e9)
    patch.setattr(matmul_path, "LIMIT_S", 0.3)
    patch.setattr(steps, "_TURN_S", 0.0)
    use_clock(patch, 1.0)
    chips.chip_here.cache_clear()


@pytest.fixture(scope="module")
def benched(tmp_path_factory):
    """The output of `packs bench --contribute` in a folder of its own, and the folder."""
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        quick(patch, folder / "cache")
        patch.chdir(folder)
        options = "bench --shapes 1x4,2x4 --rank 2 --minutes 0.5 --contribute --out r.json"
        result = CliRunner().invoke(packs, options.split(), catch_exceptions=False)
    chips.chip_here.cache_clear()
    assert result.exit_code == 0, result.output
    return result, folder


@pytest.fixture
def quickly(tmp_path, monkeypatch):
    quick(monkeypatch, tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    chips.chip_here.cache_clear()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return load_base(write_checkpoint(tmp_path_factory.mktemp("base") / "small"))


@pytest.fixture
def untimed(quickly, small, monkeypatch):
    """As `quickly`; the base is a small one, and no product is timed."""
    monkeypatch.setattr(run, "load_base", lambda *_, **__: small)
    choice = MatmulPathChoice("dense", {}, "")
    monkeypatch.setattr(steps, "choose_matmul_path", lambda *_, **__: choice)
    return quickly


@pytest.fixture
def faked(untimed, monkeypatch):
    """As `untimed`; steps of mlx-lm take 20 ms, ours 10 ms."""
    monkeypatch.setattr(steps, "race", fake_race)
    return untimed


@pytest.fixture
def never_runs(monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("it ran")

    monkeypatch.setattr(run, "run_bench", forbidden)


def keys_of(value, prefix="") -> set[str]:
    """Paths of all keys of JSON; of a list those of its elements."""
    if isinstance(value, list):
        return {key for element in value for key in keys_of(element, prefix)}
    if not isinstance(value, dict):
        return set()
    keys = {f"{prefix}{key}" for key in value}
    return keys.union(*(keys_of(v, f"{prefix}{key}.") for key, v in value.items()), set())


@pytest.mark.slow
def test_the_record_has_both_sides_of_every_shape(benched):
    written = json.loads((benched[1] / "r.json").read_text())
    assert written["format"] == "mlx_packs bench 1" and written["calibrated"] is True
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", written["date"])

    shapes = [(s["batch_size"], s["length"], s["targets"]) for s in written["steps"]]
    assert shapes == [(1, 4, 4), (2, 4, 8)]

    for compared in written["steps"]:
        assert compared["model"] == "tiny" and compared["fault"] is None and compared["rounds"] >= 3
        for side in (compared["mlx_lm"], compared["mlx_packs"]):
            assert 0 < side["step_s"]["p20"] <= side["step_s"]["p50"] <= side["step_s"]["p80"]
            speed = compared["targets"] / side["step_s"]["p50"]
            assert side["tokens_per_s"] == pytest.approx(speed, rel=0.01)
            assert side["peak_gb"] > 0.004 and side["steps"] >= compared["rounds"]
        assert compared["ratio"]["p20"] <= compared["ratio"]["p50"] <= compared["ratio"]["p80"]
        assert compared["mlx_packs"]["planned_peak_gb"] > 0.004
        assert compared["mlx_packs"]["predicted_step_s"] is None  # of a CPU not measured before

    assert written["kernels"] == [KERNEL]
    assert {"mlx", "mlx-lm", "mlx-packs"} <= set(written["machine"]["versions"])


def test_every_key_of_the_record_is_documented(benched):
    written = json.loads((benched[1] / "r.json").read_text())
    document = DOCUMENT.read_text(encoding="utf-8")
    described = set(re.findall(r"`([\w.-]+)`", document))
    open_keys = {"machine.versions", "steps.matmul_ms"}
    undocumented = {
        key
        for key in keys_of(written)
        if key.rpartition(".")[0] not in open_keys and key.rpartition(".")[2] not in described
    }
    assert not undocumented
    faulty = diagnostics.examine_kernel(SimpleNamespace(op="nf4", name="without checks"))
    assert set(faulty) == set(KERNEL) <= described


def test_the_table_fits_80_columns_and_is_in_the_pull_request(benched):
    result, folder = benched
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    assert any(line.startswith("1 x 4 ") for line in lines)
    assert "kernels 1 instances right" in lines
    assert "packs plan now predicts seconds per step from 2 steps measured here" in result.stdout
    assert {f.name for f in folder.iterdir()} == {"r.json", "r.md", "cache"}

    text = (folder / "r.md").read_text()
    written = json.loads((folder / "r.json").read_text())
    body, how = text.split("\n\nRead `r.json`")
    assert body.startswith("# [benchmarks] Add a record of ")
    assert "\n".join(record.table(written)) in body
    assert f"`benchmarks/contributed/{record.file_name(written)}`" in how

    for file in ("r.json", "r.md"):  # what is shared has no path and no name
        text = (folder / file).read_text()
        for secret in (str(Path.home()), str(folder), socket.gethostname()):
            assert secret not in text
        assert not re.search(r"(?<![\w.])/(?:home|Users|tmp|work|root|usr|var)\b", text)


def test_names_and_paths_in_texts_are_replaced(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "annas-mac.local")
    monkeypatch.setattr(getpass, "getuser", lambda: "anna")
    monkeypatch.setattr(Path, "home", lambda: Path("/Users/anna.b"))
    text = "RuntimeError: /Users/anna.b/x/kernel.metal:3: Anna's file ~/models/qwen on annas-mac"
    assert record.anonymous(text) == "RuntimeError: (path):3: (name)'s file (path) on (name)"
    assert (
        record.anonymous("mlx-community/Qwen3-4B-Instruct-2507-4bit")
        == "mlx-community/Qwen3-4B-Instruct-2507-4bit"
    )
    assert record.anonymous("hannah at 3 GB/s") == "hannah at 3 GB/s"


def test_a_kernel_fault_is_anonymous_in_the_record_and_exits_with_1(faked, monkeypatch):
    wrong = KERNEL | {"ok": False, "fault": f"error in {Path.home()}/kernels/nf4.metal"}
    examine(monkeypatch, KERNEL, wrong)
    options = ["bench", "--shapes", "1x4", "--rank", "2", "--minutes", "0.2", "--contribute"]
    result = CliRunner().invoke(packs, options)
    assert result.exit_code == 1 and "the kernel nf4" in result.stderr
    (file,) = faked.glob("packs-bench-*.json")
    assert json.loads(file.read_text())["kernels"][1]["fault"] == "error in (path)"
    assert "kernels 1 of 2 wrong" in result.stdout and not list(faked.glob("*.md"))


def test_losses_that_differ_give_no_speed_and_exit_with_1(untimed, monkeypatch):
    one = steps.Ours.step
    monkeypatch.setattr(steps.Ours, "step", lambda *a: (1.0, 1.01 * one(*a)[1]))
    options = ["bench", "--shapes", "1x4", "--rank", "2", "--minutes", "0.2", "--json"]
    result = CliRunner().invoke(packs, options)
    assert result.exit_code == 1 and "Please report it" in result.stderr
    (compared,) = json.loads(result.stdout)["steps"]
    assert compared["fault"].startswith("losses differ") and compared["mlx_packs"] is None
    assert json.loads(result.stdout)["calibrated"] is False


def bench_of(before: Conditions = QUIET_MACHINE, tick: float = 1.0, **settings) -> run.BenchResult:
    settings = {"shapes": ((1, 4),), "rank": 2, "minutes": 1.0} | settings
    with pytest.MonkeyPatch.context() as patch:
        use_clock(patch, tick)
        patch.setattr(run, "read_conditions", lambda: QUIET_MACHINE)
        return run.run_bench(BenchSettings(**settings), before, [0], Display(QUIET))


def test_a_short_time_is_said_and_what_has_none_is_left_out(faked):
    result = bench_of(shapes=((1, 4), (2, 4)), minutes=0.3, tick=2.5)
    first, second = result.comparisons[0][1]
    assert first.ratios == (2.0,) and second.fault.startswith("no time was left")
    assert any("Fewer than 3 rounds" in note for note in record.notes(result))
    lines = record.table(record.to_record(result))
    assert any(line.startswith("2 x 4     no time was left") for line in lines)


def test_memory_that_is_not_enough_is_a_line_of_the_record(untimed, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("[metal::malloc] Attempting to allocate 99 bytes")

    monkeypatch.setattr(steps, "race", fails)
    ((_, (compared,)),) = bench_of().comparisons
    assert compared.fault == "the memory of this machine was not enough"


def test_a_shape_that_does_not_fit_both_is_not_timed(shared_tiny, monkeypatch):
    of = steps.contest("tiny", shared_tiny, 2)
    assert steps._too_large(of, (8, 256)) == ""
    monkeypatch.setattr(steps, "total_memory", lambda: 1e6)
    assert steps._too_large(of, (8, 256)).startswith("mlx-lm would take about")


def test_a_disturbed_machine_is_noted_and_calibrates_nothing(faked):
    result = bench_of(before=Conditions(power="battery"))
    assert result.uncalibrated == "the machine runs on battery" and not result.calibrated
    assert not list((faked / "cache" / "measurements").rglob("*.npy"))
    assert "The machine runs on battery: it can do more." in record.notes(result)


def test_a_disturbed_machine_contributes_nothing(quickly, never_runs, rejected, monkeypatch):
    monkeypatch.setattr(run, "read_conditions", lambda: Conditions(power="battery"))
    error = rejected("bench", "--contribute")
    assert (error.code, error.flag) == ("conflict", "contribute")
    assert "runs on battery" in error.message and not list(quickly.iterdir())


@pytest.mark.parametrize(
    "options, flag, code",
    [
        (["--shapes", "2x1"], "shapes", "invalid"),
        (["--shapes", ""], "shapes", "invalid"),
        (["--shapes", "1x4,1x4"], "shapes", "invalid"),
        (["--minutes", "nan"], "minutes", "invalid"),
        (["--rank", "0"], "rank", "invalid"),
        (["--out", "no/r.json"], "out", "not-found"),
        (["--out", "taken.json"], "out", "exists"),
    ],
)
def test_wrong_options_are_one_line(quickly, never_runs, rejected, options, flag, code):
    (quickly / "taken.json").write_text("mine")
    error = rejected("bench", *options)
    assert (error.code, error.flag) == (code, flag)
    assert [f.name for f in quickly.iterdir()] == ["taken.json"]


def test_an_encoder_is_rejected_first(quickly, rejected, encoder):
    error = rejected("bench", "--model", encoder)
    assert error.code == "unsupported" and not list(quickly.glob("*.json"))


def test_a_chip_without_bfloat16_computes_in_float16_unless_it_overflows(monkeypatch, small):
    half = ComputeDtype("float16", "Apple M1 has no native bfloat16", "float16")
    monkeypatch.setattr(run, "choose_compute_dtype", lambda config: half)
    loaded = []

    def load(*_, compute_dtype="auto"):
        loaded.append(compute_dtype)
        return replace(small, compute_dtype=compute_dtype.replace("auto", "bfloat16"))

    def overflow(*_):
        raise Float16Overflow("the forward pass overflows")

    monkeypatch.setattr(run, "load_base", load)
    (of,) = run._contests(BenchSettings(rank=2), Display(QUIET))
    assert (of.dtype, loaded) == ("float16", ["float16"]) and of.note
    monkeypatch.setattr(run, "check_forward", overflow)
    (of,) = run._contests(BenchSettings(rank=2), Display(QUIET))
    assert (of.dtype, loaded[1:]) == ("bfloat16", ["float16", "auto"]) and not of.note


def test_bases_that_mlx_lm_cannot_train_or_that_cannot_be_copied(small, tiny, monkeypatch):
    tiny.model.model.compiled = mx.compile(lambda x: x + 1)
    with raises("unsupported", None, "cannot be copied"):
        steps.contest("tiny", tiny, 2)
    monkeypatch.setattr(steps.Headers, "custom_format", lambda self: NF4Format())
    with raises("unsupported", None, "NF4"):
        steps.contest("small", small, 2)


def test_the_record_of_a_mac_has_its_gpu_and_no_note_on_cpus(faked, monkeypatch):
    state = Conditions("AC", False, "nominal", 3, 40, 0.3)
    result = bench_of(before=state)
    monkeypatch.setattr(runtime, "_assumed", "gpu")
    monkeypatch.setattr(runtime, "device_name", lambda: "Apple M3 Max (metal)")
    hot = replace(result, after=replace(state, thermal="heavy"))
    written = record.to_record(hot)
    assert written["machine"]["gpu_cores"] == 40 and written["rates"]["half_tflops"] > 0
    assert record.file_name(written).startswith("apple-m3-max-20")
    assert written["notes"] == ["At the end the thermal pressure was heavy."]
    lines = record.table(written)
    assert lines[0].startswith("device  Apple M3 Max (metal) · 40 GPU cores · ")
    assert lines[2] == "state   on AC · heat nominal · GPU 3 % · load 0.30 per core"


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [True, False])
def test_several_steps_learn_as_single_ones_do(small, monkeypatch, ahead):
    monkeypatch.setattr(step, "runs_ahead", lambda: ahead)
    of = steps.contest("small", small, 2)
    single, several = (steps._entries(of, (1, 4), "dense")[1] for _ in range(2))
    losses = [single.implementation.step(single.batch)[1] for _ in range(4)]
    times = several.implementation.steps(several.batch, 3)
    assert len(times) == (1 if ahead else 3) and all(ms > 0 for ms in times)
    assert several.implementation.step(several.batch)[1] == losses[3] != losses[0]


def test_the_plan_predicts_by_what_was_measured_on_this_device(benched, run, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(benched[1] / "cache"))
    chips.chip_here.cache_clear()
    code, out, _ = run("plan", "--memory", "16", "-v")
    text = " ".join(out.split())
    assert code == 0 and "s/step" in out and "calibrated by packs bench of 20" in text
    options = json.loads(run("plan", "--memory", "16", "--json")[1])["options"]
    assert options[0]["step_s"] > 0 and options[0]["step_source"].endswith("(tiny)")
    elsewhere = json.loads(run("plan", "--memory", "16", "--device", "gpu", "--json")[1])["options"]
    assert all(option["step_s"] is None for option in elsewhere)

    assert step_time.measured_steps()
    monkeypatch.setattr(runtime, "device_name", lambda: "another (cpu)")
    assert step_time.measured_steps() == []
    chips.chip_here.cache_clear()


def test_no_path_and_no_name_is_in_what_is_shared(benched):
    _, folder = benched
    for file in ("r.json", "r.md"):
        text = (folder / file).read_text()
        for secret in (str(Path.home()), str(folder), socket.gethostname()):
            assert secret not in text
        assert not re.search(r"(?<![\w.])/(?:home|Users|tmp|work|root|usr|var)\b", text)
