"""`packs train --hosts FILE`: one run on several machines, launched by `mlx.launch`."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .. import signals
from ..errors import PackError, errors_of
from ..reading import read_json
from ..terminal import pass_on

# Handlers that do nothing, not SIG_IGN, which the ranks would inherit: only they handle a signal,
# save and end together.
_LAUNCH = (
    "import signal; [signal.signal(n, lambda *_: None) for n in (1, 2, 15)]; "
    "from mlx._distributed_utils.launch import main; main()"
)
_ENDED = re.compile(rb"\[WARN\] Node with rank (\d+) (?:exited with code (-?\d+)|was killed)")
_OF_MLX = b"[ring] "  # begins what MLX prints of lost connections
_LOCAL = ("127.0.0.1", "localhost")
_REACH_S = 5


def launch(file: Path, arguments: Sequence[str]) -> int:
    """Run `packs` on the machines of a host file; return the exit code of the first rank.

    Raises:
        PackError: the file is no host file, or a machine cannot be reached.
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
            if ended := _ENDED.search(line):
                if ended[1] == b"0":
                    code = int(ended[2] or -signal.SIGKILL)
            elif not line.startswith(_OF_MLX):  # the ranks say it themselves
                pass_on(line)
        launched = process.wait()

    return code or launched


def _read_hosts(file: Path) -> list[str]:
    if not file.is_file():
        raise PackError(f"--hosts {file}: no such file.", "not-found", "hosts")

    with errors_of("hosts"):
        content = read_json(file, object)

    hosts = content.get("hosts") if isinstance(content, dict) else content
    if not isinstance(hosts, list) or len(hosts) < 2:
        raise PackError(f"--hosts {file}: must list two machines or more.", "invalid", "hosts")

    for number, host in enumerate(hosts):
        if not isinstance(host, dict) or not all(host.get(key) for key in ("ssh", "ips")):
            raise PackError(
                f'--hosts {file}: machine {number} needs "ssh" and "ips". '
                "`mlx.distributed_config` writes such files.",
                "invalid",
                "hosts",
            )

    return [str(host["ssh"]) for host in hosts]


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

    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[-1]
