"""`packs serve` at saturation with faults: what becomes of every request, and whether memory grows.

A server of its own process is kept busy by clients that wait for their answers. Meanwhile others read
slowly, vanish in the middle, send half a request and stay, or come in floods beyond the queue; a pack is
removed and added while it is used, and now and then a step of the batch raises. Every request has one
outcome; texts of the answered ones are those that their requests had alone, before.

    nice python -m benchmarks serve_soak --minutes 10
"""

import argparse
import collections
import http.client
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from mlx_packs.bases.files import TINY
from mlx_packs.errors import PackError
from mlx_packs.packs.base import load_base

from . import alone, figures, history, report
from .history import Environment, Record, record
from .serve import free_port
from .server_load import Target
from .soak import Slope, slope
from .swap import random_pack

MODELS = ("base", "a", "b")
REMOVED = "c"  # comes and goes
PROMPTS = ("What is a list?", "Who was Emma?", "Tell me of the sea.", "Why is it so?")
TOKENS = 12
QUEUE, CLIENTS = 32, 24
EVERY = 1.0  # seconds between samples of memory
FLOOD_S, BREAK_S = 15.0, 20.0  # between floods, and between steps that raise
# The server, with a step that raises after each SIGUSR1.
_PROGRAM = """
import signal, sys
from mlx_packs.serving import generation
planned = []
signal.signal(signal.SIGUSR1, lambda *_: planned.append(1))
step = generation.TextWorker.step
def breaks(self):
    if planned and self.counts[0]:
        planned.pop()
        raise RuntimeError("a fault of the soak")
    step(self)
generation.TextWorker.step = breaks
from mlx_packs.cli.main import main
main(sys.argv[1:])
"""


