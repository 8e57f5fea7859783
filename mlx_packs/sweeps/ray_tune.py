"""The runner on Ray: every trial is one of Ray Tune, and successive halving is its ASHAScheduler.

Ray's workers start the same processes as the local runner, in the same folders, which every worker
must see under the same path. Results are those files: what Ray knows is not needed to continue.
"""

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..display import Display
from ..errors import PackError
from .leaderboard import metric_of, write_leaderboard
from .metrics import is_lower_better
from .sweep import Sweep
from .trial import Result, Trial, train

if TYPE_CHECKING:
    from ray.tune import Callback
    from ray.tune.schedulers import TrialScheduler

_ITERS = "iters"  # batches so far, in what trials report to Ray
_METRIC = "metric"


def run(sweep: Sweep, display: Display, show: Callable[[Trial, int, Result], None]) -> None:
    """Train the trials of a sweep on the Ray cluster of ``RAY_ADDRESS``, or one on this machine.

    A trial gets all CPUs of the smallest worker, so that each machine trains one at a time.

    Args:
        sweep: the sweep.
        display: where progress goes.
        show: shows a trial whose rung is over.

    Raises:
        PackError: the cluster has no CPU, or a fault of the machine ends the sweep.
    """
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # whose table would be on stdout
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # paths of recipes may be relative
    import ray
    from ray import tune

    begun = not ray.is_initialized()
    if begun:
        ray.init(log_to_driver=False, logging_level=logging.WARNING, include_dashboard=False)
    try:
        cpus = _cpus()
        place = os.getcwd()

        def train_trial(values: dict) -> None:
            _train(sweep, values["trial"], place)

        numbers = [trial.number for trial in sweep.trials]
        tuner = tune.Tuner(
            tune.with_resources(train_trial, {"cpu": cpus}),
            param_space={"trial": tune.grid_search(numbers)},
            tune_config=tune.TuneConfig(scheduler=_scheduler(sweep)),
            run_config=tune.RunConfig(
                name=".ray",
                storage_path=str(sweep.folder.absolute()),
                verbose=0,
                callbacks=[_shown(sweep, show)],
            ),
        )
        with display.working("trial", f"{len(numbers)} trials, {cpus:g} CPUs each"):
            results = tuner.fit()
        if fault := next((e for e in results.errors if not isinstance(e, KeyboardInterrupt)), None):
            raise PackError(f"--runner ray: {_last_line(fault)}", "unwritable")
    finally:
        if begun:
            ray.shutdown()
    write_leaderboard(sweep)


def _train(sweep: Sweep, number: int, place: str) -> None:
    """Train a trial on a worker, and report each rung, after which Ray may end it."""
    from ray import tune

    os.chdir(place)
    trial = sweep.trials[number - 1]
    for rung, until in enumerate(sweep.rungs.batches):
        result = train(trial, rung, until)
        value = metric_of(sweep, result)[1]
        if result.error or value is None:
            return
        tune.report({_ITERS: until or _iters(sweep), _METRIC: value})


def _iters(sweep: Sweep) -> int:
    """Return the batches of a run that is trained to the end, as Ray counts them."""
    return int(sweep.trials[0].recipe["iters"])


def _scheduler(sweep: Sweep) -> "TrialScheduler":
    """Return ASHA for successive halving (https://arxiv.org/abs/1810.05934), else first in, first out."""
    from ray.tune.schedulers import ASHAScheduler, FIFOScheduler

    first = sweep.rungs.batches[0]
    if first is None:
        return FIFOScheduler()
    return ASHAScheduler(
        time_attr=_ITERS,
        metric=_METRIC,
        mode="min" if is_lower_better(sweep.metrics[0]) else "max",
        max_t=_iters(sweep),
        grace_period=first,
        reduction_factor=sweep.rungs.factor,
    )


def _cpus() -> float:
    """Return the CPUs of the smallest worker."""
    import ray

    counts = [n["Resources"].get("CPU", 0) for n in ray.nodes() if n["Alive"]]
    if not any(counts):
        raise PackError("--runner ray: no worker of the cluster has a CPU.", "invalid")
    return min(count for count in counts if count)


def _shown(sweep: Sweep, show: Callable[[Trial, int, Result], None]) -> "Callback":
    """Return a callback of Ray that shows what trials report, and keeps the leaderboard up to date."""
    from ray.tune import Callback

    def results() -> list[tuple[Trial, int, Result]]:
        last = [(trial, trial.last_result(len(sweep.rungs.batches))) for trial in sweep.trials]
        return [(trial, *result) for trial, result in last if result]

    shown = {(trial.number, rung) for trial, rung, _ in results()}  # in an earlier call

    class Shown(Callback):
        def on_trial_result(self, *_, **__) -> None:
            for trial, rung, result in results():
                if (trial.number, rung) not in shown:
                    shown.add((trial.number, rung))
                    show(trial, rung, result)
            write_leaderboard(sweep)

        on_trial_complete = on_trial_error = on_trial_result

        def __reduce__(self) -> tuple:
            """Leave it out of the state that Ray writes, which nobody reads."""
            return Callback, ()

    return Shown()


def _last_line(fault: Exception) -> str:
    """Return what a trial raised, without Ray's traceback around it."""
    return str(fault).strip().splitlines()[-1]
