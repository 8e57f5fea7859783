"""Packs of several seeds: each is what it is alone, resumes to the bit, and has a part in means."""

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

import mlx_packs as mp
from mlx_packs import Pack, train_pack
from mlx_packs.errors import PackError, RunStopped
from mlx_packs.packs.base import load_base
from mlx_packs.reading import sealed, without_seal
from mlx_packs.report.seeds import SeedsFacts
from mlx_packs.training import seeds as training
from mlx_packs.training.run_folder import RunFolder
from mlx_packs.training.run_page import seeds_facts
from mlx_packs.training.seeds import statistics
from tests.helpers import runs
from tests.helpers.errors import check, raises
from tests.helpers.observers import observe
from tests.helpers.rows import CHATS, write_rows
from tests.helpers.runs import LORA, Lines

pytestmark = pytest.mark.page
DATA = {"train": CHATS, "valid": CHATS[:1]}
TRAIN = replace(runs.TRAIN, steps_per_eval=1, optimizer="sgd", learning_rate=0.1)


def train(small, out: str | Path, **options) -> mp.SeedRuns:
    return mp.train_seeds(small, DATA, LORA, TRAIN, out, **{"seeds": 2, **options})


@pytest.fixture(scope="module")
def trained_seeds(small, tmp_path_factory) -> mp.SeedRuns:
    """Three seeds of two batches, in a folder ``three``; tests only read it."""
    folder = tmp_path_factory.mktemp("seeds") / "three"
    return train(small, folder, seeds=3, progress=False)


@pytest.fixture
def three(trained_seeds, here) -> Path:
    """A copy of `trained_seeds` in the current folder."""
    return shutil.copytree(trained_seeds.folder, here / "three")


def facts_of(folder: str) -> SeedsFacts:
    return seeds_facts(Path(folder), has_links=True)


def adapters(folder: Path) -> bytes:
    return (folder / "adapters.safetensors").read_bytes()


def test_python_trains_seeds_on_one_base_and_examples_in_memory(here, small_folder, monkeypatch):
    loaded, display = [], Lines()

    def load(*args, **options):
        loaded.append(load_base(*args, **options))
        return loaded[-1]

    monkeypatch.setattr(training, "load_base", load)
    data, settings = {**DATA, "train": iter(CHATS)}, replace(TRAIN, seed=3)
    found = mp.train_seeds(
        str(small_folder), data, LORA, settings, "out", seeds=2, progress=display
    )
    assert len(loaded) == 1
    assert [line for line in display.lines if line.startswith("seeds 2 packs")]

    assert list(found.runs) == [3, 4]
    assert [pack.path for pack in found.packs] == [Path("out/seed-3"), Path("out/seed-4")]
    losses = [Pack.open(f"out/seed-{seed}").manifest["eval"]["ppl_after"] for seed in (3, 4)]
    assert found.mean["ppl_after"] == pytest.approx(sum(losses) / 2)
    error = abs(losses[0] - losses[1]) / 2
    assert found.standard_error["ppl_after"] == pytest.approx(error)
    assert repr(found).startswith("SeedRuns(2 seeds, ppl ") and "±" in repr(found)
    assert str(found).startswith("mean    ppl ")
    stored = json.loads(Path("out/seeds.json").read_text())
    assert stored == json.loads(json.dumps(found.to_json())) and stored["seeds"] == [3, 4]
    recipe = Pack.open("out/seed-4").manifest["recipe"]
    assert recipe["seed"] == 4 and "seeds" not in recipe

    single = train_pack(loaded[0], DATA, LORA, replace(TRAIN, seed=4), "single", progress=False)
    assert adapters(Path("out/seed-4")) == adapters(Path("single"))
    assert found.runs[4].report["ppl_after"] == single.report["ppl_after"]


def test_python_says_what_seeds_need(here, small):
    for seeds in (1, 65):
        with raises("invalid", "seeds", "[2, 64]", str(seeds)):
            train(small, "out", seeds=seeds)
    assert not Path("out").exists()
    with raises("conflict", "out"):
        mp.train_seeds(small, CHATS)
    with raises("unknown", "seed", "train=mp.TrainConfig(seed=...)"):
        mp.train_seeds(small, CHATS, out="out", seed=1)


def test_mean_and_standard_error_are_of_numbers_that_all_have():
    reports = [
        {"loss": 1.0, "held_out": {"rows": 3}, "own": 1, "name": "a", "gates": True},
        {"loss": 2.0, "held_out": {"rows": 3}, "name": "b", "gates": True},
        {"loss": 6.0, "held_out": {"rows": 3}, "name": "c", "gates": True},
    ]
    found = statistics(reports)
    assert found["mean"] == {"loss": 3.0, "held_out.rows": 3.0}
    assert found["standard_error"] == pytest.approx(
        {"loss": (14 / 2 / 3) ** 0.5, "held_out.rows": 0}
    )


@pytest.mark.slow
def test_after_a_signal_resuming_changes_no_bit(trained_seeds, small, here, monkeypatch):
    steps = []

    def interrupt(line):
        steps.append(line)
        if len(steps) == 3:  # the first of seed 1
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        observe(patch, on_step=interrupt)
        with pytest.raises(RunStopped) as stopped:
            train(small, "out")
    assert stopped.value.exit_code == 128 + signal.SIGTERM
    assert RunFolder(Path("out/seed-1-run")).checkpoints()[-1].name == "step-000001"

    train(small, "out", resume=True)
    for name in ("seed-0", "seed-1"):
        assert adapters(Path("out") / name) == adapters(trained_seeds.folder / name)

    again = train(small, "out", resume=True)  # which takes no step
    assert [run.report["batches"] for run in again.runs.values()] == [2, 2]


