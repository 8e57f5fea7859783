"""`--hosts FILE`: the same command on several machines, launched by `mlx.launch`."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .. import signals
from ..errors import PackError
from ..terminal import pass_on

# Its own handlers, so that a signal is for the ranks, which end together and save.
_LAUNCH = (
    "import signal; [signal.signal(n, lambda *_: None) for n in (1, 2, 15)]; "
    "from mlx._distributed_utils.launch import main; main()"
)
_ENDED = re.compile(rb"\[WARN\] Node with rank (\d+) (?:exited with code (-?\d+)|was killed)")
_LOCAL = ("127.0.0.1", "localhost")
_REACH_S = 5


def launch(file: Path, arguments: Sequence[str]) -> int:
    """Run a command on the machines of a host file; return the exit code of the first rank.

    Args:
        file: as `mlx.distributed_config` writes it.
        arguments: of `packs`, without ``--hosts``.

    Raises:
        PackError: the file is none, or a machine cannot be reached.
    """
    hosts = _read_hosts(file)
    _check_reachable(hosts)
    command = [sys.executable, "-m", "mlx_packs", *arguments]
    process = subprocess.Popen(
        [sys.executable, "-c", _LAUNCH, "--hostfile", str(file), "--", *command],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    code = 0
    with signals.forwarded(lambda number: os.killpg(process.pid, number)):
        for line in process.stderr:
            if (ended := _ENDED.search(line)) is None:
                pass_on(line)
            elif ended[1] == b"0":
                code = int(ended[2] or -signal.SIGKILL)
        launched = process.wait()
    return code or launched


def _read_hosts(file: Path) -> list[str]:
    """Return the names by which the machines are reached."""
    from mlx._distributed_utils.common import Hostfile

    if not file.is_file():
        raise PackError(f"--hosts {file}: no such file.", "not-found", "hosts")
    try:
        hosts = Hostfile.from_file(str(file)).hosts
    except ValueError as error:
        reason = str(error).removeprefix(f"Failed to parse hostfile {file} ")
        raise PackError(
            f"--hosts {file}: is no host file {reason}.", "unreadable", "hosts"
        ) from None
    if len(hosts) < 2:
        raise PackError(f"--hosts {file}: must list two machines or more.", "invalid", "hosts")
    for host in hosts:
        if not host.ips:
            text = f'--hosts {file}: {host.ssh_hostname} has no "ips". `mlx.distributed_config` writes them.'
            raise PackError(text, "invalid", "hosts")
    return [host.ssh_hostname for host in hosts]


def _check_reachable(hosts: Sequence[str]) -> None:
    remote = [host for host in dict.fromkeys(hosts) if host not in _LOCAL]
    with ThreadPoolExecutor(max(len(remote), 1)) as pool:
        for host, why in zip(remote, pool.map(_fault_of, remote), strict=True):
            if why:
                raise PackError(
                    f"--hosts: {host} cannot be reached by ssh without a password ({why}). Try "
                    f"`ssh {host} true`.",
                    "network",
                    "hosts",
                )


def _fault_of(host: str) -> str:
    """Return why a machine cannot be reached; empty if it can."""
    options = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={_REACH_S}")
    try:
        done = subprocess.run(
            ["ssh", *options, host, "true"], capture_output=True, text=True, timeout=4 * _REACH_S
        )
    except FileNotFoundError:
        return "there is no ssh"
    except subprocess.TimeoutExpired:
        return "no answer"
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[-1] if done.returncode else ""
