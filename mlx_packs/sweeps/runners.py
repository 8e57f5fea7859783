"""Runners: where the trials of a sweep are trained. A runner is one function in `RUNNERS`."""

import importlib.util
from collections.abc import Callable

from ..config.choices import SWEEP_RUNNERS, registered
from ..display import Display, clock
from ..errors import PackError
from ..report.scatter import value_text
from .leaderboard import metric_of, ranked, write_leaderboard
from .sweep import Sweep
from .trial import Result, Trial, train

Runner = Callable[[Sweep, Display], None]


def run_locally(sweep: Sweep, display: Display) -> None:
    """Train the trials one after the other on this machine, rung by rung.

    The leaderboard is written after each, so that it can be read meanwhile.
    """
    trials, rungs = sweep.trials, sweep.rungs
    for rung, until in enumerate(rungs.batches):
        for trial in trials:
            if trial.result(rung) is None:
                with display.working("trial", f"{trial.number} · {described(trial)}"):
                    result = train(trial, rung, until)
                show(sweep, trial, rung, result, display)
                write_leaderboard(sweep)
        order = [row.trial for row in ranked(sweep, rung) if not row.result.error]
        trials = [trial for trial in order if trial in trials][: rungs.kept(len(trials))]


def run_on_ray(sweep: Sweep, display: Display) -> None:
    """Train the trials on the workers of a Ray cluster, by Ray Tune."""
    from .ray_tune import run

    run(sweep, display, lambda trial, rung, result: show(sweep, trial, rung, result, display))


RUNNERS: dict[str, Runner] = registered(SWEEP_RUNNERS, {"local": run_locally, "ray": run_on_ray})


def check_runner(name: str) -> None:
    """Raise a PackError if the packages of a runner are not installed."""
    if name == "ray" and importlib.util.find_spec("ray") is None:
        raise PackError(
            "--runner ray: Ray is not installed. Run `pip install 'mlx-packs[ray]'`.", "dependency"
        )


def described(trial: Trial) -> str:
    """Return the values of a trial in one line."""
    return ", ".join(f"{key}={value_text(value)}" for key, value in trial.values.items())


def show(sweep: Sweep, trial: Trial, rung: int, result: Result, display: Display) -> None:
    """Show what came of a trial."""
    name, value = metric_of(sweep, result)
    text = f"{name} {value:.4g} after {result.batches:,} batches" if value is not None else ""
    text = result.error or text or f"has no finite {name}"
    seconds = f" · {clock(result.train_s)}" if result.train_s is not None else ""
    failed = "" if result.error or result.passed else " · FAILED a gate"
    rungs = len(sweep.rungs.batches)
    of_rung = f" · rung {rung + 1}/{rungs}" if rungs > 1 else ""
    place = f"{trial.number}/{len(sweep.trials)}{of_rung} · {described(trial)}"
    display.line("trial", f"{place} · {text}{seconds}{failed}")
