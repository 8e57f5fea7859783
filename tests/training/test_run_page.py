"""report.html and report.json of a run folder, and `packs report`."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import mlx_packs as mp
from mlx_packs import train_pack
from mlx_packs.packs.facts import model_card
from mlx_packs.report.facts import Page
from mlx_packs.report.page import render
from mlx_packs.training.observers import Console, run_files
from mlx_packs.training.result import RunReport
from mlx_packs.training.run_folder import RunFolder
from mlx_packs.training.run_page import facts_of_run, read_report
from tests.helpers.errors import check, raises
from tests.helpers.runs import LORA, TRAIN, Lines

pytestmark = pytest.mark.page
FOUR = replace(TRAIN, iters=4)


@pytest.fixture
def finished(trained_copy) -> Path:
    """The run folder of a run that is over, in the current folder."""
    return trained_copy / "o-run"


def test_a_run_leaves_its_page(finished):
    page = (finished / "report.html").read_text(encoding="utf-8")
    assert "<h1>o</h1>" in page and "Perplexity" in page and "Not finished" not in page
    assert str(finished.parent) not in page
    report = read_report(finished)
    assert report["steps"] == 2


def test_packs_report_writes_the_page_of_a_run_or_its_pack(finished, run):
    before = (finished / "report.html").read_text(encoding="utf-8")
    for of in ("o-run", "o"):
        (finished / "report.html").unlink()
        code, out, _ = run("report", of)
        assert code == 0 and "o-run/report.html" in out
        assert (finished / "report.html").read_text(encoding="utf-8") == before
    assert mp.write_page("o", "there.html") == Path("there.html")
    assert json.loads(run("report", "o", "--out", "x.html", "--json")[1])["page"] == "x.html"
    assert Path("x.html").read_text(encoding="utf-8") == before


def test_a_pack_without_its_run_has_a_page_of_its_own(finished, run):
    shutil.rmtree(finished)
    assert run("report", "o")[0] == 0
    page = Path("o-report.html").read_text(encoding="utf-8")
    assert "Perplexity" in page and "polyline" in page
    files = {"README.md", "adapter_config.json", "adapters.safetensors", "pack.json"}
    assert {path.name for path in Path("o").iterdir()} == files


def test_a_run_that_is_not_over_shows_what_there_is(finished, run):
    (finished / "report.json").unlink()
    lines = (finished / "metrics.jsonl").read_text().splitlines()
    (finished / "metrics.jsonl").write_text(lines[0] + "\nbroken\n")
    shutil.rmtree(finished / "step-000002")
    assert run("report", finished)[0] == 0
    page = (finished / "report.html").read_text(encoding="utf-8")
    assert "Not finished: the last entry is of batch 1 of 2" in page and "learning-rate" in page
    assert "broken" in (finished / "metrics.jsonl").read_text()  # is only read


def test_a_run_that_goes_on_and_is_interrupted_leaves_a_page(small, finished, monkeypatch):
    def interrupt(self, line):
        raise KeyboardInterrupt

    monkeypatch.setattr(Console, "on_step", interrupt)
    with pytest.raises((KeyboardInterrupt, mp.PackError)):
        train_pack(small, "d", LORA, FOUR, "o", resume=True)
    page = (finished / "report.html").read_text(encoding="utf-8")
    assert "Not finished: the last entry is of batch 2 of 4" in page
    assert not (finished / "report.json").exists()  # it was of two batches


def test_what_is_no_run_or_pack_and_a_damaged_report_are_errors(finished, rejected):
    check(rejected("report", "nothing"), "not-found")
    check(rejected("report", "d"), "not-found")
    check(rejected("report", "o-run", "--out", "d"), "exists", "out")
    (finished / "config.json").rename("config.json")
    (finished / "config.json").write_text("{")
    check(rejected("report", "o-run"), "unreadable", None, "config.json")
    Path("config.json").replace(finished / "config.json")
    report = finished / "report.json"
    report.write_text(report.read_text().replace('"steps": 2', '"steps": 3'))
    check(rejected("report", "o-run"), "unreadable", None, "report.json")


def test_a_page_that_cannot_be_written_ends_no_run(small, trained, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    display = Lines()
    monkeypatch.setattr(run_files, "render", full)
    folder = train_pack(small, trained / "d", LORA, FOUR, tmp_path / "p", progress=display).run
    notes = [line for line in display.lines if line.startswith("note") and "not written" in line]
    assert len(notes) == 1 and "No space left" in notes[0]
    assert read_report(folder)["steps"] == 4 and not (folder / "report.html").exists()

    RunFolder(folder).clear()
    assert not {"report.html", "report.json"} & {path.name for path in folder.iterdir()}


@pytest.mark.slow
def test_plot_without_matplotlib_names_the_command(finished, monkeypatch):
    result = mp.TrainRun(mp.Pack.open("o"), finished, {"steps": 2}, [])
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.pyplot", None)
        with raises("dependency", None, "[plot]'`"):
            result.plot()
    from matplotlib.figure import Figure

    result.curve.extend([{"batch": 1, "loss": 2.0}, {"batch": 2, "loss": 1.0}])
    axes = result.plot(Figure().subplots())
    assert axes.get_ylabel() == "loss (nats per token)" and len(axes.lines) == 1

    result.report["loss"] = 1.0  # as a run with an own loss has
    assert result.plot(Figure().subplots()).get_ylabel() == "loss"


def test_a_loss_has_a_unit_if_it_is_a_mean_over_tokens():
    of_tokens = "loss (nats per token)"
    for task, unit, loss in (("lm", "tokens", of_tokens), ("rerank", "queries", "loss")):
        lines = [{"batch": n, "loss": 1.0, f"{unit}_per_s": 9.0} for n in (1, 2)]
        facts = facts_of_run("o", {"task": task}, lines, None, Page("o"))
        assert facts.loss_name == loss and facts.unit == unit
        assert len(facts.curve["rate"]) == 2 and f">{loss}</" in render(facts)


def test_a_notebook_shows_a_run_and_its_report(finished):
    report = read_report(finished)
    result = mp.TrainRun(mp.Pack.open("o"), finished, RunReport(report), [])
    assert "<svg" in result._repr_html_()  # the curve that the pack keeps
    assert len(repr(result.report)) < 200 and "2 updates" in repr(result.report)
    assert "Perplexity" in result.report._repr_html_() and result.report == report
    assert json.loads(json.dumps(result.report)) == report


def test_the_card_has_sample_and_recipe(trained):
    pack = mp.Pack.open(trained / "o")
    sample = {"prompt": "Say yes.", "wanted": "Yes.", "before": "no", "after": "completed"}
    card = model_card({**pack.manifest, "samples": [sample]}, "o")
    assert "<pre>Yes.</pre>" in card and "<pre>completed</pre>" in card
    for row in ("| batch-size | `2` |", "| learning-rate | `0.001` |"):
        assert row in card
    assert [b for b, _ in pack.manifest["measured"]["curve"]["loss"]] == [1, 2]
    hostile = {**pack.manifest, "samples": [{"prompt": "```\n<script>", "after": "````"}]}
    card = model_card(hostile, "<img src=x>")
    assert "<pre>```\n&lt;script&gt;</pre>" in card and "# &lt;img src=x>" in card
    assert "<" not in card.replace("<pre>", "").replace("</pre>", "")


def test_a_run_that_is_not_over_shows_its_answers_so_far(finished, run):
    (finished / "report.json").unlink()
    lines = [
        {"batch": batch, "prompt": prompt, "expected": "yes", "answer": f"{prompt} {batch}"}
        for batch in (0, 1, 2)
        for prompt in ("one", "two")
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (finished / "samples.jsonl").write_text(text + '{"batch": 3, "prom')
    assert run("report", finished)[0] == 0
    page = (finished / "report.html").read_text(encoding="utf-8")
    assert all(answer in page for answer in ("one 0", "two 0", "one 2", "two 2"))
    assert "one 1" not in page and 'after batch <span id="answered">2</span>' in page


def test_of_a_long_run_the_last_lines_are_read_and_all_are_kept(tmp_path):
    lines = [{"batch": batch, "loss": 1.0} for batch in range(1, 101)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = RunFolder(tmp_path)
    assert run.metrics(70) == lines[-2:]
    assert run.metrics_until(90) == lines[:90] == run.metrics()
