"""A measurement in a process of its own: nothing that another implementation left behind is counted.

A benchmark that measures so has two forms: asked for, it starts itself once for each implementation with
``--alone IMPLEMENTATION``; that process measures one implementation and prints what it results as a line of JSON.
"""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mlx_packs.cpu.blas import BLAS_VARIABLE

_CHECKOUT = Path(__file__).parent.parent


class Failed(Exception):
    """A process ended with an error; its message is on stderr."""


def run(module: str, arguments: Sequence[str], blas: str | None = None) -> dict:
    """Return the last line that ``python -m benchmarks.<module>`` prints, parsed.

    Args:
        blas: in place of this process's; ``off`` is that of MLX's wheel.
    Raises: Failed.
    """
    environment = {**os.environ, BLAS_VARIABLE: blas} if blas else os.environ
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=_CHECKOUT,
    )
    if done.returncode:
        raise Failed(f"benchmarks.{module} {' '.join(arguments)}: exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def rss_bytes(pid: int | str = "self") -> int:
    """Resident bytes of a process now; where the system does not say, the most this one has had."""
    return _proc_status("VmRSS", pid) or peak_rss_bytes()


def peak_rss_bytes() -> int:
    """The most resident bytes that this process has had.

    Linux' ru_maxrss begins with that of the program that started this one; VmHWM does not.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _proc_status("VmHWM") or (peak if sys.platform == "darwin" else peak * 1024)


def _proc_status(key: str, pid: int | str = "self") -> int:
    """A size in /proc/self/status, in bytes; 0 where there is no such file."""
    file = Path(f"/proc/{pid}/status")
    if not file.is_file():
        return 0
    line = next(line for line in file.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024
