"""Executors: where the trials of a sweep are trained. An executor is one class in `EXECUTORS`."""

import importlib.util
import logging
import os
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

from ..config.choices import SWEEP_RUNNERS, registered
from ..errors import PackError


class LocalExecutor(nullcontext):
    """Calls functions in this process, one after the other."""

    workers = 1

    def __enter__(self) -> "LocalExecutor":
        return self

    def submit(self, function: Callable, *args: Any) -> Future:
        """Call a function; what it raises is raised here."""
        future: Future = Future()
        future.set_result(function(*args))
        return future


class RayExecutor(AbstractContextManager):
    """Calls functions on a Ray cluster: that of ``RAY_ADDRESS``, or one on this machine.

    A function gets as many CPUs as the smallest worker has, so that each machine trains one trial
    at a time. Ray calls it again if a worker is lost.
    """

    def __enter__(self) -> "RayExecutor":
        import ray

        self._has_begun = not ray.is_initialized()
        if self._has_begun:
            ray.init(log_to_driver=False, logging_level=logging.WARNING, include_dashboard=False)
        cpus = [n["Resources"].get("CPU", 0) for n in ray.nodes() if n["Alive"]]
        cpus = [count for count in cpus if count]
        if not cpus:
            raise PackError("--runner ray: no worker of the cluster has a CPU.")
        self.workers = len(cpus)
        self._call = ray.remote(_call).options(num_cpus=min(cpus), scheduling_strategy="SPREAD")
        return self

    def submit(self, function: Callable, *args: Any) -> Future:
        """Call a function on a worker, in the same current folder."""
        return self._call.remote(os.getcwd(), function, *args).future()

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import ray

        if self._has_begun:
            ray.shutdown()
        if isinstance(error, ray.exceptions.RayError) and not isinstance(error, PackError):
            reason = str(error).strip().splitlines()[-1]
            raise PackError(f"--runner ray: {reason}", "unwritable") from error


def _call(folder: str, function: Callable, *args: Any) -> Any:
    """Call a function in a folder, since paths of a recipe may be relative."""
    os.chdir(folder)
    return function(*args)


Executor = LocalExecutor | RayExecutor
EXECUTORS = registered(SWEEP_RUNNERS, {"local": LocalExecutor, "ray": RayExecutor})


def check_runner(name: str) -> None:
    """Raise a PackError if the packages of a runner are not installed."""
    if name == "ray" and importlib.util.find_spec("ray") is None:
        raise PackError(
            "--runner ray: Ray is not installed. Run `pip install 'mlx-packs[ray]'`.", "dependency"
        )
