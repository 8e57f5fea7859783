"""What the screens show, from folders alone."""

import json
import os
import time

import pytest

from mlx_packs.errors import PackError
from mlx_packs.files import exclusive_writer
from mlx_packs.studio.access import folder_of_run
from mlx_packs.studio.runs import live, report_page, run_page, runs_of
from tests.helpers.interpreter import run_python
from tests.helpers.packs import BASE, write_pack
from tests.helpers.run_folders import losses, make_run

RESULT = {"ppl_before": 9.5, "ppl_after": 2.25, "gates": {"max_pack_mb": {"passed": False}}}
ERROR = {"reason": "diverged", "exit_code": 2, "flag": "learning_rate", "error": "step 4: nan"}


def only(home):
    (run,), older = runs_of(home)
    assert older == 0
    return run


@pytest.mark.parametrize(
    ("made", "state", "progress"),
    [
        ({"report": RESULT, "batch": 600, "batches": 600}, "finished", "Batch 600 of 600"),
        ({"checkpoint": 300, "batch": 1300, "batches": 6000}, "stopped", "Batch 1,300 of 6,000"),
        ({"batch": 3, "batches": 600, "ended": ERROR}, "failed", "Batch 3 of 600"),
        ({"begun": False, "process": 1, "phase": "Reading the model"}, "failed", ""),
    ],
)
def test_a_run_that_is_over(home, made, state, progress):
    make_run(home, **made)
    run = only(home)
    assert (run.state, run.progress, run.fault) == (state, progress, "")


def test_a_run_that_trains_names_its_phase_and_the_time_left(home):
    status = {"batch": 240, "batches": 600, "seconds_left": 730.0, "updated": time.time() - 10}
    folder = make_run(home, phase="Training", **status)
    with exclusive_writer(folder):
        assert only(home).progress == "Batch 240 of 600, 12 minutes left"
        (folder / "status.json").write_text('{"phase": "Reading the model"}')
        assert (only(home).state, only(home).progress) == ("training", "Reading the model")


def test_a_run_that_waits_has_no_settings_yet(home):
    folder = make_run(home, begun=False)
    (folder / "waiting.json").write_text("{}")
    assert (only(home).state, only(home).names) == ("waiting", ("–", "–"))


def test_what_cannot_be_read_is_a_row_with_its_reason(home):
    make_run(home, "whole", report=RESULT)
    make_run(home, "damaged")
    (home / "packs" / "damaged-run" / "config.json").write_text('{"recipe": ')
    make_run(home, "report", report=RESULT)
    (home / "packs" / "report-run" / "report.json").write_text("{}")
    make_run(home, "a link")
    (home / "packs" / "outside-run").symlink_to("/etc")
    (make_run(home, "inside") / "metrics.jsonl").symlink_to("/etc/passwd")
    (home / "packs" / "other-run").mkdir()
    (home / "packs" / "other-run" / "notes.txt").write_text("mine")

    faults = {run.name: run.fault for run in runs_of(home)[0]}
    assert {name for name, fault in faults.items() if not fault} == {"whole"}
    assert faults["outside"].startswith("outside-run: outside-run is a link")
    assert faults["inside"].startswith("inside-run: metrics.jsonl is a link")
    assert "no name of a run" in faults["a link"] and "no run folder" in faults["other"]
    assert "as JSON" in faults["damaged"] and "report.json" in faults["report"]
    assert str(home) not in str(faults)


def test_a_home_without_runs_has_none(tmp_path):
    assert runs_of(tmp_path) == ([], 0)


def test_the_newest_200_runs_are_listed(home):
    for number in range(203):
        folder = home / "packs" / f"n{number}-run"
        folder.mkdir()
        os.utime(folder, (number, number))
    runs, older = runs_of(home)
    assert (runs[0].name, runs[-1].name, older) == ("n202", "n3", 3)


@pytest.mark.parametrize(
    "name", ["", "..", "../x", "a/b", ".hidden", "a b", "a\n", "é", "a\u202eb", "x" * 300, "gone"]
)
def test_names_that_are_none_of_a_run(home, name):
    (home / "x-run").mkdir()
    with pytest.raises(PackError) as caught:
        folder_of_run(home, name)
    assert caught.value.code == "not-found"


