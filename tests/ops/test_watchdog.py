"""Work on a Mac's GPU in several calls, and one operation a command buffer on long rows."""

import os

import pytest

from mlx_packs.nn import blocks
from mlx_packs.ops import attention as attention_module
from mlx_packs.ops import watchdog
from mlx_packs.ops.attention import mlx_attention
from mlx_packs.ops.watchdog import VARIABLE, attention_calls, limit_operations, product_calls
from mlx_packs.runtime import mx
from tests.helpers.interpreter import run_python
from tests.helpers.models import base_of


@pytest.mark.parametrize(
    ("rows", "length", "hidden", "ffn", "calls"),
    [
        (1, 2048, 2560, 9728, (1, 1, 1)),
        (1, 32768, 2560, 9728, (1, 16, 2)),
        (4, 2048, 4096, 12288, (1, 1, 1)),
        (1, 32768, 4096, 12288, (1, 16, 4)),
        (4, 16384, 4096, 12288, (4, 4, 8)),
    ],
)
def test_calls_take_an_m1_about_a_second(rows, length, hidden, ffn, calls):
    assert (
        *attention_calls(rows, 32, 8, length, 128),
        product_calls(rows * length, ffn, hidden),
    ) == calls


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
    monkeypatch.setattr(watchdog, "ATTENTION_OPERATIONS", 1e3)
    assert attention_calls(rows, 4, kv_heads, 16, 8) == (rows, 4)
    monkeypatch.setattr(attention_module, "is_watched", lambda: True)
    value, of_parts = results()
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    for a, b in zip(of_parts, gradients, strict=True):
        assert mx.allclose(a, b, atol=1e-5).item()


def test_a_feed_forward_in_calls_is_the_same(monkeypatch):
    attached_mlp = blocks.GroupedMLP(base_of("qwen3").model.layers[0].mlp, None, None)
    x = mx.random.normal((2, 21, 64))
    attached_mlp.train()
    expected = attached_mlp(x)
    monkeypatch.setattr(watchdog, "PRODUCT_OPERATIONS", 1e5)
    monkeypatch.setattr(blocks, "is_watched", lambda: True)
    assert 1 < len(attached_mlp._ends(x)) < 21
    assert mx.allclose(attached_mlp(x), expected, atol=1e-5).item()
    attached_mlp.eval()
    assert attached_mlp._ends(x) == []


@pytest.fixture
def mac(monkeypatch):
    """A Mac whose MLX has not been used."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "get_peak_memory", lambda: 0)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop(VARIABLE, None)


def test_long_rows_have_one_operation_a_buffer(mac):
    assert limit_operations(32768) == f"{VARIABLE}=0, since rows have more than 8,192 tokens"
    assert os.environ[VARIABLE] == "0"


def test_short_rows_and_machines_without_metal_change_nothing(mac, monkeypatch):
    assert limit_operations(8192) == ""
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    assert limit_operations(32768) == "" and VARIABLE not in os.environ


def test_a_limit_of_the_user_stands(mac):
    os.environ[VARIABLE] = "200"
    assert limit_operations(32768) == "" and os.environ[VARIABLE] == "200"


def test_a_process_that_used_the_gpu_is_told_so(mac, monkeypatch):
    monkeypatch.setattr(mx, "get_peak_memory", lambda: 1)
    assert limit_operations(32768).endswith("has to be in the environment when Python starts")


def test_nothing_is_allocated_before_a_run_begins():
    code = (
        "import sys, mlx_packs.cli.train, mlx_packs.training.run; from mlx_packs.runtime import mx; "
        "print(mx.get_peak_memory(), 'mlx_lm.generate' in sys.modules)"
    )
    assert run_python(code, MLX_PACKS_BLAS="off") == "0 False"
