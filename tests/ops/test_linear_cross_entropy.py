"""Cross-entropy by slices of the vocabulary against all logits, values and gradients."""

import math
from dataclasses import replace

import mlx.nn as nn
import pytest

from mlx_packs.cpu.profile import CPU
from mlx_packs.nn.quantized import HalfLinear, TransientEmbedding, TransientLinear
from mlx_packs.objectives.causal_lm import frozen_head
from mlx_packs.ops import linear_cross_entropy as op
from mlx_packs.ops.linear_cross_entropy import (
    columns,
    cross_entropy,
    linear_cross_entropy,
    linear_logits,
)
from mlx_packs.ops.profile import GPU, forced_profile
from mlx_packs.runtime import mx
from tests.helpers.memory import peak_bytes
from tests.helpers.models import nf4_embedding
from tests.helpers.variants import slow_except

VOCABULARY = 150  # does not divide into slices


def heads() -> dict:
    """Frozen heads of 64 columns, and the call that gives the logits of each."""
    linear, biased = (nn.Linear(64, VOCABULARY, bias=bias) for bias in (False, True))
    half = HalfLinear(linear.weight.astype(mx.float16), None)
    quantized = nn.QuantizedLinear.from_linear(biased, 32, 4)
    table = nn.QuantizedEmbedding.from_embedding(nn.Embedding(VOCABULARY, 64), 32, 4)
    nf4 = nf4_embedding(nn.Embedding(VOCABULARY, 64))
    mxfp4 = nn.QuantizedLinear.from_linear(linear, 32, 4, mode="mxfp4")

    return {
        "linear": (linear, linear),
        "half": (half, half),
        "quantized": (quantized, quantized),
        "tied": (table, table.as_linear),
        "nf4": (nf4, nf4.as_linear),
        "mxfp4": (mxfp4, mxfp4),
        "transient": (TransientLinear(quantized), quantized),
        "transient_tied": (TransientEmbedding(table), table.as_linear),
    }


def in_small_slices(device):
    """A device that computes 40 columns of 33 rows at a time."""
    return forced_profile(replace(device, logit_bytes=4 * 33 * 40, least_columns=16))


@pytest.mark.parametrize(
    ("name", "z_loss", "smoothing"),
    [
        *((name, 1e-2, 0.1) for name in heads()),
        *(("linear", *s) for s in ((0, 0), (1e-2, 0), (0, 0.1))),
    ],
)
@pytest.mark.parametrize("device", [CPU, GPU], ids=["largest", "logsumexp"])
def test_linear_cross_entropy_by_slices_equals_that_of_all_logits(device, name, z_loss, smoothing):
    """By what the exponentials of logits are taken relative to."""
    layer, call = heads()[name]
    head = frozen_head(layer)
    states, targets = mx.random.normal((33, 64)) * 2, mx.random.randint(0, VOCABULARY, (33,))
    weight = mx.random.normal((33,))

    def sliced(h):
        return (linear_cross_entropy(h, targets, head, z_loss, smoothing)[0] * weight).sum()

    def of_all_logits(h):
        logits = call(h).astype(mx.float32)
        lse = mx.logsumexp(logits, axis=-1)
        own = mx.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
        spread = smoothing * (own - logits.mean(axis=-1))
        return ((lse - own + z_loss * lse**2 + spread) * weight).sum()

    with in_small_slices(device):
        assert columns(33, 64) == 40
        value, gradient = mx.value_and_grad(sliced)(states)
    expected, wanted = mx.value_and_grad(of_all_logits)(states)
    assert abs(value.item() - expected.item()) < 1e-4
    assert mx.allclose(gradient, wanted, atol=1e-5).item()
    by_logits = cross_entropy(call(states), targets, z_loss, smoothing)
    assert abs((by_logits * weight).sum().item() - expected.item()) < 1e-4


@pytest.mark.parametrize("rows", [1, 33, 100])
def test_linear_cross_entropy_hits_are_those_of_all_logits(rows):
    head = nn.Linear(64, VOCABULARY)
    states = mx.random.normal((rows, 64))
    targets = mx.where(mx.arange(rows) % 2 == 0, mx.argmax(head(states), axis=-1), 3)
    with in_small_slices(CPU):
        loss, hits = linear_cross_entropy(states, targets, frozen_head(head), gradient=False)
    assert mx.array_equal(hits, mx.argmax(head(states), axis=-1) == targets).item()
    assert mx.allclose(loss, cross_entropy(head(states), targets), atol=1e-5).item()


