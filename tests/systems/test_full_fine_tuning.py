"""ADR-002's baseline: full fine-tuning in float32, from the command line."""

import json

import pytest

from tests.helpers.errors import check
from tests.helpers.rows import chat, write_rows

pytestmark = pytest.mark.systems


@pytest.mark.slow
def test_full_fine_tuning_is_a_baseline_with_its_share_of_weights(run, tmp_path):
    rows = [chat(f"Say {word}.", f"{word}, I say, {word}.") for word in "yes no one two".split()]
    data = write_rows(tmp_path / "d", train=rows, valid=rows[:2])
    how = (
        "--matmul-path dense --iters 4 --batch-size 2 --val-batches 0 --max-seq-length 48 --json -v"
    )
    reports = {}
    for method in ("lora", "full"):
        where = ("--data", data, "--method", method, "--out", tmp_path / method)
        code, out, err = run("train", *where, *how.split())
        assert code == 0, err
        reports[method] = json.loads(out)
        assert "% of 6.6 M)" in err
    assert reports["full"]["trainable_parameters"] == reports["full"]["base_weights"] == 6_557_696
    assert reports["lora"]["trainable_parameters"] < 0.1 * reports["lora"]["base_weights"]
    assert reports["full"]["ppl_after"] < 0.5 * reports["full"]["ppl_before"]

    pack, held_out = tmp_path / "full", ("--data", data / "valid.jsonl", "--json")
    assert json.loads((pack / "pack.json").read_text())["method"] == "full"
    _, out, _ = run("eval", pack, *held_out)
    assert json.loads(out)["pack"]["ppl"] == pytest.approx(reports["full"]["ppl_after"], rel=1e-4)
    dense = ("--model", "tiny", "--out", tmp_path / "merged", "--requantize", "none")
    code, out, _ = run("merge", pack, *dense, *held_out)
    assert code == 0 and json.loads(out)["passed"]
    assert run("train", "--method", "full", "--data", data, "--out", tmp_path / "x")[0] == 2
    check(run.error, "conflict", "method", "--matmul-path dense")
