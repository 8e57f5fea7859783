"""Phases: what is drawn from where, schedules and optimizer states, refusals, going on after ^C."""

import json
import signal
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import yaml

from mlx_packs import DataConfig, LoRAConfig, Pack, Phase, TrainConfig, train_pack
from mlx_packs.data.batches import few_shapes, token_collate, training_set
from mlx_packs.data.dataset import Batch, Dataset
from mlx_packs.data.encoding import Example, Examples
from mlx_packs.data.sampler import Draw, Sampler
from mlx_packs.packs.facts import phase_lines
from mlx_packs.packs.manifest import check_manifest
from mlx_packs.runtime import mx
from mlx_packs.tasks.phases import resolve_phases
from mlx_packs.training import fit
from mlx_packs.training.run_folder import RunFolder
from tests.helpers.errors import check, raises
from tests.helpers.rows import write_rows
from tests.training.conftest import ROWS, interrupt_at, kill_in, untimed_metrics

CODE = [{"text": f"def add_{i}(a, b):\n    return a + b + {i}\n" * (1 + i % 3)} for i in range(24)]
LORA = LoRAConfig(rank=2, num_layers=1, dropout=0.1)


@pytest.fixture(scope="module")
def phase_data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_rows(folder / "broad", train=CODE[:18], valid=CODE[18:])
    write_rows(folder / "narrow", train=ROWS[:4], valid=ROWS[4:])
    return folder


def phases(data, **second) -> tuple[Phase, ...]:
    narrow = {"iters": 4, "learning_rate": 5e-4, "replay": 0.25, **second}
    return (
        Phase("broad", data=str(data / "broad"), iters=4, learning_rate=1e-3),
        Phase("narrow", data=str(data / "narrow"), **narrow),
    )


def phased(data, *two: Phase, **changes) -> TrainConfig:
    settings = {"batch_size": 2, "max_seq_length": 64, "matmul_path": "dense", "test_batches": 1}
    settings |= {"steps_per_report": 3, "grad_accumulation_steps": 2}
    return TrainConfig(**{**settings, "phases": two or phases(data), **changes})


@pytest.fixture(scope="module")
def two_phase_examples() -> Examples:
    """90 rows of a first phase, 40 of a second."""
    random = np.random.default_rng(0)
    items = []
    for length in random.integers(8, 60, 130):
        tokens = random.integers(1, 4000, length).astype(np.int32)
        items.append(Example(tokens, np.arange(length) > 3, "x"))
    return Examples(items, "text", "all")


def sampler_of(examples, draw: Draw, batch_size: int = 4, inputs: int = 59, packing=False):
    return Sampler(examples.lengths, batch_size, inputs, 3, packing, draw)


def drawn(examples, sampler: Sampler, count: int, start: int = 0) -> list[Batch]:
    return list(islice(training_set(examples, sampler).batches(start), count))


@pytest.mark.parametrize(("replay", "batch_size"), [(0.05, 4), (0.5, 1), (1.0, 4)])
def test_replayed_rows_are_an_exact_share_of_batches(two_phase_examples, replay, batch_size):
    sampler = sampler_of(two_phase_examples, Draw(90, None, replay), batch_size)
    old = taken = 0
    for batch in drawn(two_phase_examples, sampler, 100):
        old += sum(row < 90 for row in batch.examples)
        taken += len(batch.examples)
        assert len(batch.examples) == batch_size and abs(old - replay * taken) <= 0.5


def test_both_kinds_of_rows_go_round_before_one_comes_again(two_phase_examples):
    sampler = sampler_of(two_phase_examples, Draw(90, None, 0.5))
    batches = drawn(two_phase_examples, sampler, 64)  # two windows
    rows = [row for batch in batches for row in batch.examples]
    for kind in ([r for r in rows if r < 90], [r for r in rows if r >= 90]):
        counts = np.unique(kind, return_counts=True)[1]
        assert counts.max() - counts.min() <= 1
    assert {r for r in rows if r >= 90} == set(range(90, 130))


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("replay", "start"), [(0.0, 31), (0.3, 70)])
def test_drawn_batches_resume_from_any_batch(two_phase_examples, packing, replay, start):
    sampler = sampler_of(two_phase_examples, Draw(90, None, replay), 3, packing=packing)
    whole = drawn(two_phase_examples, sampler, start + 20)[start:]
    for a, b in zip(whole, drawn(two_phase_examples, sampler, 20, start), strict=True):
        assert a.examples == b.examples and np.array_equal(a.inputs["tokens"], b.inputs["tokens"])


