"""Ranks as processes on this machine, launched as `mlx.launch` does."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ended:
    """Exit codes and output of every rank."""

    codes: list[int]
    outputs: list[str]

    @property
    def text(self) -> str:
        return "\n".join(f"rank {i}: {out}" for i, out in enumerate(self.outputs))


class Ranks:
    """Processes that run a module with arguments, each as a rank in a folder."""

    def __init__(self, folder: Path, size: int, arguments: Sequence[str], folders=()) -> None:
        start = free_ports(size + 1)
        hosts = [[f"127.0.0.1:{start + 1 + i}"] for i in range(size)]
        file = folder / f"hosts-{start}.json"
        file.write_text(json.dumps(hosts))

        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "MLX_HOSTFILE": str(file), "PYTHONPATH": path}

        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", *arguments],
                env={**environment, "MLX_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=folders[rank] if folders else folder,
            )
            for rank in range(size)
        ]

    def wait(self, timeout: float = 240) -> Ended:
        """Wait for all of them; none survives."""
        try:
            outputs = [process.communicate(timeout=timeout)[0] for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        return Ended([process.returncode for process in self.processes], outputs)

    def kill(self, rank: int) -> None:
        self.processes[rank].send_signal(signal.SIGKILL)


def free_ports(count: int) -> int:
    """The first of some ports in a row that nobody uses.

    They are below those that Linux gives to connections, and differ between processes of tests.
    """
    for start in range(20000 + os.getpid() * 64 % 12000, 32768 - count, count):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for i, each in enumerate(sockets):
                each.bind(("127.0.0.1", start + i))
            return start
        except OSError:
            continue
        finally:
            for each in sockets:
                each.close()
    raise AssertionError("no free ports")
