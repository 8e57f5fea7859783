"""Plans of rerankers, embedders, classifiers and students beside the measured peaks of their runs."""

from dataclasses import replace
from pathlib import Path

import pytest

from mlx_packs import LoRAConfig, TrainConfig, train_pack
from mlx_packs.memory.estimate import estimate
from mlx_packs.memory.headers import Headers
from mlx_packs.memory.plan import ERROR
from tests.helpers.decoder_embedders import write_reranker
from tests.helpers.encoders import (
    MODERN,
    all_pairs,
    all_rankings,
    all_triplets,
    write_encoder,
    write_pairs,
)
from tests.helpers.memory import active_bytes
from tests.helpers.models import base_of
from tests.helpers.variants import slow_except

RUNS = 3  # at most: some reach a peak that is a tenth lower
SIZES = {"hidden_size": 192, "num_hidden_layers": 3, "intermediate_size": 512, "head_dim": 48}
BOUNDS = {"iters": 2, "batch_size": 4, "max_seq_length": 128, "matmul_path": "dense"}
BOUNDS |= {"val_batches": 0, "recompute": "none", "test_batches": 1}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> Path:
    return write_reranker(tmp_path_factory.mktemp("decoder") / "base", **SIZES)


def longer(rows: list[dict], times: int) -> list[dict]:
    """Rows whose texts are repeated, so that all are as long as a run reads them."""

    def repeated(value: str | list) -> str | list:
        if isinstance(value, list):
            return [repeated(text) for text in value]
        return f"{value} " * times

    return [{name: repeated(value) for name, value in row.items()} for row in rows]


def labels(count: int) -> list[dict]:
    rows = [{"text": f"text {i} " * 9, "label": f"label {i}"} for i in range(count)]
    return rows + [{"text": "again", "label": "label 0"}] * 44


WIDE = {"hidden_size": 192, "num_hidden_layers": 4, "intermediate_size": 768}
WIDE |= {"num_attention_heads": 6, "max_position_embeddings": 512}
ENCODERS = {  # tokens and sizes
    "recomputed blocks of an encoder": (64, WIDE),
    "two blocks of four of an encoder": (128, WIDE),
    "ModernBERT by parts": (64, {**MODERN, **WIDE, "intermediate_size": 512}),
}
PARTS = {"batch_size": 16, "loss": "cached-mnrl"}
KINDS = {
    "reranker of the LM head": ("rerank", longer(all_rankings(3), 4), {}),
    "reranker with a head": ("rerank", longer(all_rankings(3), 4), {"head": "score"}),
    "4 pairs": ("embedding", longer(all_pairs(), 20), {}),
    "24 pairs": ("embedding", longer(all_pairs(), 20), {"batch_size": 24}),
    "triplets": ("embedding", longer(all_triplets(), 20), {"batch_size": 8}),
    "pairs by parts": ("embedding", longer(all_pairs(), 20), PARTS | {"mini_batch_size": 4}),
    "classifier of 4,000 labels": ("classify", labels(4000), {}),
    "recomputed blocks of an encoder": (
        "embedding",
        longer(all_pairs(), 60),
        {"recompute": "block"},
    ),
    "two blocks of four of an encoder": ("embedding", longer(all_pairs(), 60), {}),
    "ModernBERT by parts": ("embedding", longer(all_pairs(), 60), PARTS | {"mini_batch_size": 8}),
}


@pytest.mark.parametrize("kind", slow_except(KINDS, "classifier of 4,000 labels"))  # seconds each
def test_plan_is_close_to_the_measured_peak(decoder, tmp_path, kind):
    task, rows, changes = KINDS[kind]
    base, length = decoder, BOUNDS["max_seq_length"]
    if kind in ENCODERS:
        length, sizes = ENCODERS[kind]
        base = write_encoder(tmp_path / "base", max_seq_length=length, **sizes)
    data = write_pairs(tmp_path / "rows", rows)
    train = TrainConfig(task=task, **(BOUNDS | {"max_seq_length": length} | changes))
    lora = LoRAConfig(rank=8, num_layers=2 if kind.startswith("two blocks") else -1)
    held = active_bytes() / 1e9  # by earlier tests

    peaks: list[float] = []
    for number in range(RUNS):
        report = train_pack(base, str(data), lora, train, tmp_path / f"p{number}").report
        planned = report["plan_peak_gb"]
        peaks.append(report["peak_gb"] - held)
        if planned <= (1 + ERROR) * max(peaks):
            break

    assert planned == pytest.approx(max(peaks), rel=ERROR)


def test_plan_counts_the_rows_of_a_head_and_the_tokens_of_a_teacher():
    headers = Headers.of(base_of("qwen3"))
    lora = LoRAConfig()

    def planned(train: TrainConfig, **facts) -> int:
        plan = estimate(replace(headers, **facts), lora, train)
        return plan.peak_bytes

    classify = TrainConfig(task="classify")
    more = planned(classify, outputs=10_000) - planned(classify, outputs=2)
    assert more >= 4 * 9_998 * 64 * 4  # weight, gradient, two moments

    distill = TrainConfig(task="distill", teacher_cache="t")
    by_tokens = [planned(distill, teacher_tokens=k) for k in (1, 64, 512)]
    assert by_tokens[0] < by_tokens[1] < by_tokens[2]
    assert planned(distill) == by_tokens[1]