def test_folders_are_checked_before_the_first_pack_is_trained(small, trained_copy):
    with raises("exists", "out", "o"):
        train(small, "o")
    Path("out/seed-1").mkdir(parents=True)
    Path("out/seed-1/mine").touch()
    with raises("exists", "out", "seed-1"):
        train(small, "out")
    assert [path.name for path in Path("out").iterdir()] == ["seed-1"]


def test_the_command_prints_the_mean(here, small_folder, run):
    write_rows(here / "chats", **DATA)
    words = f"train --model {small_folder} --data chats --out out --iters 2 --rank 2".split()
    words += "--batch-size 2 --max-seq-length 64 --matmul-path dense --seeds".split()
    code, out, err = run(*words, 2)
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("mean ") and "±" in lines[0] and "2 seeds" in lines[0]
    assert [line.split()[0] for line in lines[1:5]] == ["loss", "speed", "seed-0", "seed-1"]

    code, _, err = run(*words, 300, "--overwrite")
    assert code == 2 and "--seeds: must be in [2, 64], but is 300" in err


def test_packs_of_another_task_have_a_mean(here, small):
    rows = [{"text": f"row {n}", "label": f"{n % 2}"} for n in range(8)]
    settings = replace(TRAIN, task="classify", iters=1, steps_per_eval=10)
    data = dict.fromkeys(("train", "valid", "test"), rows)
    found = mp.train_seeds(small, data, None, settings, "out", seeds=2, progress=False)
    assert "tok/s" in str(found).splitlines()[2]


def test_the_page_has_the_means_of_seeds_json(trained_seeds):
    page = (trained_seeds.folder / "report.html").read_text(encoding="utf-8")
    stored = json.loads((trained_seeds.folder / "seeds.json").read_text())
    mean = stored["mean"]["ppl_after"]
    error = stored["standard_error"]["ppl_after"]
    assert f"{mean:,.0f} ± {error:.0f}" in page
    assert set(stored["mean"]) <= set(page.replace("<wbr>", "").replace("<", ">").split(">"))

    facts = facts_of(trained_seeds.folder)
    names = [seed.name for seed in facts.finished]
    assert facts.status == "" and names == ["seed-0", "seed-1", "seed-2"]
    for seed in facts.seeds:
        assert (trained_seeds.folder / seed.link).is_file() and f'href="{seed.link}"' in page
    assert str(trained_seeds.folder.parent) not in page


def test_packs_report_writes_the_page_of_seeds(three, run):
    page = (three / "report.html").read_bytes()
    (three / "report.html").unlink()
    code, out, _ = run("report", "three")
    assert code == 0 and "three/report.html" in out
    assert (three / "report.html").read_bytes() == page

    assert mp.write_page("three", "there.html") == Path("there.html")
    assert "href" not in Path("there.html").read_text()


def test_a_seed_without_a_result_is_named_and_in_no_mean(three):
    (three / "seed-1-run" / "report.json").unlink()
    facts = facts_of("three")
    assert facts.status == "2 of 3 seeds finished; means are of two or more"
    assert [bool(seed.numbers) for seed in facts.seeds] == [True, False, True]
    assert "Not finished" in facts.seeds[1].note

    (three / "seed-2-run" / "report.json").unlink()
    assert facts_of("three").status == "1 of 3 seeds finished; means are of two or more"


def test_a_failed_gate_is_named(three):
    file = three / "seed-0-run" / "report.json"
    report = without_seal(json.loads(file.read_text()))
    for gates, is_named in (({"max_pack_mb": {"passed": False}}, True), ([1], False)):
        file.write_text(json.dumps(sealed(report | {"gates": gates})))
        assert ("gate max_pack_mb failed" in facts_of("three").seeds[0].note) == is_named


def test_runs_of_other_settings_are_left_out(three, trained):
    shutil.copytree(trained / "o-run", three / "seed-7-run")
    facts = facts_of("three")
    assert facts.status == "seed-7: other settings or examples, left out" and len(facts.seeds) == 3


def test_folders_without_a_page_are_errors(three, rejected):
    Path("empty/seed-0-run").mkdir(parents=True)
    check(rejected("report", "empty"), "not-found")
    check(rejected("report", "three", "--out", "empty"), "exists", "out")


def test_a_rejected_run_leaves_the_page_of_the_earlier_one(three, small):
    before = [(three / name).read_bytes() for name in ("report.html", "seeds.json")]
    with raises("exists"):
        train(small, "three", progress=False)
    with raises("data"):
        mp.train_seeds(small, {"train": [{"a": 1}]}, LORA, TRAIN, "three", seeds=3, overwrite=True)
    assert [(three / name).read_bytes() for name in ("report.html", "seeds.json")] == before


def test_a_pack_that_fails_leaves_a_page_of_the_others(three, small, monkeypatch):
    failed, display = [], Lines()

    def fail(line):
        if not failed:
            failed.append(line)
            raise PackError("does not go on", "diverged")

    observe(monkeypatch, on_step=fail)
    with raises("diverged", None, "seed-0: "):
        train(small, "three", seeds=3, overwrite=True, progress=display)
    assert not (three / "seeds.json").exists()
    assert facts_of("three").status == "2 of 3 seeds finished; means are of two or more"
    assert "2 of 3 seeds finished" in (three / "report.html").read_text()
    assert "page three/report.html" in display.lines