@pytest.mark.parametrize("name", heads())
def test_logits_of_some_tokens_are_those_of_all_logits(monkeypatch, name):
    """Of 10 rows at a time; values and gradients."""
    monkeypatch.setattr(op, "GATHERED_BYTES", 10 * 4 * 7 * 64)
    layer, call = heads()[name]
    states = mx.random.normal((33, 64))
    tokens = mx.random.randint(0, VOCABULARY, (33, 7))
    weight = mx.random.normal((33, 7))

    def chosen(h):
        return (linear_logits(h, tokens, frozen_head(layer)) * weight).sum()

    def of_all_logits(h):
        logits = mx.take_along_axis(call(h).astype(mx.float32), tokens, axis=-1)
        return (logits * weight).sum()

    value, gradient = mx.value_and_grad(chosen)(states)
    expected, wanted = mx.value_and_grad(of_all_logits)(states)
    assert abs(value.item() - expected.item()) < 1e-3
    assert mx.allclose(gradient, wanted, atol=1e-4).item()


@pytest.mark.parametrize("matmul_path", slow_except(["dense", "transient"], "transient"))
def test_linear_cross_entropy_never_holds_all_logits_or_the_dense_head(matmul_path):
    vocab, rows, width = 32768, 512, 256
    table = nn.Embedding(vocab, width)
    if matmul_path == "transient":
        table = TransientEmbedding(nn.QuantizedEmbedding.from_embedding(table))
    head = frozen_head(table)
    states, targets = mx.random.normal((rows, width)), mx.random.randint(0, vocab, (rows,))
    step = mx.value_and_grad(lambda h: linear_cross_entropy(h, targets, head)[0].sum())
    used = peak_bytes(lambda: step(states), table.parameters(), states, targets)
    assert used < vocab * rows * 4 / 2  # all logits; the dense head is half of that


def test_sums_of_half_precision_logits_are_float32(monkeypatch):
    """The mean logit of label smoothing: a sum in bfloat16 is off by a tenth of a unit."""
    # on a GPU it accumulates in float32, on a CPU in the dtype of the logits
    monkeypatch.setattr(mx.fast, "cross_entropy", cross_entropy)
    head = nn.Linear(64, VOCABULARY, bias=False)
    head.weight = head.weight * 8
    head.set_dtype(mx.bfloat16)
    head.freeze()
    targets = mx.random.randint(0, VOCABULARY, (33,))
    states = (mx.random.normal((33, 64)) * 2 + 1).astype(mx.bfloat16)
    with in_small_slices(GPU):
        loss, _ = linear_cross_entropy(states, targets, frozen_head(head), 0.0, 0.9)
    expected = cross_entropy(head(states), targets, 0.0, 0.9)
    assert mx.abs(loss - expected).max().item() < 5e-4


@pytest.fixture
def gpu():
    """As a GPU computes, here."""
    with forced_profile(GPU):
        yield


def test_small_gradients_of_float16_are_rounded_once_scaled(gpu):
    head = nn.Linear(64, VOCABULARY, bias=False)
    head.weight = (head.weight * 2.0**-20).astype(mx.float16)
    head.freeze()
    states, targets = mx.random.normal((33, 64)), mx.random.randint(0, VOCABULARY, (33,))
    gradients = []
    for dtype in (mx.float16, mx.float32):
        head.weight = head.weight.astype(dtype)

        def loss(h):
            return (linear_cross_entropy(h, targets, frozen_head(head))[0] * 2.0**20).sum()

        gradients.append(mx.grad(loss)(states.astype(dtype)).astype(mx.float32))
    half, full = gradients
    assert (mx.linalg.norm(half - full) / mx.linalg.norm(full)).item() < 0.01


def test_float16_keeps_a_long_tail_of_the_vocabulary(gpu, monkeypatch):
    """4,095 tokens of probability 2e-8 each, which float16 takes for zero."""
    # on a GPU it accumulates in float32
    monkeypatch.setattr(mx.fast, "cross_entropy", cross_entropy)
    head = nn.Linear(64, 4096, bias=False)
    rows = mx.zeros((4096, 64))
    rows[0, 0], rows[1:, 1] = 17.75, 1.0
    head.weight = rows.astype(mx.float16)
    head.freeze()
    states = mx.zeros((1, 64), mx.float16)
    states[0, 0] = 1.0

    def loss(h):
        return 2.0**7 * linear_cross_entropy(h, mx.array([0]), frozen_head(head))[0].sum()

    expected = 2.0**7 * 4095 * math.exp(-17.75)
    assert abs(mx.grad(loss)(states)[0, 1].item() / expected - 1) < 0.01