class Soak:
    """Clients of one server, and what became of their requests.

    Args:
        port: of the server.
        server: its process.
        expected: the text of every model and prompt.
    """

    def __init__(
        self, port: int, server: subprocess.Popen, expected: dict[tuple[str, str], str]
    ) -> None:
        self.port, self.server, self.expected = port, server, expected
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.over = threading.Event()
        self._lock = threading.Lock()

    def count(self, outcome: str) -> None:
        with self._lock:
            self.outcomes[outcome] += 1

    def connection(self, seconds: float = 60) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)

    def ask(self, model: str, prompt: str, connection: http.client.HTTPConnection) -> str:
        """Return what became of a request: its status, or how the text differs."""
        body = {"model": model, "messages": [{"role": "user", "content": prompt}]}
        body |= {"max_tokens": TOKENS, "temperature": 0}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), _JSON)
        response = connection.getresponse()
        answer = json.loads(response.read())
        if response.status != 200:
            if response.status == 429 and "retry-after" not in response.headers:
                self.wrong.append("429 without Retry-After")
            return f"status {response.status}"
        text = answer["choices"][0]["message"]["content"]
        if self.expected.get((model, prompt), text) != text:
            self.wrong.append(f"{model}: {text!r}")
        return "answered"

    def steady(self, number: int) -> None:
        """Ask one after the other, and wait for each answer."""
        drawn, connection = random.Random(number), self.connection()
        while not self.over.is_set():
            model = drawn.choice((*MODELS, REMOVED))
            try:
                outcome = self.ask(model, drawn.choice(PROMPTS), connection)
            except (OSError, http.client.HTTPException) as error:
                outcome = f"lost: {type(error).__name__}"
                connection.close()
            self.count(outcome)
            if outcome == "status 429":
                time.sleep(0.2)
        connection.close()

    def vanishing(self, number: int) -> None:
        """Begin a stream, read a little of it, and go."""
        drawn = random.Random(number)
        while not self.over.wait(0.3):
            sent = self._stream(drawn, 400)
            try:
                sent.recv(drawn.choice((1, 200)))
            except OSError:
                pass
            sent.close()
            self.count("vanished")

    def slow(self, number: int) -> None:
        """Read a stream a few bytes at a time."""
        drawn = random.Random(number)
        while not self.over.is_set():
            sent, size = self._stream(drawn, 40), 0
            try:
                while (part := sent.recv(64)) and not self.over.is_set():
                    size += len(part)
                    time.sleep(0.02)
                self.count("read slowly")
            except OSError as error:
                self.count(f"lost: slow {type(error).__name__}")
            sent.close()

    def _stream(self, drawn: random.Random, tokens: int) -> socket.socket:
        body = {"model": drawn.choice(MODELS), "stream": True, "max_tokens": tokens}
        body |= {"messages": [{"role": "user", "content": drawn.choice(PROMPTS)}], "temperature": 1}
        data = json.dumps(body).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        sent = socket.create_connection(("127.0.0.1", self.port), 60)
        sent.sendall(head.encode() + data)
        return sent

    def half_open(self, number: int) -> None:
        """Send half a request, and stay for a while."""
        while not self.over.is_set():
            sent = socket.create_connection(("127.0.0.1", self.port), 60)
            sent.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Le")
            self.over.wait(5 + number % 3)
            sent.close()
            self.count("half open")

    def floods(self, number: int) -> None:
        """Ask far more at once than may wait."""

        def one() -> None:
            connection = self.connection()
            try:
                self.count(self.ask(drawn.choice(MODELS), drawn.choice(PROMPTS), connection))
            except (OSError, http.client.HTTPException) as error:
                self.count(f"lost: flood {type(error).__name__}")
            finally:
                connection.close()

        drawn = random.Random(number)
        while not self.over.wait(FLOOD_S):
            threads = [threading.Thread(target=one) for _ in range(3 * QUEUE)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def swaps(self, number: int) -> None:
        """Remove a pack that is in use, and add it again."""
        while not self.over.wait(2):
            connection = self.connection()
            connection.request("DELETE", f"/v1/packs/{REMOVED}")
            connection.getresponse().read()
            self.over.wait(0.5)
            body = json.dumps({"source": REMOVED})
            connection.request("POST", "/v1/packs", body, _JSON)
            if connection.getresponse().status != 201:
                self.wrong.append("a pack could not be added again")
            connection.close()
            self.count("swapped")

    def breaks(self, number: int) -> None:
        """Let a step of the batch raise."""
        while not self.over.wait(BREAK_S):
            self.server.send_signal(signal.SIGUSR1)
            self.count("broken steps")

    def kinds(self) -> list[tuple[Callable[[int], None], int]]:
        """Return what clients do, and how many do it."""
        return [
            (self.steady, CLIENTS),
            (self.vanishing, 3),
            (self.slow, 3),
            (self.half_open, 8),
            (self.floods, 1),
            (self.swaps, 1),
            (self.breaks, 1),
        ]

    def run(self, seconds: float) -> list[tuple[float, float]]:
        """Let all clients work for so long; return seconds and resident MB of the server."""
        threads = [
            threading.Thread(target=kind, args=(i,))
            for kind, count in self.kinds()
            for i in range(count)
        ]
        for thread in threads:
            thread.start()
        began, samples = time.monotonic(), []
        while (now := time.monotonic() - began) < seconds:
            samples.append((now, alone.rss_bytes(self.server.pid) / 1e6))
            time.sleep(EVERY)
        self.over.set()
        for thread in threads:
            thread.join()
        return samples


_JSON = {"Content-Type": "application/json"}


def served(
    options: argparse.Namespace, kind: type[Soak], more: Sequence[str] = ()
) -> tuple[Soak, list[tuple[float, float]], dict]:
    """Start a server, soak it, and return what became of all, with its last state.

    Args:
        kind: of soak.
        more: options of `packs serve`.
    """
    with tempfile.TemporaryDirectory() as folder:
        base = load_base(options.model)
        for seed, name in enumerate(("a", "b", REMOVED)):
            random_pack(base, seed, 4 + 4 * seed).save(Path(folder) / name)
        port = free_port()
        command = [sys.executable, "-c", _PROGRAM, "serve", "--model", options.model]
        command += ["--packs", folder, "--port", str(port), "--queue", str(QUEUE)]
        command += ["--batch-size", "16", "--no-key", *more]
        log = tempfile.TemporaryFile()
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            _wait_for(port, server)
            soak = kind(port, server, {})
            with closing(soak.connection()) as connection:
                for model in (*MODELS, REMOVED):
                    for prompt in PROMPTS:
                        soak.expected[model, prompt] = _text(connection, model, prompt)
            samples = soak.run(60 * options.minutes)
            with closing(soak.connection()) as connection:
                state = _settled(connection)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
            log.close()
    return soak, samples, state


def _wait_for(port: int, server: subprocess.Popen) -> None:
    while server.poll() is None:
        try:
            Target(f"http://127.0.0.1:{port}").models()
            return
        except PackError:
            time.sleep(0.2)
    raise RuntimeError("the server ended")


def _text(connection: http.client.HTTPConnection, model: str, prompt: str) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": prompt}]}
    body |= {"max_tokens": TOKENS, "temperature": 0}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), _JSON)
    return json.loads(connection.getresponse().read())["choices"][0]["message"]["content"]


