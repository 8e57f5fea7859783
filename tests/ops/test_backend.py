"""Choosing a backend, and what happens on a machine where a kernel fails."""

import logging
import time
from dataclasses import replace

import pytest

import mlx_packs as mp
from mlx_packs.files import CACHE_VARIABLE
from mlx_packs.ops import _backend, diagnostics, dispatch, grouped_lora, grouped_lora_kernel
from mlx_packs.ops._check import Check, examine
from mlx_packs.runtime import mx
from tests.helpers.emulation import emulation, failing_maker, forget_verdicts
from tests.helpers.errors import check, raises
from tests.ops.cases import with_workload


def call() -> list[mx.array]:
    """A call of an op with its seeded inputs, for which its rule favours kernels."""
    x, *y = (mx.random.normal((6, w), key=mx.random.key(w)) for w in (40, 24, 24))
    a = mx.random.normal((40, 4), key=mx.random.key(1))
    b = mx.random.normal((4, 24), key=mx.random.key(2))
    return grouped_lora.grouped_lora(x, y, [a, a], [b, b], [2.0, 2.0])


def test_reference_is_the_default_on_a_cpu_and_can_be_named():
    assert dispatch.detect() == "reference" and dispatch.forced() is None
    with mp.backend("reference"):
        assert dispatch.forced() == "reference"
    assert dispatch.forced() is None


@pytest.mark.parametrize(
    ("name", "kind"), [("metal", "unsupported"), ("cuda", "unsupported"), ("vulkan", "unknown")]
)
def test_an_unavailable_backend_is_an_error_however_it_is_named(name, kind, monkeypatch, rejected):
    with raises(kind, "backend", f"--backend {name}"), mp.backend(name):
        pass
    assert dispatch.forced() is None  # the failed one left nothing behind
    monkeypatch.setenv("MLX_PACKS_BACKEND", name)
    with raises(kind, "backend", f"MLX_PACKS_BACKEND {name}"):
        call()
    for command in (["generate", "--prompt", "x"], ["train"], ["doctor"]):
        check(rejected(*command), kind, "backend", f"MLX_PACKS_BACKEND {name}")
    monkeypatch.delenv("MLX_PACKS_BACKEND")
    check(rejected("train", "--backend", name), kind, "backend", f"--backend {name}")


def test_backend_context_neither_raises_nor_hides_an_error_on_exit(monkeypatch, run):
    monkeypatch.setenv("MLX_PACKS_BACKEND", "metal")
    with pytest.raises(KeyError), mp.backend("reference"):
        raise KeyError("of the body")
    assert run("generate", "--backend", "reference", "--prompt", "x", "--max-tokens", 1)[0] == 0
    monkeypatch.delenv("MLX_PACKS_BACKEND")
    assert dispatch.forced() is None
    with raises("unknown", "backend", "--backend : "), mp.backend(""):
        pass


@pytest.mark.parametrize(
    ("kind", "reason", "forced"),
    [
        ("compile", "Unable to build", False),
        ("exception", "limit of 224", False),
        ("wrong", "off by", False),
        ("wrong", "off by", True),
    ],
)
def test_a_failing_kernel_falls_back_once_with_its_reason(
    kind, reason, forced, monkeypatch, caplog
):
    expected = call()
    with emulation("metal"), caplog.at_level(logging.WARNING, "mlx_packs"):
        monkeypatch.setitem(_backend.MAKERS, "metal", failing_maker(kind, _backend.MAKERS["metal"]))
        with dispatch.backend("metal" if forced else None):
            for _ in range(3):
                assert mx.array_equal(call()[0], expected[0]).item()
        text = _backend.record()["fallbacks"]["grouped_lora"]
        assert reason in text
        assert len(caplog.records) == 1 and text in caplog.records[0].getMessage()


def expect(monkeypatch, is_slower):
    """Let the rule of an op say this of its kernel for every call."""
    spec = replace(grouped_lora_kernel.SPEC, slower=lambda *_: is_slower)
    monkeypatch.setattr(grouped_lora_kernel, "SPEC", spec)


def test_choose_follows_the_rule_of_an_op_and_what_ran_is_recorded(monkeypatch):
    with emulation("metal") as built:
        call()
        text = "grouped_lora float32, factors float32, ranks 4/4, outputs 0/1, row tile 4 · inputs 40, widths 24/24"
        assert built and _backend.record()["kernels"] == [text]
        assert _backend.summary() == "metal for 1 kinds of calls, plain MLX for others"
        _backend.start_record()
        assert not _backend.record()["kernels"]
        call()  # decided before, and recorded again
        assert _backend.record()["kernels"] == [text]

        expect(monkeypatch, True)
        forget_verdicts()
        call()
        assert not _backend.record()["kernels"]


