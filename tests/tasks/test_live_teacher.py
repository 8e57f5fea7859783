"""A teacher beside the student: as a cache of all tokens, and on the student's own completions."""

import json
import shutil

import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_packs import DataConfig, Pack, TrainConfig, train_pack
from mlx_packs.config.recipe import Recipe
from mlx_packs.data.teacher_cache import TEACHER_ARRAYS
from mlx_packs.display import QUIET, Display
from mlx_packs.memory.estimate import estimate
from mlx_packs.memory.headers import Headers
from mlx_packs.memory.read import teacher_bytes
from mlx_packs.objectives.objective import arrays_of
from mlx_packs.packs.base import load_base
from mlx_packs.runtime import mx
from mlx_packs.tasks.teacher import Teacher, most_likely, write_teacher_cache
from tests.helpers.bases import saved_base, small_base
from tests.helpers.errors import raises
from tests.helpers.rows import write_rows
from tests.helpers.tasks import EncodedTask, interrupted
from tests.helpers.variants import slow_except
from tests.tasks.test_distill import LORA, SETTINGS, base_with, chats, settings, tensors_of

VOCABULARY = 4096
OWN = {"on_policy": 1.0, "max_completion_length": 6, "max_seq_length": 64}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rows = chats()
    return write_rows(tmp_path_factory.mktemp("data") / "d", train=rows[:16], valid=rows[16:])


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> str:
    """The folder of a small base with other weights than those of the students."""
    return saved_base(base_with(1), tmp_path_factory.mktemp("teacher") / "t")


def prepared(data, train: TrainConfig, seed: int = 2):
    """The objective of a student, its first batch, and that batch with what the step reads."""
    task = EncodedTask(base_with(seed), data, train, LORA)
    objective = task.bind()
    batch = next(task.data[0].train.batches())
    return task, batch, objective.prepare(batch)


def test_a_live_teacher_teaches_what_its_cache_does(tmp_path, data, teacher):
    recipe = Recipe(train=settings(), data=DataConfig(data=str(data)))
    whole = Teacher(load_base(teacher), None, VOCABULARY, 1.0)
    write_teacher_cache(whole, recipe, tmp_path / "c", False, Display(QUIET))
    for name, changes in (
        ("cached", {"teacher_cache": str(tmp_path / "c")}),
        ("live", {"teacher": teacher, "teacher_top_k": VOCABULARY}),
    ):
        run = train_pack(base_with(2), data, LORA, settings(**changes), tmp_path / name)

    ours, theirs = tensors_of(tmp_path / "live"), tensors_of(tmp_path / "cached")
    assert all(np.allclose(ours[n], theirs[n], atol=1e-5) for n in theirs)
    assert run.report["teacher_loss_after"] < run.report["teacher_loss_before"]
    manifest = Pack.open(tmp_path / "live").manifest
    assert manifest["objective"]["teacher"] == manifest["recipe"]["teacher"] == "t"


@pytest.mark.slow  # three runs
def test_a_teacher_writes_its_cache_once_and_a_run_reads_it(tmp_path, data, teacher):
    recipe = Recipe(train=settings(), data=DataConfig(data=str(data)))
    whole = Teacher(load_base(teacher), None, 32, 1.0)
    write_teacher_cache(whole, recipe, tmp_path / "c", False, Display(QUIET))
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
    wanted = [task.task.cache, task.task.live.name]
    assert wanted == [None, "t"]

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


@pytest.mark.slow
def test_completions_are_those_of_the_student_and_of_the_seed(data, teacher):
    def targets(seed: int = 2, **changes):
        _, _, made = prepared(data, settings(teacher=teacher, **OWN, **changes), seed)
        return made.inputs["targets"].tolist()

    assert targets() == targets()
    assert targets() != targets(seed=3)
    assert targets() != targets(temperature=9.0)


def test_a_share_of_the_batches_is_generated(data, teacher):
    task, batch, made = prepared(data, settings(teacher=teacher, **OWN | {"on_policy": 0.5}))
    on_policy = task.task.on_policy
    batches = task.data[0].train.batches()
    taken = [on_policy.takes(next(batches)) for _ in range(64)]
    assert 16 < sum(taken) < 48
    assert (made.inputs["targets"].tolist() != batch.inputs["targets"].tolist()) is taken[0]


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("top_k", slow_except([64, VOCABULARY], 64))
def test_pieces_of_a_taught_batch_add_up_to_it(data, teacher, share, top_k):
    own = OWN if share else {}
    train = settings(teacher=teacher, teacher_top_k=top_k, **own)
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


@pytest.mark.slow  # three runs, which generate
def test_a_resumed_run_is_bit_identical(tmp_path, data, teacher):
    train = settings(teacher=teacher, **OWN | {"on_policy": 0.5}, loss="reverse-kl")
    train_pack(base_with(2), data, LORA, train, tmp_path / "whole")
    cut = interrupted(tmp_path / "whole", tmp_path / "cut")
    train_pack(base_with(2), data, LORA, train, cut, resume=True)
    ours, theirs = tensors_of(tmp_path / "whole"), tensors_of(cut)
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)

    other = interrupted(tmp_path / "whole", tmp_path / "other")
    changed = settings(**OWN | {"on_policy": 0.5}, loss="reverse-kl", teacher="tiny")
    with raises("mismatch", "teacher"):
        train_pack(base_with(2), data, LORA, changed, other, resume=True)


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
