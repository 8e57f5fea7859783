"""Work on a Mac's GPU in several calls, and one operation a command buffer on long rows."""

import os

import pytest

from mlx_packs.nn import blocks
from mlx_packs.ops import attention as attention_module
from mlx_packs.ops import watchdog
from mlx_packs.ops.attention import mlx_attention
from mlx_packs.ops.watchdog import VARIABLE, attention_calls, limit_operations, product_calls
from mlx_packs.runtime import mx
from tests.helpers.comparison import all_close
from tests.helpers.interpreter import run_python
from tests.helpers.models import base_of
from tests.ops.cases import output_and_gradients


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

    def results():
        return output_and_gradients(lambda *a: mlx_attention(*a, 0.3, "causal"), [q, k, v])

    expected = results()
    monkeypatch.setattr(watchdog, "ATTENTION_OPERATIONS", 1e3)
    assert attention_calls(rows, 4, kv_heads, 16, 8) == (rows, 4)
    monkeypatch.setattr(attention_module, "is_watched", lambda: True)
    assert all_close(results(), expected, rtol=0, atol=1e-5)


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


@pytest.mark.parametrize(
    ("length", "has_metal", "peak", "users", "said", "value"),
    [
        (32768, True, 0, None, f"{VARIABLE}=0, since rows have more than 8,192 tokens", "0"),
        (8192, True, 0, None, "", None),
        (32768, False, 0, None, "", None),
        (32768, True, 0, "200", "", "200"),
        (32768, True, 1, None, "has to be in the environment when Python starts", "0"),
    ],
    ids=["long", "short", "no-metal", "of-the-user", "too-late"],
)
def test_long_rows_have_one_operation_a_buffer(
    length, has_metal, peak, users, said, value, monkeypatch
):
    monkeypatch.setattr(mx.metal, "is_available", lambda: has_metal)
    monkeypatch.setattr(mx, "get_peak_memory", lambda: peak)
    environment = {name: v for name, v in os.environ.items() if name != VARIABLE}
    monkeypatch.setattr(os, "environ", environment | ({VARIABLE: users} if users else {}))
    result = limit_operations(length)
    assert result == said or (peak and result.endswith(said))
    assert os.environ.get(VARIABLE) == value


def test_nothing_is_allocated_before_a_run_begins():
    code = (
        "import sys, mlx_packs.cli.train, mlx_packs.training.run; from mlx_packs.runtime import mx; "
        "print(mx.get_peak_memory(), 'mlx_lm.generate' in sys.modules)"
    )
    assert run_python(code, MLX_PACKS_BLAS="off") == "0 False"
