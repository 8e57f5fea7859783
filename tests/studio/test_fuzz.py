"""Mutants of run folders on every screen: each is shown, or is one line, and nothing else."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from mlx_packs.report.page import environment
from mlx_packs.studio import jobs
from mlx_packs.studio.app import __file__ as app_file
from mlx_packs.studio.runs import live, report_page, run_page, runs_of
from tests.fuzz.kind import SUBJECT, Kind, library
from tests.fuzz.runner import Fuzzer, Report, sandbox
from tests.helpers.run_folders import losses, make_run

SEED = 58
HOME = Path(SUBJECT)
SAMPLES = [{"batch": b, "prompt": "one", "expected": "yes", "answer": "no"} for b in (0, 20)]
STATUS = {"process": 1, "started": "2", "updated": 3.5, "phase": "Training", "batch": 20}
STATUS |= {"batches": 600, "seconds_left": 30.0, "peak_gb": 1.5}


class RunsKind(Kind):
    """A home with a run that finished, and one that waits."""

    name = "runs"
    words = "batch loss valid_loss recipe settings model data state ended reason phase".split()
    in_place = True

    def make(self, folder):
        lines = [*losses(10, 20), {"batch": 20, "valid_loss": 1.5}]
        report = {"ppl_before": 9.5, "ppl_after": 2.25, "gates": {"max_pack_mb": {"passed": True}}}
        run = make_run(folder, "done", lines, SAMPLES, report, 20, **STATUS)
        (run / "log.txt").write_text("first\nlast\n")
        (make_run(folder, "waits", begun=False) / "waiting.json").write_text(
            json.dumps({"settings": {"data": "tiny", "rank": "x"}})
        )

    def mutate(self, case):
        name = case.rng.choice(list(case.files))
        return case.replace(name) if case.rng.random() < 0.2 else case.edit(name)

    def cheap(self):
        return [library(show, show.__name__) for show in SCREENS]


def render(name: str, **content: object) -> None:
    templates = environment(Path(app_file).parent / "templates")
    templates.get_template(f"{name}.html.jinja").render(**content)


def runs():
    found, older = runs_of(HOME)
    render("runs", runs=found, older=older, home="home")


def run():
    render("run", **run_page(HOME, "done"))


def waits():
    render("run", **run_page(HOME, "waits"))


def lines():
    json.dumps(live(HOME, "done", "", 0), allow_nan=False)


def report():
    report_page(HOME, "done")


def queue():
    jobs.start_next(HOME)


SCREENS = (runs, run, waits, lines, report, queue)


@pytest.mark.parametrize(
    "numbers",
    [range(30), pytest.param(range(30, 1000), marks=pytest.mark.slow)],
    ids=["30", "970 more"],
)
def test_mutants_of_run_folders(numbers, monkeypatch):
    for module in ("subprocess", "threading"):  # else a run is started for each mutant
        monkeypatch.setattr(jobs, module, Mock())
    with sandbox() as root:
        fuzzer = Fuzzer(RunsKind(), SEED, root)
        counts = Report("runs")
        for number in numbers:
            fuzzer.run(number, counts)
    print(counts.lines()[0])
    assert not counts.failures, "\n".join(counts.lines())
    assert counts.accepted and counts.rejected
