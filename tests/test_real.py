"""SmolLM2-135M-Instruct, Qwen2.5-Coder-0.5B and MiniLM on real data, as a user would train them.

Models and data are in a folder that MLX_PACKS_REAL names; docs/environment.md has its layout.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

from benchmarks.real import files, jobs, minilm, perplexity
from mlx_packs import TrainConfig, load_base, train_pack
from mlx_packs.files import CACHE_VARIABLE
from mlx_packs.inference.generate import chat_prompt, complete
from mlx_packs.packs.base import activated

pytestmark = pytest.mark.real

SEED = 0


def located(find, *names):
    """The path of a model or data set; the test is skipped, with what to do, where there is none."""
    try:
        return find(*names)
    except files.Missing as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", autouse=True)
def converted_once(tmp_path_factory, worker_id):
    """A cache that all processes of pytest-xdist share, so that a GGUF is converted by its first test."""
    folder = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        folder = folder.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(folder / "cache-of-real-models"))
        yield


@pytest.fixture(scope="module")
def smollm2():
    return located(files.smollm2)


@pytest.fixture(scope="module")
def qwen():
    return located(files.qwen)


@pytest.fixture(scope="module")
def real_data():
    return {name: located(files.data, name) for name in files.DATA}


def test_smollm2_answers_as_it_was_trained_to(smollm2):
    base = load_base(smollm2)
    prompt = chat_prompt(base, [{"role": "user", "content": "What is the capital of France?"}])
    with activated(base, None, "dense"):
        assert complete(base, prompt, 7) == "The capital of France is Paris."


def train(run, model, name: str, iters: int, batch_size: int) -> tuple[list[float], dict]:
    """Train in the current folder with `packs train`; the loss of each step, and the report."""
    jobs.write_rows(Path("d/train.jsonl"), jobs.read_rows(name, "train")[: batch_size * iters])
    jobs.write_rows(Path("d/test.jsonl"), jobs.read_rows(name, "test")[:4])
    settings = ["--iters", iters, "--batch-size", batch_size, "--learning-rate", "1e-3"]
    settings += ["--matmul-path", "dense", "--val-batches", 0, "--max-seq-length", 256]
    settings += ["--lr-schedule", "constant", "--steps-per-report", 1, "--metric", "none"]
    settings += ["--seed", SEED]
    code, out, err = run(
        "train", "--model", model, "--data", "d", "--out", "pack", "--json", *settings
    )
    assert code == 0, err

    lines = map(json.loads, Path("pack-run/metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line], json.loads(out)


def test_the_loss_falls_on_intents(smollm2, real_data, here, run):
    losses, report = train(run, smollm2, "banking77", 8, 4)
    assert losses[0] > 6
    assert np.mean(losses[-3:]) < 0.6 * losses[0]
    assert report["ppl_after"] < 0.5 * report["ppl_before"]


def test_perplexity_falls_on_summaries(smollm2, real_data, here, run):
    _, report = train(run, smollm2, "tldr", 3, 2)
    assert report["ppl_after"] < 0.9 * report["ppl_before"]


@pytest.mark.nightly(seconds=25)
def test_k_quants_of_qwen_stay_quantized_and_answer(qwen):
    base = load_base(qwen)
    assert "Q4_K and Q5_0 and Q8_0 exact, Q6_K 0.4" in base.summary()
    question = "Write a SQL query: names of customers older than 30, table customers(name, age)."
    prompt = chat_prompt(base, [{"role": "user", "content": f"{question} Only the query."}])
    with activated(base, None, "dense"):
        answer = complete(base, prompt, 12)
    assert answer == "SELECT name FROM customers WHERE age > 30"


@pytest.mark.nightly(seconds=25)
def test_perplexity_falls_on_k_quants_of_qwen(qwen, real_data, here, run):
    _, report = train(run, qwen, "tldr", 3, 1)
    assert report["ppl_after"] < report["ppl_before"]


@pytest.mark.nightly(seconds=50)
def test_minilm_puts_messages_of_one_intent_together(real_data, here):
    model = located(files.minilm)
    references = minilm.Messages.read("train").sample(400)
    queries = minilm.Messages.read("test").sample(300)
    jobs.write_rows(here / "d" / "train.jsonl", minilm.Messages.read("train").pairs(480, SEED))
    jobs.write_rows(here / "d" / "test.jsonl", minilm.Messages.read("valid").pairs(16, 0))
    base = load_base(model)

    def accuracy() -> float:
        vectors = [np.asarray(base.encode(each.texts)) for each in (references, queries)]
        return minilm.nearest_accuracy(vectors[0], references.intents, vectors[1], queries.intents)

    before = accuracy()
    train = TrainConfig(
        task="embedding",
        iters=30,
        batch_size=24,
        learning_rate=3e-4,
        lr_schedule="constant",
        val_batches=0,
        seed=SEED,
    )
    trained = train_pack(base, str(here / "d"), minilm.lora(), train, here / "pack")
    with base.applied(trained.pack):
        after = accuracy()
    assert after > before + 0.02


@pytest.mark.nightly(seconds=40)
def test_perplexity_grows_with_the_error_of_a_format(smollm2, real_data):
    with tempfile.TemporaryDirectory() as folder:  # 1 GB
        dense = jobs.write_dense(smollm2, Path(folder) / "dense")
        results = perplexity.measure(dense, Path(folder), 8)
    _, groups_of_32, groups_of_64, nf4 = (result["ppl"] for result in results.values())
    # the weights lie on a 4-bit grid with groups of 32 already, which MLX moves before it rounds
    assert results[perplexity.DENSE]["ppl"] < min(groups_of_32, nf4)
    assert groups_of_32 < groups_of_64
