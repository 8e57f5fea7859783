"""The parts of `python -m benchmarks real` that need no real model."""

import json

import pytest

from benchmarks.real import command, files, jobs, results
from mlx_packs import load_base
from mlx_packs.bases.files import tiny_checkpoint
from mlx_packs.runtime import mx
from tests.helpers.rows import chat


def entry(trainer: str, seed: int = 0, loss: float = 3.0, share: float = 0.5) -> dict:
    step = {"losses": [loss, 1.0], "seconds": 4.0, "cpu_seconds": 6.0, "peak_bytes": 2_000_000_000}
    answers = {"before": {"share": 0.0}, "after": {"share": share, "se": 0.05}}
    score = {"base": {"ppl": 100.0}, "pack": {"ppl": 2.0}, "answers": answers}
    return {
        "part": "banking77", "size": "2x2", "seed": seed, "trainer": trainer,
        "turns": [step], "score": score,
    }  # fmt: skip


def test_results_are_kept_between_runs_and_become_a_table_and_records(tmp_path):
    kept = results.Results(tmp_path)
    for seed, share in enumerate((0.4, 0.6)):
        kept.add(entry("mlx_packs", seed, share=share))
        kept.add(entry("PEFT", seed, share=share))

    again = results.Results(tmp_path)
    assert again.get("banking77", "2x2", 1, "PEFT") is not None
    assert again.get("banking77", "2x3", 1, "PEFT") is None

    by_trainer = again.select("banking77", "2x2", [0, 1])
    shown = results.table(by_trainer)
    assert "| mlx_packs | 0 → 50 ± 14 | 100 → 2 ± 0 | 2.00 | 3.00 | 2.00 | 2 |" in shown

    built = results.records("banking77", "2 x 2", by_trainer, "PEFT", "note")
    ours = {(r.metric, r.unit): r for r in built if r.implementation == "mlx_packs"}
    assert ours["exact answers after", "%"].p50 == 50 and ours["step", "s"].ratio == 1
    assert ours["peak of the process", "GB"].p50 == 2

    (alone, *_) = results.records("banking77", "2 x 2", by_trainer, "mlx-lm", "note")
    assert alone.baseline == "PEFT"  # the first, since mlx-lm was left out


def test_trainers_with_other_first_losses_are_not_compared():
    command.check_first_losses([entry("mlx_packs"), entry("PEFT", loss=3.0001)])
    with pytest.raises(command.Disagreement, match=r"PEFT is 3\.1000, of mlx_packs 3\.0000"):
        command.check_first_losses([entry("mlx_packs"), entry("PEFT", loss=3.1)])


def test_what_is_missing_is_named_with_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(files.VARIABLE, str(tmp_path))
    for find in (files.smollm2, files.qwen, files.minilm, lambda: files.data("tldr")):
        with pytest.raises(files.Missing, match="python -m benchmarks.real.files"):
            find()
    assert command.main(["--work", str(tmp_path / "work"), "--part", "perplexity"]) == 2
    assert str(tmp_path) in capsys.readouterr().err


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