def _settled(connection: http.client.HTTPConnection) -> dict:
    """Return the health of the server once nothing runs, or after half a minute."""
    for _ in range(60):
        connection.request("GET", "/health")
        state = json.loads(connection.getresponse().read())
        if not state["running"] and not state["waiting"]:
            break
        time.sleep(0.5)
    return state


def records_of(soak: Soak, samples: list[tuple[float, float]], minutes: float) -> list[Record]:
    """Return requests by outcome, and growth of memory, for the history."""
    here = Environment.here()
    shape = f"{minutes:g} minutes, {CLIENTS} clients and faults"
    grown = slope([s for s, _ in samples], [mb for _, mb in samples])
    note = ", ".join(f"{n:,} {outcome}" for outcome, n in sorted(soak.outcomes.items()))
    answered = soak.outcomes["answered"] / (60 * minutes)
    task = "serve soak tiny"
    verdict = "within noise" if grown.within_noise else "more than noise"
    return [
        record(here, task, "packs serve", shape, "answered", "requests/s", [answered], note=note),
        record(
            here,
            task,
            "packs serve",
            shape,
            "growth: process",
            "MB",
            [grown.growth_mb],
            note=f"{verdict}: standard error {grown.noise_mb:.2f} MB",
        ),
    ]


def faults_of(soak: Soak, grown: Slope, state: dict) -> list[str]:
    """Return what must not happen, in words."""
    allowed = ("answered", "status 404", "status 429", "status 500")
    kinds = ("vanished", "read slowly", "half open", "swapped", "broken steps")
    faults = [
        f"{n} {outcome}" for outcome, n in soak.outcomes.items() if outcome not in allowed + kinds
    ]
    faults += soak.wrong[:5]
    if state != {"status": "ok", "running": 0, "waiting": 0}:
        faults.append(f"the server ended as {state}")
    if not grown.within_noise:
        faults.append(f"memory grew by {grown.growth_mb} MB (standard error {grown.noise_mb})")
    return faults


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks serve_soak", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--model", default=TINY, help="checkpoint folder [tiny]")
    parser.add_argument("--minutes", type=float, default=10.0, metavar="N", help="[10]")
    parser.add_argument(
        "--out",
        type=Path,
        default=figures.IMAGES / "serve_soak.png",
        metavar="FILE",
        help="where the plot goes [benchmarks/images/serve_soak.png]",
    )
    history.add_option(parser)
    options = parser.parse_args(arguments)
    soak, samples, state = served(options, Soak)
    grown = slope([s for s, _ in samples], [mb for _, mb in samples])
    for outcome, n in sorted(soak.outcomes.items()):
        print(f"{n:>8,}  {outcome}")
    print(f"memory {grown.growth_mb:+.1f} MB, standard error {grown.noise_mb:.1f}")
    with figures.saved(options.out, rows=1, height=2.2) as axes:
        (ax,) = axes
        ax.plot([s / 60 for s, _ in samples], [mb for _, mb in samples])
        ax.set(xlabel="minutes", ylabel="MB, process", ylim=(0, None))
    new_records = records_of(soak, samples, options.minutes)
    history.append(new_records, options.history)
    print(report.render(new_records))
    if faults := faults_of(soak, grown, state):
        print("\n".join(f"benchmarks: {fault}" for fault in faults), file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
