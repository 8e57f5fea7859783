"""Runs on what a teacher predicts: from its cache, or beside the student on its own completions."""

import json
import shutil

import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from mlx_packs import LoRAConfig, Pack, TrainConfig, train_pack
from mlx_packs.config.data import DataConfig
from mlx_packs.config.recipe import Recipe
from mlx_packs.data.teacher_cache import FACTS, TEACHER_ARRAYS
from mlx_packs.display import QUIET, Display
from mlx_packs.memory.estimate import estimate
from mlx_packs.memory.headers import Headers
from mlx_packs.memory.read import teacher_bytes
from mlx_packs.objectives.objective import arrays_of
from mlx_packs.packs.base import load_base
from mlx_packs.runtime import mx
from mlx_packs.tasks import teacher as writer
from mlx_packs.tasks.teacher import Teacher, most_likely, write_teacher_cache
from tests.helpers.bases import saved_base, small_base
from tests.helpers.errors import raises
from tests.helpers.rows import chat, write_rows
from tests.helpers.tasks import SHORT, EncodedTask, tensors_of

SETTINGS = SHORT | {"task": "distill", "iters": 6, "batch_size": 4, "max_seq_length": 48}
SETTINGS |= {"learning_rate": 5e-3, "steps_per_eval": 3}
LORA = LoRAConfig(rank=4)


def settings(**changes) -> TrainConfig:
    return TrainConfig(**(SETTINGS | changes))


def base_with(seed: int):
    """A base whose weights depend on the seed."""
    base = small_base()
    keys = iter(mx.random.split(mx.random.key(seed), 100))

    def moved(weight: mx.array) -> mx.array:
        return weight + 0.05 * mx.random.normal(weight.shape, key=next(keys))

    base.model.update(tree_map(moved, base.model.parameters()))
    return base


def cache_of(folder, data, top_k=32, base=None, **changes) -> None:
    train = settings(teacher_cache=str(folder), **changes)
    recipe = Recipe(train=train, data=DataConfig(data=str(data)))
    write_teacher_cache(Teacher(base or base_with(1), top_k), recipe, Display(QUIET))


