"""Command buffers of a Mac: how long they are by the estimate, what keeps them short, and the messages."""

import os
from dataclasses import replace

import pytest

from mlx_packs import TrainConfig, runtime
from mlx_packs.chips import chip
from mlx_packs.memory import command_buffers
from mlx_packs.memory.command_buffers import (
    VARIABLE,
    Operation,
    chip_named,
    default_limits,
    limit_command_buffers,
    longest_seconds,
    plan_buffers,
)
from mlx_packs.nn import blocks
from mlx_packs.ops import attention as attention_module
from mlx_packs.ops.attention import mlx_attention
from mlx_packs.ops.watchdog import LONGEST_S, AttentionSizes, attention_calls, attention_seconds
from mlx_packs.runtime import mx
from tests.helpers.headers import dense_headers, write_headers
from tests.helpers.interpreter import run_python
from tests.helpers.models import base_of
from tests.helpers.runs import Lines

M1 = chip("Apple M1")


def planned(base: str, batch_size: int, length: int, chip_name: str = "Apple M1", **more):
    """The command buffers of QLoRA on full batches."""
    train = TrainConfig(
        batch_size=batch_size, max_seq_length=length + 1, quantize="affine4", **more
    )
    with runtime.assumed_device("gpu"):
        return plan_buffers(dense_headers(base), train, chip(chip_name))


@pytest.mark.parametrize(
    ("base", "batch_size", "length", "before", "limit", "calls"),
    [
        ("qwen3-4b", 1, 2048, 0.23, None, (1, 1)),
        ("qwen3-4b", 1, 32768, 14.1, 0, (16, 2)),
        ("qwen3-8b", 4, 2048, 0.92, None, (1, 1)),
        ("qwen3-8b", 1, 32768, 14.1, 0, (16, 4)),
    ],
)
def test_buffers_of_an_m1_are_about_a_second(base, batch_size, length, before, limit, calls):
    result = planned(base, batch_size, length)
    assert result.before_s == pytest.approx(before, rel=0.05)
    assert result.after_s < 1.25 * LONGEST_S
    assert (result.limit, result.calls) == (limit, calls)
    assert bool(result.line()) == (before > 1.25)


def test_half_precision_is_faster_where_bfloat16_is_emulated():
    slow, fast = (planned("qwen3-8b", 4, 2048, compute_dtype=d) for d in ("auto", "float16"))
    assert slow.longest.seconds == pytest.approx(1.8 * fast.longest.seconds)


def test_a_fast_chip_keeps_the_limits_of_mlx():
    result = planned("qwen3-4b", 1, 32768, "Apple M3 Max")
    assert result.limit is None and result.calls == (4, 1) and result.after_s < 1
    assert "MAX_OPS" not in result.line() and "attention in 4 calls" in result.line()


def test_a_buffer_ends_after_operations_or_numbers():
    ones = [Operation("one", 1.0, 10.0)] * 8
    assert longest_seconds(ones, 2, 1e9) == 3.0  # MLX ends one with more than 2
    assert longest_seconds(ones, 99, 35.0) == 4.0
    assert longest_seconds(ones, 0, 1e9) == 1.0


def test_limits_are_those_of_mlx():
    assert default_limits("Apple M1") == (40, 40 << 20)
    assert default_limits("Apple M4 Max") == (50, 50 << 20)
    assert chip_named("Apple M9 Mega").name == "Apple M1"


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 2])
def test_attention_in_calls_is_attention(kv_heads, rows, monkeypatch):
    q = mx.random.normal((rows, 4, 16, 8))
    k, v = (mx.random.normal((rows, kv_heads, 16, 8)) for _ in range(2))
    weight = mx.random.normal(q.shape)

    def results():
        def loss(*arrays):
            return (mlx_attention(*arrays, 0.3, "causal") * weight).sum()

        return mx.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)

    expected, gradients = results()
    sizes = AttentionSizes(rows, 4, kv_heads, 16, 8)
    slow = replace(M1, matrix_tflops=attention_seconds(sizes, M1) * M1.matrix_tflops / 100)
    assert attention_calls(sizes, slow) == (rows, 4)
    monkeypatch.setattr(attention_module, "watched_chip", lambda: slow)
    value, of_parts = results()
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    for a, b in zip(of_parts, gradients, strict=True):
        assert mx.allclose(a, b, atol=1e-5).item()


def test_a_feed_forward_in_calls_is_the_same(monkeypatch):
    attached_mlp = blocks.GroupedMLP(base_of("qwen3").model.layers[0].mlp, None, None)
    x = mx.random.normal((2, 21, 64))
    attached_mlp.train()
    expected = attached_mlp(x)
    slow = replace(M1, matrix_tflops=3e-7)
    monkeypatch.setattr(blocks, "watched_chip", lambda: slow)
    assert 1 < len(attached_mlp._ends(x)) < 21
    assert mx.allclose(attached_mlp(x), expected, atol=1e-5).item()
    attached_mlp.eval()
    assert attached_mlp._ends(x) == []


@pytest.fixture
def mac(tmp_path, monkeypatch):
    """An M1 whose MLX has not been used; what a run on a base says."""
    monkeypatch.setattr(runtime, "_assumed", "gpu")
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(runtime, "processor_name", lambda: "Apple M1")
    monkeypatch.setattr(mx, "get_peak_memory", lambda: 0)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))

    def lines_of(length: int, base=None) -> list[str]:
        train = TrainConfig(batch_size=1, max_seq_length=length + 1, quantize="affine4")
        display = Lines()
        base = base or write_headers(tmp_path / "base", dense_headers("qwen3-4b"))
        limit_command_buffers(base, train, display)
        return display.lines

    return lines_of


def test_a_run_on_long_rows_sets_the_limit_and_says_so_once(mac):
    (line,) = mac(32768)
    assert os.environ[VARIABLE] == "0"
    assert line.startswith("gpu 0.9 s of work at once, 14 s if undivided (estimate, Apple M1)")
    assert f"{VARIABLE}=0 · attention in 16 calls" in line and "Python" not in line


def test_a_run_on_short_rows_changes_and_says_nothing(mac):
    assert mac(2048) == [] and VARIABLE not in os.environ


def test_a_limit_of_the_user_stands(mac):
    os.environ[VARIABLE] = "200"
    (line,) = mac(32768)
    assert os.environ[VARIABLE] == "200" and VARIABLE not in line


def test_a_process_that_used_the_gpu_is_told_so(mac, monkeypatch):
    monkeypatch.setattr(mx, "get_peak_memory", lambda: 1)
    assert "when Python starts" in mac(32768)[0]


def test_families_without_a_formula_and_cpus_are_left_alone(mac, tmp_path, monkeypatch):
    assert mac(32768, base_of("gpt2")) == []
    monkeypatch.setattr(command_buffers, "plan_buffers", None)
    with runtime.assumed_device("cpu"):
        assert mac(32768, tmp_path / "nowhere") == []


def test_nothing_is_allocated_before_a_run_begins():
    code = (
        "import sys, mlx_packs.cli.train, mlx_packs.training.run; from mlx_packs.runtime import mx; "
        "print(mx.get_peak_memory(), 'mlx_lm.generate' in sys.modules)"
    )
    assert run_python(code, MLX_PACKS_BLAS="off") == "0 False"
