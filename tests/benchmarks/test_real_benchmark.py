"""The parts of `python -m benchmarks real` that need no real model."""

import json

import pytest

from benchmarks.real import command, jobs
from mlx_packs import load_base
from mlx_packs.bases.files import tiny_checkpoint
from mlx_packs.runtime import mx
from tests.helpers.rows import chat


def test_trainers_with_other_first_losses_are_not_compared():
    entries = [
        {
            "part": "tldr",
            "size": "2x2",
            "seed": 0,
            "trainer": name,
            "turns": [{"losses": [loss, 1.0]}],
        }
        for name, loss in (("mlx_packs", 3.0), ("PEFT", 3.0001), ("PEFT", 3.1))
    ]
    command.check_first_losses(entries[:2])
    with pytest.raises(command.Disagreement, match=r"PEFT is 3\.1000, of mlx_packs 3\.0000"):
        command.check_first_losses(entries)


def test_a_job_has_the_batches_of_our_sampler_and_dense_weights_are_the_same(tmp_path, monkeypatch):
    chats = [chat(f"number {i}", "x" * (i + 1)) for i in range(8)]
    monkeypatch.setattr(jobs, "read_rows", lambda data, split: chats)
    part = jobs.Part("banking77", 2, 3, 64, 2)
    model = tiny_checkpoint()
    job = jobs.prepare(part, "banking77", 1, 2, model, tmp_path)
    assert jobs.prepare(part, "banking77", 1, 2, model, tmp_path) == job
    batches = job.batches
    assert [len(batch) for batch in batches] == [2, 2, 2]
    assert len({json.dumps(row) for batch in batches for row in batch}) == 6
    assert all(0 < first < len(tokens) for batch in batches for tokens, first in batch)

    dense = load_base(jobs.write_dense(model, tmp_path / "dense"))
    tokens = mx.array([batches[0][0][0]])
    expected = load_base(model).model(tokens)
    assert mx.abs(dense.model(tokens) - expected).max().item() < 1e-3
    assert isinstance(job, jobs.Job) and not dense.quantization
