"""Runs on what a teacher predicts: the cache is written, read, checked, and taught from."""

import json
import shutil

import numpy as np
import pytest
from mlx.utils import tree_map

from mlx_packs import LoRAConfig, Pack, TrainConfig, train_pack
from mlx_packs.config.data import DataConfig
from mlx_packs.config.recipe import Recipe
from mlx_packs.data.teacher_cache import FACTS, TeacherCache
from mlx_packs.display import QUIET, Display
from mlx_packs.objectives.objective import arrays_of
from mlx_packs.runtime import mx
from mlx_packs.tasks import teacher as writer
from mlx_packs.tasks.teacher import Teacher, write_teacher_cache
from tests.helpers.bases import small_base
from tests.helpers.errors import raises
from tests.helpers.rows import chat, write_rows
from tests.helpers.tasks import EncodedTask

SETTINGS = {
    "task": "distill",
    "iters": 6,
    "batch_size": 4,
    "max_seq_length": 48,
    "matmul_path": "dense",
    "learning_rate": 5e-3,
    "lr_schedule": "constant",
    "save_every": 2,
    "steps_per_report": 1,
    "steps_per_eval": 3,
}
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


def cache_of(folder, data, top_k=32, base=None, **changes):
    teacher = Teacher(base or base_with(1), None, top_k, changes.pop("temperature", 1.0))
    recipe = Recipe(train=settings(**changes), data=DataConfig(data=str(data)))
    return write_teacher_cache(teacher, recipe, folder, False, Display(QUIET))


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


def tensors_of(folder) -> dict[str, np.ndarray]:
    return {n: np.array(t) for n, t in mx.load(str(folder / "adapters.safetensors")).items()}


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


def test_a_teacher_has_nothing_to_teach_itself(tmp_path, data, cache):
    train = settings(teacher_cache=cache, iters=1, val_batches=0)
    report = train_pack(base_with(1), data, LORA, train, tmp_path / "p").report
    assert abs(report["teacher_loss_before"]) < 1e-5


@pytest.mark.parametrize("changes", [{"packing": True}, {"loss_on": "all"}])
def test_pieces_of_a_batch_add_up_to_it(data, cache, tmp_path, changes):
    if "loss_on" in changes:
        cache = str(tmp_path / "c")
        cache_of(tmp_path / "c", data, **changes)
    task = EncodedTask(base_with(2), data, settings(teacher_cache=cache, **changes), LORA)
    objective = task.bind()
    train = task.data[0].train
    batch = next(train.batches())
    pieces = train.collate.split(batch, 2)
    assert len(pieces) == 2

    def loss(each):
        return np.array(objective.loss(arrays_of(each), each.layout))

    assert np.allclose(sum(map(loss, pieces)), loss(batch), rtol=1e-5)


@pytest.mark.slow  # two runs
def test_cached_frozen_activations_change_nothing(tmp_path, data, cache):
    lora = LoRAConfig(rank=4, num_layers=1)
    for cached in ("on", "off"):
        train = settings(teacher_cache=cache, cache_frozen=cached, iters=10, packing=True)
        train_pack(base_with(2), data, lora, train, tmp_path / cached)
    ours, theirs = tensors_of(tmp_path / "on"), tensors_of(tmp_path / "off")
    assert all(np.allclose(ours[n], theirs[n], atol=1e-5) for n in theirs)


def test_a_run_is_resumed_with_its_own_cache_only(tmp_path, data, cache):
    """Which may have moved."""
    train = settings(teacher_cache=cache, iters=2, val_batches=0)
    train_pack(base_with(2), data, LORA, train, tmp_path / "p")
    shutil.copytree(cache, tmp_path / "moved")
    cache_of(tmp_path / "other", data, temperature=2.0)

    def resume(folder) -> None:
        longer = settings(teacher_cache=str(folder), iters=3, val_batches=0)
        train_pack(base_with(2), data, LORA, longer, tmp_path / "p", resume=True)

    with raises("mismatch", "teacher_cache"):
        resume(tmp_path / "other")
    resume(tmp_path / "moved")