def chats() -> list[dict]:
    return [chat(f"Say {i} times {i % 3}.", f"That is {i * (i % 3)}, I think.") for i in range(24)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rows = chats()
    folder = tmp_path_factory.mktemp("data") / "d"
    return write_rows(folder, train=rows[:16], valid=rows[16:])


@pytest.fixture(scope="module")
def cache(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("cache") / "c"
    cache_of(folder, data)
    return str(folder)


@pytest.mark.slow
def test_a_student_comes_nearer_to_its_teacher(tmp_path, data, cache):
    train = settings(teacher_cache=cache, iters=30, val_batches=0)
    run = train_pack(base_with(2), data, LORA, train, tmp_path / "p")
    report = run.report
    assert report["teacher_loss_after"] < 0.8 * report["teacher_loss_before"]

    manifest = Pack.open(tmp_path / "p").manifest
    assert manifest["recipe"]["teacher_cache"] == "c"
    expected = {"task": "distill", "teacher": "small", "top_k": 32, "loss": "forward-kl"}
    assert manifest["objective"].items() >= expected.items()


def test_validations_have_the_loss_that_is_trained(tmp_path, data, cache):
    train = settings(teacher_cache=cache, iters=4, loss="jsd", jsd_beta=0.2, ce_weight=0.1)
    run = train_pack(base_with(2), data, LORA, train, tmp_path / "p")
    (line,) = (line for line in run.curve if "valid_loss" in line)
    mixed = 0.9 * line["valid_teacher_loss"] + 0.1 * np.log(line["valid_ppl"])
    assert line["valid_loss"] == pytest.approx(mixed, rel=1e-5)


def test_a_run_is_resumed_with_its_own_cache_only(tmp_path, data, cache):
    """Which may have moved."""
    train = settings(teacher_cache=cache, iters=2, val_batches=0)
    train_pack(base_with(2), data, LORA, train, tmp_path / "p")
    shutil.copytree(cache, tmp_path / "moved")
    cache_of(tmp_path / "other", data, top_k=16)

    def resume(folder) -> None:
        longer = settings(teacher_cache=str(folder), iters=3, val_batches=0)
        train_pack(base_with(2), data, LORA, longer, tmp_path / "p", resume=True)

    with raises("mismatch", "teacher_cache"):
        resume(tmp_path / "other")
    resume(tmp_path / "moved")


def test_a_cache_is_continued_after_a_kill(tmp_path, data, cache, monkeypatch):
    """No shard is written twice, and all are as without an interruption."""
    monkeypatch.setattr("mlx_packs.data.teacher_cache._SHARD_BYTES", 10_000)
    cache_of(tmp_path / "whole", data)
    written = sorted((tmp_path / "whole").glob("*-*.npy"))
    assert len(written) > 3

    shard = writer._shard
    calls = []

    def killed(*args):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(args)
        return shard(*args)

    monkeypatch.setattr(writer, "_shard", killed)
    with pytest.raises(KeyboardInterrupt):
        cache_of(tmp_path / "cut", data)
    with raises("unreadable", "teacher_cache"):
        train = settings(teacher_cache=str(tmp_path / "cut"))
        EncodedTask(base_with(2), data, train, LORA)

    calls.clear()
    monkeypatch.setattr(writer, "_shard", lambda *args: calls.append(args) or shard(*args))
    cache_of(tmp_path / "cut", data)
    assert len(calls) == len(written) - 2
    for file in (tmp_path / "whole").glob("*.*"):
        assert file.read_bytes() == (tmp_path / "cut" / file.name).read_bytes()


def test_a_folder_of_something_else_is_no_cache(tmp_path, data, cache):
    copy = shutil.copytree(cache, tmp_path / "copy")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine").touch()
    (tmp_path / "file").touch()
    for folder, named in (
        ("copy", "another teacher"),
        ("other", "other files"),
        ("file", "a file"),
    ):
        with raises("exists", "teacher_cache", folder, named):
            cache_of(tmp_path / folder, data, 16)

    facts = json.loads((copy / FACTS).read_text())
    for change, length, code, named in (
        ({}, 24, "mismatch", "48"),
        ({"tokenizer": "0" * 64}, 48, "mismatch", "small"),
        ({"temperature": 2.0}, 48, "unreadable", "temperature must be 1"),
    ):
        (copy / FACTS).write_text(json.dumps(facts | change))
        train = settings(teacher_cache=str(copy), max_seq_length=length)
        with raises(code, "teacher_cache", named):
            EncodedTask(base_with(2), data, train, LORA)


def test_what_cannot_be_written_is_rejected(tmp_path, data, monkeypatch):
    with raises("conflict", "phases"):
        cache_of(tmp_path / "c", data, phases=[{"iters": 2}])
    assert not (tmp_path / "c").exists()
    monkeypatch.setattr(writer, "free_bytes", lambda path: 1000)
    with raises("unwritable", "teacher_cache"):
        cache_of(tmp_path / "c", data)
    assert not list((tmp_path / "c").iterdir())


OWN = {"on_policy": 1.0, "max_completion_length": 6, "max_seq_length": 64}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> str:
    """The folder of a small base with other weights than those of the students."""
    return saved_base(base_with(1), tmp_path_factory.mktemp("teacher") / "t")


def prepared(data, train: TrainConfig):
    """The objective of a student, its first batch, and that batch with what the step reads."""
    task = EncodedTask(base_with(2), data, train, LORA)
    objective = task.bind()
    batch = next(task.data[0].train.batches())
    return task, batch, objective.prepare(batch)


def test_a_live_teacher_teaches_what_its_cache_does(data, cache, teacher):
    losses = []
    for changes in ({"teacher_cache": cache}, {"teacher": teacher, "teacher_top_k": 32}):
        task = EncodedTask(base_with(2), data, settings(**changes), LORA)
        objective = task.bind()
        batch = objective.prepare(next(task.data[0].train.batches()))
        losses.append(np.array(objective.loss(arrays_of(batch), batch.layout)))
    assert np.allclose(*losses, rtol=1e-3)


@pytest.mark.slow  # three runs
def test_a_teacher_writes_its_cache_once_and_a_run_reads_it(tmp_path, data, teacher):
    cache_of(tmp_path / "c", data, 32, load_base(teacher))
    for name, changes in (
        ("reads", {"teacher_cache": str(tmp_path / "c")}),
        ("writes", {"teacher_cache": str(tmp_path / "w"), "teacher": teacher, "teacher_top_k": 32}),
    ):
        train_pack(base_with(2), data, LORA, settings(**changes), tmp_path / name)

    written = {file.name: file.read_bytes() for file in (tmp_path / "w").iterdir()}
    assert written == {file.name: file.read_bytes() for file in (tmp_path / "c").iterdir()}
    first, second = (tensors_of(tmp_path / name) for name in ("reads", "writes"))
    assert all(np.array_equal(first[n], second[n]) for n in second)
    recorded = Pack.open(tmp_path / "writes").manifest["recipe"]
    assert (recorded["teacher"], recorded["teacher_cache"]) == (None, "w")

    times = {file: file.stat().st_mtime_ns for file in (tmp_path / "w").iterdir()}
    longer = settings(**changes, iters=SETTINGS["iters"] + 1)
    train_pack(base_with(2), data, LORA, longer, tmp_path / "writes", resume=True)
    assert times == {file: file.stat().st_mtime_ns for file in (tmp_path / "w").iterdir()}


def test_the_student_completes_the_prompts_and_the_teacher_scores_it(data, teacher):
    task, batch, made = prepared(data, settings(teacher=teacher, **OWN))
    assert (task.task.cache, task.task.live.name) == (None, "t")

    teaching = load_base(teacher).model
    rows = made.inputs["tokens"]
    for row, i in enumerate(batch.examples):
        example = batch.source[i]
        prompt = example.tokens[: int(example.target.argmax())]
        assert np.array_equal(rows[row, : len(prompt)], prompt)

        own = made.inputs["owners"] == row
        targets = made.inputs["targets"][own]
        places = made.inputs["positions"][own] - row * rows.shape[1]
        assert 1 <= len(targets) <= 6 and places[0] == len(prompt) - 1
        whole = np.concatenate([prompt, targets])
        logits = teaching(mx.array(whole[None, :-1])).astype(mx.float32)[0]
        likely = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))[places]
        logprobs, rest, tokens = (np.array(made.inputs[name])[own] for name in TEACHER_ARRAYS)
        expected = np.take_along_axis(likely, tokens.astype(np.int64), axis=1)
        assert np.allclose(logprobs, expected, atol=1e-4)
        assert np.allclose(np.exp(rest) + np.exp(logprobs).sum(axis=1), 1, atol=1e-5)