@pytest.fixture
def remembered(tmp_path, monkeypatch):
    """What is measured is kept; without that a kernel is taken for every call."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    expect(monkeypatch, False)


def test_a_measured_loss_or_win_decides_before_the_rule(remembered, monkeypatch):
    with emulation("metal") as built:
        call()
        assert built
        (key,) = _backend._launched

        _backend.keep_measured("metal", key, 9.0, 8.0)
        forget_verdicts()  # as in a new process
        call()
        assert not _backend.record()["kernels"]

        assert _backend.measured("metal", (*key[:2], 7, key[3])) == (9.0, 8.0)  # up to 8 rows
        assert _backend.measured("metal", (*key[:2], 9, key[3])) is None
        assert _backend.measured("cuda", key) is None

        expect(monkeypatch, True)
        _backend.keep_measured("metal", key, 7.0, 8.0)
        call()
        assert _backend.record()["kernels"]

        with dispatch.backend("reference"):
            assert grouped_lora_kernel.SPEC.choose(*key[1:]) == "reference"


def test_doctor_keeps_times_of_many_copies_and_they_decide(remembered, monkeypatch):
    instance = next(i for i in grouped_lora_kernel.instances() if i.name.endswith("rows 1"))
    small = with_workload(instance, lambda backend, *_: instance.checks(backend)[0])
    calls = {"kernel": 0, "reference": 0}

    def counted(side, op):
        def run(*inputs):
            calls[side] += 1
            if side == "kernel":
                time.sleep(0.04)  # slower than the reference, however busy the machine is
            return op(*inputs)

        return run

    monkeypatch.setattr(diagnostics.chips, "_REPEATS", 1)
    monkeypatch.setattr(diagnostics, "COPIES", 3)
    with emulation("metal", orders=("forward",)):
        workload = small.workload("metal")
        sides = {side: counted(side, getattr(workload, side)) for side in calls}
        watched = with_workload(small, lambda *_: replace(workload, **sides))
        result = diagnostics.examine_kernel(watched)

        assert result["ok"], result["fault"]
        assert result["choice"] == "reference"
        assert min(calls.values()) >= 2 * 3  # warm and timed

        kernel, plain = _backend.measured("metal", (instance.op, *instance.call))
        assert (kernel, plain) == (result["kernel_us"], result["reference_us"])
        assert grouped_lora_kernel.SPEC.choose(*instance.call) == "reference"


def test_doctor_finds_an_error_that_small_inputs_do_not_show(remembered, monkeypatch):
    instance = grouped_lora_kernel.instances()[0]
    with emulation("metal", orders=("forward",)):
        wrong = replace(instance.checks("metal")[1], kernel=lambda *v: [y + 1 for y in v[1:4]])
        result = diagnostics.examine_kernel(with_workload(instance, lambda *_: wrong))
        assert not result["ok"] and result["choice"] is None
        assert _backend.measured("metal", (instance.op, *instance.call)) is None


def test_a_rank_beyond_a_launch_is_left_to_plain_mlx():
    with emulation("metal") as built, dispatch.backend("metal"):
        x, y = mx.ones((3, 80)), mx.ones((3, 96))
        grouped_lora.grouped_lora(x, [y], [mx.ones((80, 65))], [mx.ones((65, 96))], [1.0])
        assert not built


def test_examine_finds_a_wrong_value_a_wrong_gradient_and_a_nan():
    x = mx.random.normal((4, 8))

    def right(v):
        return [v * 2]

    @mx.custom_function
    def wrong_gradient(v):
        return v * 2

    @wrong_gradient.vjp
    def _(primals, cotangent, output):
        return cotangent

    cases = {
        "output 0": lambda v: [mx.where(v == x[0, 0], 0, v * 2)],
        "gradient 0": lambda v: [wrong_gradient(v)],
        "off by nan": lambda v: [v * 2 + mx.array(float("nan"))],
    }
    for text, op in cases.items():
        for exact in (True, False):
            assert text in examine(Check("case", op, right, [x], exact)).fault
    assert examine(Check("case", right, right, [x])).fault is None