def test_a_cache_is_continued_after_a_kill(tmp_path, data, cache, monkeypatch):
    """No shard is written twice, and all are as without an interruption."""
    monkeypatch.setattr("mlx_packs.data.teacher_cache._SHARD_BYTES", 10_000)
    whole = cache_of(tmp_path / "whole", data)
    assert whole["shards"] == whole["written"] > 3

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

    monkeypatch.setattr(writer, "_shard", shard)
    assert cache_of(tmp_path / "cut", data)["written"] == whole["shards"] - 2
    for file in (tmp_path / "whole").glob("*.*"):
        assert file.read_bytes() == (tmp_path / "cut" / file.name).read_bytes()


def test_a_pack_is_part_of_the_teacher(tmp_path, data, cache):
    train = settings(teacher_cache=cache, iters=2, val_batches=0)
    base = base_with(2)
    train_pack(base, data, LORA, train, tmp_path / "p")
    recipe = Recipe(train=settings(), data=DataConfig(data=str(data)))
    folders = {"alone": None, "packed": Pack.open(tmp_path / "p")}
    targets = {}
    for name, pack in folders.items():
        teacher = Teacher(base, pack, 8, 1.0)
        report = write_teacher_cache(teacher, recipe, tmp_path / name, False, Display(QUIET))
        assert report["teacher"] == ("small" if pack is None else "small with p")
        opened = TeacherCache.at(tmp_path / name)
        targets[name] = opened._read("train", 0)["logprobs"]
    assert not np.allclose(targets["alone"], targets["packed"], atol=1e-3)

    with raises("exists", "out"):
        write_teacher_cache(teacher, recipe, tmp_path / "alone", False, Display(QUIET))
    write_teacher_cache(teacher, recipe, tmp_path / "alone", True, Display(QUIET))
    assert TeacherCache.at(tmp_path / "alone").facts.teacher == "small with p"


def test_bad_caches_are_rejected(tmp_path, data, cache):
    def encode(**changes):
        EncodedTask(base_with(2), changes.pop("data", data), settings(**changes), LORA)

    with raises("invalid", "teacher_cache", "--teacher"):
        encode()
    with raises("not-found", "teacher_cache", "--teacher MODEL"):
        encode(teacher_cache=str(tmp_path))
    with raises("mismatch", "teacher_cache", "48"):
        encode(teacher_cache=cache, max_seq_length=24)
    rows = [chat("Say it.", f"It {i}.") for i in range(8)]
    other = write_rows(tmp_path / "other", train=rows[:6], valid=rows[6:])
    with raises("mismatch", "teacher_cache"):
        encode(teacher_cache=cache, data=other)

    facts = json.loads((TeacherCache.at(tmp_path.parent / cache).folder / FACTS).read_text())
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / FACTS).write_text(json.dumps(facts | {"tokenizer": "0" * 64}))
    with raises("mismatch", "teacher_cache", "small"):
        encode(teacher_cache=str(copy))


def test_what_cannot_be_written_is_rejected(tmp_path, data, monkeypatch):
    with raises("conflict", "phases"):
        cache_of(tmp_path / "c", data, phases=[{"iters": 2}])
    with raises("invalid", "top_k", "4,097"):
        cache_of(tmp_path / "c", data, top_k=4097)
    assert not (tmp_path / "c").exists()
    (tmp_path / "mine").write_text("x")
    with raises("exists", "out"):
        cache_of(tmp_path, data)
    assert (tmp_path / "mine").exists()

    monkeypatch.setattr(writer, "free_bytes", lambda path: 1000)
    with raises("unwritable", "out"):
        cache_of(tmp_path / "c", data)
    assert not list((tmp_path / "c").iterdir())