def test_a_share_of_the_batches_is_generated(data, teacher):
    task, batch, made = prepared(data, settings(teacher=teacher, **OWN | {"on_policy": 0.5}))
    on_policy = task.task.on_policy
    batches = task.data[0].train.batches()
    taken = [on_policy.takes(next(batches)) for _ in range(64)]
    assert 16 < sum(taken) < 48
    assert (made.inputs["targets"].tolist() != batch.inputs["targets"].tolist()) is taken[0]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_pieces_of_a_taught_batch_add_up_to_it(data, teacher, share):
    own = OWN if share else {}
    train = settings(teacher=teacher, teacher_top_k=64, **own)
    task = EncodedTask(base_with(2), data, train, LORA)
    objective = task.bind()
    dataset = task.data[0].train
    made = objective.prepare(next(dataset.batches()))

    def loss(each):
        return np.array(objective.loss(arrays_of(each), each.layout))

    for parts in (2, 4):
        pieces = dataset.collate.split(made, parts)
        assert len(pieces) == parts and loss(made)[0] > 0.01
        assert np.allclose(sum(map(loss, pieces)), loss(made), rtol=1e-4)


def test_tokens_that_the_student_lacks_are_of_the_rest():
    logits = mx.random.normal((5, 96), key=mx.random.key(0))
    top = most_likely(logits, 8, known=64)
    likely = np.array(mx.softmax(logits, axis=-1))
    assert np.array(top["tokens"]).max() < 64
    chosen = np.sort(np.take_along_axis(likely, np.array(top["tokens"]), axis=1))
    assert np.allclose(chosen, np.sort(likely[:, :64])[:, -8:], rtol=1e-5)
    assert np.allclose(np.exp(np.array(top["rest"])), 1 - chosen.sum(axis=1), rtol=1e-4)

    every = most_likely(logits, 64, known=64)
    assert np.allclose(np.exp(np.array(every["rest"])), likely[:, 64:].sum(axis=1), rtol=1e-4)


def test_a_plan_counts_the_teacher(data, teacher):
    headers = Headers.of(small_base())
    alone = estimate(headers, LORA, settings(teacher_cache="c"))
    beside = estimate(headers, LORA, settings(teacher=teacher))
    weights = sum(w.size for _, w in tree_flatten(base_with(1).model.parameters()))
    assert beside.base - alone.base == teacher_bytes(teacher) == 4 * weights
    assert beside.peak_bytes - alone.peak_bytes == 4 * weights


def test_what_cannot_teach_is_one_line(tmp_path, data, teacher):
    def encode(rows=data, **changes):
        EncodedTask(base_with(2), rows, settings(**changes), LORA)

    with raises("not-found", "teacher", "missing"):
        encode(teacher=str(tmp_path / "missing"))
    with raises("invalid", "teacher_top_k", "4,096"):
        encode(teacher=teacher, teacher_top_k=5000)
    texts = write_rows(tmp_path / "texts", train=[{"text": "one two"}] * 8, valid=[{"text": "a b"}])
    with raises("data", "on_policy", "train.jsonl"):
        encode(texts, teacher=teacher, **OWN)

    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with raises("mismatch", "teacher", "another tokenizer"):
        encode(teacher=str(other))
