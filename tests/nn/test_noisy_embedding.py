"""NEFTune's noise: of its size, in training alone, and repeatable."""

from dataclasses import replace

import mlx.nn as nn
import pytest

from mlx_packs import LoRAConfig, train_pack
from mlx_packs.nn.wrapped import NoisyEmbedding
from mlx_packs.runtime import mx
from tests.helpers import runs
from tests.helpers.bases import small_base
from tests.helpers.errors import raises
from tests.helpers.rows import CHATS, write_rows
from tests.helpers.variants import slow_except

ALPHA = 5.0
TRAIN = replace(runs.TRAIN, val_batches=0, test_batches=1, neftune_noise_alpha=ALPHA)


def test_noise_is_uniform_and_as_large_as_the_paper_has_it():
    embedding = nn.Embedding(100, 64)
    noisy = NoisyEmbedding(embedding, ALPHA)
    tokens = mx.random.randint(0, 100, (8, 200))
    noise = noisy(tokens) - embedding(tokens)
    most = ALPHA / (200 * 64) ** 0.5
    assert 0.99 * most < mx.abs(noise).max().item() <= most * (1 + 1e-4)
    assert abs(noise.mean().item()) < 0.01 * most
    assert noise.square().mean().item() == pytest.approx(most**2 / 3, rel=0.02)
    assert not mx.array_equal(noisy(tokens), noisy(tokens)).item()
    noisy.eval()
    assert mx.array_equal(noisy(tokens), embedding(tokens)).item()


@pytest.mark.parametrize("method", slow_except(["lora", "full"], "lora"))
def test_a_run_trains_with_noise_and_scores_without(method, tmp_path):
    rows = write_rows(tmp_path / "rows", train=CHATS, valid=CHATS)
    lora = LoRAConfig() if method == "full" else LoRAConfig(rank=4)
    losses, scores = [], []
    for alpha in (ALPHA, 0.0):
        train = replace(TRAIN, neftune_noise_alpha=alpha, method=method)
        run = train_pack(small_base(), rows, lora, train, tmp_path / f"p{alpha}")
        losses.append([line["loss"] for line in run.curve if "loss" in line])
        scores.append(run.report["ppl_before"])
    assert losses[0] != losses[1]
    assert scores[0] == scores[1]


def test_a_proxy_has_no_embeddings_to_add_noise_to():
    with raises("conflict", "neftune_noise_alpha", "projection-stack"):
        replace(TRAIN, objective="projection-stack")