def test_a_special_file_is_not_opened(home):
    folder = make_run(home)
    os.mkfifo(folder / "metrics.jsonl")
    for read in (live, report_page):
        with pytest.raises(PackError, match="named pipe"):
            read(home, "tickets", *("", 0)[: 2 * (read is live)])


def test_the_page_has_results_answers_and_checkpoint(home):
    samples = [
        {"batch": batch, "prompt": prompt, "expected": "yes", "answer": f"{prompt} {batch}"}
        for batch in (0, 20, 40)
        for prompt in ("one", "two")
    ]
    lines = [*losses(10, 20), {"batch": 20, "valid_loss": 1.5}]
    make_run(home, metrics=lines, samples=samples, report=RESULT, checkpoint=40)

    page = run_page(home, "tickets")
    assert page["run"].change == "Perplexity 9.50 → 2.25"
    assert page["gates"] == [("MB", False)] and page["checkpoint"] == 40
    assert page["points"] == [("10", "1.1", "–"), ("20", "1.05", "1.5")]
    answers = [(each.prompt, each.before, each.after) for each in page["facts"].samples]
    assert answers == [("one", "one 0", "one 40"), ("two", "two 0", "two 40")]
    assert page["facts"].answered == 40


def test_live_lines_follow_a_file(home):
    folder = make_run(home, metrics=losses(10, 20), batch=20, batches=600)
    first = live(home, "tickets", "", 0)
    assert first["whole"] and first["series"] == {"loss": [[10, 20], [1.1, 1.05]]}

    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(losses(30)[0]) + '\n{"batch": 40, "lo')
    second = live(home, "tickets", first["file"], first["next"])
    assert not second["whole"] and second["series"] == {"loss": [[30], [1.0333]]}
    assert live(home, "tickets", second["file"], second["next"])["series"] == {}


def test_hostile_lines_leave_the_others(home):
    folder = make_run(home, metrics=losses(10))
    bad = ['{"batch": 1e999, "loss": 1}', '{"batch": 2, "loss": NaN}', "[" * 10_000, "7", "\udcff"]
    bad += ['{"batch": "<b>", "loss": [1]}', '{"batch": 3, "loss": ' + "9" * 5000 + "}"]
    with (folder / "metrics.jsonl").open("a", errors="surrogateescape") as file:
        file.writelines(line + "\n" for line in bad)
    assert live(home, "tickets", "", 0)["series"] == {"loss": [[10], [1.1]]}
    assert "1.1" in str(run_page(home, "tickets")["points"])


def test_an_answer_of_a_long_run_is_small(home):
    line = {"loss": 1.23456789, "grad_norm": 0.123456789, "learning_rate": 1.23456789e-5}
    lines = [{"batch": 10 * n, "tokens_per_s": 345.678 + n % 9, **line} for n in range(10_000)]
    make_run(home, metrics=lines)
    assert len(json.dumps(live(home, "tickets", "", 0))) < 200_000


def test_the_server_renders_pages_without_numpy_and_mlx(home):
    """It would be twice as large with them, and computes nothing."""
    make_run(home, metrics=losses(10, 20), report=RESULT, batch=20, batches=20)
    base = {**BASE, "fingerprint": "b" * 64}
    write_pack(home / "packs" / "tickets", base=base, data={"fingerprint": {}})
    run_python(f"""
import asyncio, sys
from pathlib import Path
from starlette.requests import Request
from mlx_packs.studio import app, new_run

async def streamed(response): return "".join([part async for part in response.body_iterator])

new_run.reports_of = lambda *_: iter([{{"bases": []}}])  # of a command, in a process of its own
studio = app.Studio(Path({str(home)!r}))
request = Request({{"type": "http", "query_string": b"", "headers": []}})
screens = [studio.screen(name, request) for name in ("use", "ratings", "export")]
report = studio.report(request, "tickets")
assert b"not beside" not in report.body and b"Some-4bit" in report.body
pages = [studio.runs(request), studio.run(request, "tickets"), report, *screens]
assert {{page.status_code for page in pages}} == {{200}}
assert "bundled" in asyncio.run(streamed(studio.new(request)))
assert not (heavy := {{"numpy", "mlx.core", "pydantic"}} & set(sys.modules)), heavy
""")
