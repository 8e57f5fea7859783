"""report.html of a folder of seeds: what all runs have in it, also if one is not finished."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import mlx_packs as mp
from mlx_packs.errors import PackError
from mlx_packs.reading import sealed, without_seal
from mlx_packs.report.seeds import SeedsFacts
from mlx_packs.training import seeds as training
from mlx_packs.training.run_page import seeds_facts
from tests.helpers.errors import check, raises
from tests.helpers.observers import observe
from tests.helpers.rows import CHATS
from tests.helpers.runs import LORA, TRAIN, Lines

pytestmark = pytest.mark.page


def train(small, out: str, **options) -> mp.SeedRuns:
    data = {"train": CHATS, "valid": CHATS[:1]}
    settings = replace(TRAIN, steps_per_eval=1)
    return mp.train_seeds(small, data, LORA, settings, out, **{"seeds": 2, **options})


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


def test_a_page_that_cannot_be_written_ends_no_run(three, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(training, "write_seeds_page", full)
    display = Lines()
    training._write_page(three, display)
    (note,) = display.lines
    assert note.startswith("note ") and "report.html" in note and "No space left" in note
