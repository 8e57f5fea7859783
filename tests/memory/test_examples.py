"""What `packs plan --data` reads of the examples, and their memory in a run."""

import json
import subprocess
import sys

import pytest

from benchmarks.data import write
from mlx_packs.config.recipe import resolve, tiny_recipe
from tests.helpers.rows import write_rows

# The most resident bytes over reading, encoding, one order of an epoch and some hundred batches.
MEASURED = """
import itertools, sys
from pathlib import Path
from benchmarks import alone
from mlx_packs.config.schema import DataConfig
from mlx_packs.data.batches import training_set
from mlx_packs.data.encoding import EncodingOptions, encode
from mlx_packs.data.rows import load_rows
from mlx_packs.data.sampler import Sampler
from mlx_packs.packs.base import load_base

base, config, options = load_base("tiny"), DataConfig(), EncodingOptions(max_seq_length=512)
encode(load_rows(config).rows["train"][:300], base.tokenizer, config, options)
before = alone.rss_bytes()
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
rows = load_rows(DataConfig(data=sys.argv[1])).rows
examples = [encode(rows[split], base.tokenizer, config, options) for split in ("train", "valid")]
sampler = Sampler(examples[0].lengths, 4, 511)
sampler.epoch(0)
for _ in itertools.islice(training_set(examples[0], sampler).batches(), 1000):
    pass
print(alone.peak_rss_bytes() - before)
"""


@pytest.mark.nightly(
    seconds=60
)  # 100 MB of text, beside which what is in memory at a time is small
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_examples_stay_on_disk(tmp_path):
    """One machine measured 101 to 172 MB in five runs: most is the tokenizer's working memory."""
    file = tmp_path / "train.jsonl"
    write(file, nbytes=100_000_000)
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(file)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout.splitlines()[-1]) < 190e6


def test_plan_is_for_the_lengths_of_the_examples(here, run):
    write(here / "d.jsonl", rows=300)
    with_rows = ("plan", "--data", "d.jsonl")
    code, out, _ = run(*with_rows)
    assert code == 0 and "d.jsonl · 285 training examples" in out

    batch_size = resolve(tiny_recipe()).train.batch_size
    best = json.loads(run(*with_rows, "--json")[1])["options"][0]
    assert f"planned for {batch_size} x {best['planned_length']} tokens" in out
    assert best["planned_length"] < best["max_seq_length"] and best["batch_size"] == batch_size
    code, out, _ = run("plan", "--data", "owner/name")
    assert code == 0 and "owner/name · is not read" in out


def test_plan_reads_other_columns_and_leaves_out_bad_rows(here, run):
    rows = [json.dumps({"question": f"q {n}", "answer": f"a {n}"}) for n in range(40)]
    (here / "d.jsonl").write_text("\n".join([*rows, *["{"] * 8]) + "\n")
    flags = ["--prompt-feature", "question", "--completion-feature", "answer"]
    flags += ["--on-bad-row", "skip"]
    assert run("plan", "--data", "d.jsonl", *flags[:4])[0] == 2
    code, out, _ = run("plan", "--data", "d.jsonl", *flags)
    assert code == 0 and out.rstrip().endswith(f"--data d.jsonl {' '.join(flags)}")


def test_plan_counts_what_share_prefix_computes(here, run):
    """Rows of which most is common."""
    text = " ".join(f"tide {i}" for i in range(40))
    rows = [{"text": f"{text} {i} {'and on ' * (i % 3)}"} for i in range(24)]
    write_rows(here / "d", train=rows)

    def planned(*arguments) -> dict:
        (best, *_) = json.loads(run("plan", "--json", "--batch-size", 8, *arguments)[1])["options"]
        return best

    data = ("--data", "d", "--matmul-path", "transient")
    whole, auto, on = (planned(*data, "--share-prefix", value) for value in ("off", "auto", "on"))
    assert on["peak_gb"] == auto["peak_gb"] < 0.8 * whole["peak_gb"]
    assert on["planned_length"] == whole["planned_length"]
    assert "--share-prefix on" in on["command"] and "--share-prefix off" in whole["command"]
    assert "--share-prefix" not in auto["command"]