def test_packed_rows_of_replay_are_a_share_and_hold_no_own_rows(two_phase_examples):
    sampler = sampler_of(two_phase_examples, Draw(90, None, 0.25), 4, 100, packing=True)
    for batch in drawn(two_phase_examples, sampler, 40):
        kinds = [set() for _ in range(4)]
        for row, start in zip(batch.examples, batch.starts, strict=True):
            kinds[start // 100].add(row < 90)
        assert sorted(map(tuple, kinds)) == [(False,)] * 3 + [(True,)]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(
    ("draw", "allowed"), [(Draw(0, 90), range(90)), (Draw(90, None), range(90, 130))]
)
def test_without_replay_only_own_rows_are_drawn(two_phase_examples, draw, allowed, packing):
    sampler = sampler_of(two_phase_examples, draw, packing=packing)
    rows = {r for batch in drawn(two_phase_examples, sampler, 60) for r in batch.examples}
    assert rows == set(allowed)


def test_shapes_of_drawn_batches_are_those_that_were_foretold(two_phase_examples):
    sampler = sampler_of(two_phase_examples, Draw(90, None, 0.3), 2)
    few = few_shapes(two_phase_examples, sampler)
    data = Dataset(two_phase_examples, token_collate(sampler, few), sampler)
    batches = islice(data.batches(), 200)
    result = {(b.inputs["tokens"].shape[1], b.inputs["targets"].size) for b in batches}
    assert result == data.shapes(200) <= few


def test_what_a_phase_does_not_say_is_as_the_run_has_it():
    four = (
        Phase(),
        Phase(iters=3),
        Phase(learning_rate=1e-5, optimizer_state="fresh"),
        Phase(data="a", lr_schedule="constant", warmup_steps=0),
    )

    run = {"iters": 5, "learning_rate": 3e-4, "warmup_steps": 1, "grad_accumulation_steps": 2}
    config = TrainConfig(phases=four, **run)
    phases = resolve_phases(config, DataConfig(data="x", text_feature="body"))

    assert [phase.name for phase in phases] == ["phase-1", "phase-2", "phase-3", "phase-4"]
    assert [(p.first_batch, p.stop) for p in phases] == [(0, 5), (5, 8), (8, 13), (13, 18)]
    assert [phase.updates_before for phase in phases] == [0, 3, 0, 3]
    assert [phase.train.learning_rate for phase in phases] == [3e-4, 3e-4, 1e-5, 3e-4]
    assert [phase.train.warmup_steps for phase in phases] == [1, 1, 1, 0]

    assert [phase.columns.data for phase in phases] == ["x", "x", "x", "a"]
    assert {phase.columns.text_feature for phase in phases} == {"body"}


FAULTS = [
    ("phases: [{itres: 3}]", "unknown", "p.yaml: phases[0]: itres: "),
    ("phases: [{iters: 0}]", "invalid", "phases[0] (phase-1): iters: "),
    ("phases: [{replay: 0.2}]", "conflict", "phases[0] (phase-1): replay "),
    ("phases: [{name: a}, {name: a}]", "conflict", "'a'"),
    (r'phases: [{name: "a\nb"}]', "invalid", r"'a\nb'"),
    ("phases: [{data: [a, b]}]", "invalid", "phases[0]: data: must be one source, but is ['a', "),
    ("phases: [{optimizer_state: keep}]", "unknown", "phases[0]: optimizer_state: "),
    ("phases: [{lr_schedule: step}]", "unknown", "phases[0] (phase-1): lr_schedule: "),
    ("model: tiny\nphases: [{data: nowhere/at/all}]", "not-found", "nowhere/at/all"),
    (
        "lr_schedule: {name: cosine_decay, arguments: [1e-3, 10]}\nphases: [{learning_rate: 1e-4}]",
        "conflict",
        "phases[0] (phase-1): learning_rate: ",
    ),
    ("iters: 3\nphases: [{iters: 2}]", "conflict", "--iters "),
]


@pytest.mark.parametrize(("text", "code", "shown"), FAULTS)
def test_faults_are_one_line_before_anything_is_loaded(
    rejected, here, nothing_is_loaded, text, code, shown
):
    (here / "p.yaml").write_text(text)
    check(rejected("train", "-c", "p.yaml", "--out", "o"), code, None, shown)
    assert [p.name for p in here.iterdir()] == ["p.yaml"]


def test_data_beside_phases_with_data_is_rejected_in_python(phase_data, tmp_path):
    with raises("conflict", "data"):
        train_pack("tiny", str(phase_data / "narrow"), LORA, phased(phase_data), tmp_path / "o")


@pytest.fixture(scope="module")
def whole(small, phase_data, tmp_path_factory):
    """An uninterrupted run of two phases."""
    return train_pack(small, None, LORA, phased(phase_data), tmp_path_factory.mktemp("whole") / "o")


def test_manifest_has_both_phases_and_their_effects(whole):
    manifest = json.loads((whole.pack.path / "pack.json").read_text())
    first, second = manifest["phases"]
    assert first["name"] == first["data"] == "broad"
    assert (first["steps"], first["batches"]) == (2, [0, 4])
    assert (second["replay"], second["optimizer_state"]) == (0.25, "carry")
    assert first["after"] == second["before"]

    for phase in (first, second):
        assert set(phase["before"]) == set(phase["after"]) == {"broad", "narrow"}
        assert phase["loss_first"] > 0 and phase["loss_last"] > 0
    assert second["after"]["narrow"]["ppl"] == manifest["eval"]["ppl_after"]
    assert first["before"]["narrow"]["ppl"] == manifest["eval"]["ppl_before"]
    assert first["after"]["broad"]["ppl"] < first["before"]["broad"]["ppl"]

    rows = {"broad/train": 18, "broad/valid": 6, "narrow/train": 4, "narrow/valid": 2}
    assert manifest["data"]["rows"] == rows
    assert set(manifest["data"]["fingerprint"]) == set(rows)
    assert [p["data"] for p in manifest["recipe"]["phases"]] == ["broad", "narrow"]

    assert phase_lines(manifest["phases"])[1].startswith("narrow: 2 updates on narrow, 25% repl")
    assert "- phase: narrow: 2 updates" in (whole.pack.path / "README.md").read_text()
    assert whole.report["phases"] == manifest["phases"] and whole.report["steps"] == 4


def test_damaged_phases_of_a_manifest_are_refused(whole):
    manifest = json.loads((whole.pack.path / "pack.json").read_text())
    first = manifest["phases"][0]
    after = {"broad": {"ppl": "x"}}
    for damaged in ({}, [{}], [{**first, "after": after}], [first, {**first, "name": 3}]):
        with pytest.raises(ValueError, match="phases"):
            check_manifest({**manifest, "phases": damaged})


def test_fresh_optimizer_state_begins_at_step_zero(small, phase_data, whole, tmp_path):
    two = phased(phase_data, *phases(phase_data, optimizer_state="fresh"))
    fresh = train_pack(small, None, LORA, two, tmp_path / "o")

    def files(step: str, name: str) -> list:
        return [r.run / step / f"{name}.safetensors" for r in (whole, fresh)]

    steps = [mx.load(str(f))["step"].item() for f in files("step-000008", "optimizer")]
    assert steps == [4, 2]
    first, last = (
        [f.read_bytes() for f in files(step, "adapters")] for step in ("step-000004", "step-000008")
    )
    assert first[0] == first[1] and last[0] != last[1]


def test_resume_refuses_other_phases_and_other_iters(small, phase_data, whole):
    other = phased(phase_data, *phases(phase_data, replay=0.5))
    with raises("mismatch", "phases"):
        train_pack(small, None, LORA, other, whole.pack.path, resume=True)
    with raises("mismatch", "iters", "600", "700"):
        train_pack(small, None, LORA, phased(phase_data, iters=700), whole.pack.path, resume=True)


BETWEEN = 0  # between the phases


def test_a_run_interrupted_in_each_phase_resumes_bit_identically(
    small_folder, phase_data, whole, here, run, monkeypatch
):
    settings = {k: v for k, v in vars(phased(phase_data)).items() if v != getattr(TrainConfig(), k)}
    settings |= {"phases": [p.to_json() for p in phases(phase_data)]}
    settings |= {"model": str(small_folder), "rank": 2, "num_layers": 1, "dropout": 0.1}
    Path("p.yaml").write_text(yaml.safe_dump(settings))
    flags, folder = ("-c", "p.yaml"), here / "o-run"

    for batch, last in ((BETWEEN, "step-000004"), (5, "step-000006")):
        with monkeypatch.context() as patch:
            if batch == BETWEEN:
                kill_in(patch, fit.Fit, "_score_after", signal.SIGINT)
            else:
                interrupt_at(patch, batch, signal.SIGINT)
            assert run("train", "--out", "o", "-q", *flags)[0] == 130
        assert RunFolder(folder).latest_checkpoint().name == last
        flags = ("--resume",)
    assert run("train", "--out", "o", "-q", "--resume")[0] == 0

    for file in ("step-000008/adapters.safetensors", "step-000008/optimizer.safetensors"):
        assert (folder / file).read_bytes() == (whole.run / file).read_bytes(), file
    lines = untimed_metrics(folder)
    assert lines == untimed_metrics(whole.run)
    assert [line["batch"] for line in lines] == [3, 4, 4, 7, 8]
    assert Pack.open("o").manifest["phases"] == whole.pack.manifest["phases"]
