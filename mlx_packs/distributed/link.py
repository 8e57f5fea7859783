"""A link between the ranks besides MLX's: it finds them, and tells each when another has ended.

An exchange waits for its ranks without end. Before MLX connects them, every rank therefore calls
the first one, which waits `WAIT_S` for all; then both sides of every link say that they are alive.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import Code, PackError
from ..reading import read_json
from ..terminal import exit_at_once

WAIT_S = 25.0  # for all ranks to call
SILENCE_S = 15.0  # after which a rank counts as gone
_PING_S = 3.0
_LONGEST = 1 << 16  # bytes of a message
_GRACE_S = 2.0  # for an error of the own rank, which says more than the end of another
_NOTICE_S = 0.5  # in which the end of another process is noticed
GONE = 75  # exit code of a run of which a rank is gone


@dataclass(frozen=True)
class Launched:
    """A rank that was launched with others."""

    rank: int  # from 0
    size: int  # number of ranks
    host: str  # where the others reach the first rank
    port: int  # on which they do so before MLX connects them
    own_port: int | None = None  # on which MLX waits for a neighbour here; None if not known


def launched() -> Launched | None:
    """Return how this process was launched; None if it is alone."""
    if "MLX_RANK" not in os.environ:
        return None

    rank = int(os.environ["MLX_RANK"])
    if coordinator := os.environ.get("MLX_JACCL_COORDINATOR"):
        host, _, port = coordinator.rpartition(":")
        size = len(_listed("MLX_IBV_DEVICES"))
        return Launched(rank, size, host, int(port) + 1)

    if host := os.environ.get("NCCL_HOST_IP"):
        size = int(os.environ.get("MLX_WORLD_SIZE", "0"))
        return Launched(rank, size, host, int(os.environ.get("NCCL_PORT", "0")) + 1)

    ring = _listed("MLX_HOSTFILE")
    if len(ring) < 2:
        return None
    host, _, port = ring[0][0].rpartition(":")
    return Launched(rank, len(ring), host, int(port) - 1, int(ring[rank][0].rpartition(":")[2]))


def _listed(variable: str) -> list:
    """The list in the file that a variable names; empty without one."""
    name = os.environ.get(variable)
    if not name or not (file := Path(name)).is_file() or not file.stat().st_size:
        return []
    return read_json(file, list)


class Link:
    """The connections of a rank: of the first one with all others, of these with the first.

    ``peers`` are the open sockets by rank.
    """

    def __init__(self, here: Launched, peers: Mapping[int, socket.socket]) -> None:
        self._here = here
        self._peers = dict(peers)

        self._runs = threading.Event()  # whether a run lasts
        self._over = threading.Event()  # whether this rank has ended or said why
        self._lost = threading.Event()  # whether a rank went without a word
        self._gone: tuple[int, str] | None = None
        self._lock = threading.Lock()
        self._ending = threading.Lock()  # either this rank says why it ends, or the link does
        self.on_gone: Callable[[str], None] = lambda reason: PackError(reason).show()

        for rank, peer in self._peers.items():
            peer.settimeout(SILENCE_S)
            threading.Thread(target=self._hear, args=(rank, peer), daemon=True).start()
        threading.Thread(target=self._ping, daemon=True).start()

    def begin(self) -> None:
        """Watch the other ranks from now on; a PackError if one is gone already."""
        self._over.clear()
        self._runs.set()

        if self._gone:
            raise PackError(self._reason(*self._gone), "network")

    def end(self, error: str = "") -> None:
        """Watch no longer; tell the first rank the error that ends the run here."""
        self._runs.clear()
        with self._ending:
            self._over.set()
        if error and self._here.rank:
            self._send(0, {"error": error})
            time.sleep(_PING_S / 10)  # a process that ends could cut it off

    def has_lost_a_rank(self) -> bool:
        """Whether another rank has gone without an error of its own; False on all but the first."""
        return self._here.rank == 0 and self._lost.wait(_NOTICE_S)

    def close(self) -> None:
        """Close the connections; the other ranks take it for an end."""
        for peer in self._peers.values():
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
            peer.close()

    def _reason(self, rank: int, error: str) -> str:
        where = f"rank {rank} of {self._here.size}"
        if error:
            return f"{where}: {error}"
        return f"{where} has ended, or does not answer"

    def _send(self, rank: int, message: Mapping[str, Any]) -> None:
        with self._lock, suppress(OSError):
            self._peers[rank].sendall(json.dumps(message).encode() + b"\n")

    def _ping(self) -> None:
        while True:
            time.sleep(_PING_S)
            for rank in self._peers:
                self._send(rank, {})

    def _hear(self, rank: int, peer: socket.socket) -> None:
        """Read what a rank says until it is gone, which ends a run."""
        error = ""
        with suppress(OSError, ValueError), peer.makefile("r", encoding="utf-8") as lines:
            for line in lines:
                if error := json.loads(line).get("error", ""):
                    break

        if not error:
            self._lost.set()
        self._gone = self._gone or (rank, error)

        self._runs.wait()  # between runs nobody needs it
        self._over.wait(_GRACE_S)
        with self._ending:
            if self._over.is_set():
                return
            if self._here.rank == 0:
                self.on_gone(self._reason(rank, error))
            exit_at_once(2 if error else GONE)


def connect(here: Launched, versions: Mapping[str, str]) -> Link:
    """Return the link of a rank once all have called the first; a PackError names what is wrong."""
    report = {"rank": here.rank, "versions": dict(versions), "fault": _port_fault(here)}

    if here.rank:
        return Link(here, {0: _call(here, report)})
    return Link(here, _wait_for_calls(here, report))


def _port_fault(here: Launched) -> str:
    """What is wrong with the port that MLX is to use here; empty if nothing is."""
    if here.own_port is None:
        return ""

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", here.own_port))
        except OSError:
            return f"port {here.own_port} is in use on {socket.gethostname()}"
    return ""


def _wait_for_calls(here: Launched, own: Mapping[str, Any]) -> dict[int, socket.socket]:
    peers: dict[int, socket.socket] = {}
    reports = {0: own}
    deadline = time.monotonic() + WAIT_S

    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", here.port))
        except OSError:
            raise _fault(
                f"port {here.port} is in use on this machine. Pass another --starting-port to "
                "mlx.launch.",
                "busy",
            ) from None

        server.listen(here.size)
        while len(reports) < here.size:
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                peer, _ = server.accept()
            except TimeoutError:
                missing = ", ".join(str(r) for r in range(here.size) if r not in reports)
                text = (
                    f"rank {missing} of {here.size} did not answer within {WAIT_S:.0f} s. Check "
                    "that its machine is reachable and has mlx-packs and the data at the same "
                    "paths."
                )
                _answer(peers, text)
                raise _fault(text, "network") from None

            peer.settimeout(SILENCE_S)
            try:
                report = _read_line(peer)
                rank = report["rank"]
                if rank in reports or rank not in range(here.size):
                    raise ValueError(rank)
            except (OSError, ValueError, TypeError, KeyError):  # no rank of this run
                peer.close()
                continue
            reports[rank] = report
            peers[rank] = peer

    text = _disagreement(reports)
    _answer(peers, text)
    if text:
        raise _fault(text, "mismatch")
    return peers


def _disagreement(reports: Mapping[int, Mapping[str, Any]]) -> str:
    """Why the ranks cannot train together; empty if they can."""
    for rank, report in sorted(reports.items()):
        if report["fault"]:
            return f"rank {rank}: {report['fault']}. Pass another --starting-port to mlx.launch."

    first = reports[0]["versions"]
    for rank, report in sorted(reports.items()):
        for name, version in report["versions"].items():
            if version != first.get(name):
                return (
                    f"rank {rank} has {name} {version}, rank 0 {first.get(name)}. Install the same."
                )
    return ""


def _answer(peers: Mapping[int, socket.socket], fault: str) -> None:
    """Say yes to the other ranks, or no with the reason."""
    for peer in peers.values():
        with suppress(OSError):
            peer.sendall(json.dumps({"fault": fault}).encode() + b"\n")
        if fault:
            peer.close()


def _call(here: Launched, report: Mapping[str, Any]) -> socket.socket:
    """The socket to the first rank once it has said yes."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            peer = socket.create_connection((here.host, here.port), timeout=5)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                text = f"rank 0 cannot be reached at {here.host}, port {here.port} ({error})."
                raise _fault(text, "network") from None
            time.sleep(0.2)

    peer.settimeout(WAIT_S + 5)
    try:
        peer.sendall(json.dumps(report).encode() + b"\n")
        answer = _read_line(peer)
    except (OSError, ValueError):
        answer = {"fault": "rank 0 has ended before the run started."}

    if answer["fault"]:
        peer.close()
        raise _fault(answer["fault"], "network")
    return peer


def _read_line(peer: socket.socket) -> dict:
    """Return the next message, read byte by byte so that nothing after it is lost."""
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (byte := peer.recv(1)) or len(line) > _LONGEST:
            raise ValueError("no message")
        line += byte
    return json.loads(line)


def _fault(text: str, code: Code) -> PackError:
    return PackError(f"--hosts: {text}", code, "hosts")
