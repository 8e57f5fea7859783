"""One server that answers, trains, collects feedback and changes its packs: is anything lost or different?

Clients ask, read slowly and vanish, rate and correct answers; others train by the SDK of Tinker, which
must be installed; a pack in use is removed and added. Texts and losses must equal
what the server gave before without other load. No request may be lost, and memory must stay level.

    nice python -m benchmarks mixed_load --minutes 60
"""

import argparse
import http.client
import json
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from mlx_packs.bases.files import TINY

from . import history, report
from .history import Environment, Record, record
from .real.tinker import client
from .serve_soak import PROMPTS, TOKENS, Soak, served

CLIENTS, TRAINERS, RATERS = 6, 2, 2
LEARNED = "learned"  # what a server that learns calls its base
LEVEL = 0.05  # growth of the memory, of its size when settled
_HEADERS = {"Content-Type": "application/json"}


class MixedLoad(Soak):
    """Clients of all routes of one server, and what became of their requests."""

    seconds = 0.0
    quiet: list[dict]  # by trainer: losses and sample of a server without other requests

    def kinds(self) -> list[tuple[Callable[[int], None], int]]:
        return [
            (self.steady, CLIENTS),
            (self.vanishing, 1),
            (self.slow, 1),
            (self.half_open, 2),
            (self.swaps, 1),
            (self.rates, RATERS),
            (self.trains, TRAINERS),
        ]

    def run(self, seconds: float) -> list[tuple[float, float]]:
        self.seconds = seconds
        self.quiet = [self._trained(number, 0)[0] for number in range(TRAINERS)]
        return super().run(seconds)

    def trains(self, number: int) -> None:
        """Train again and again by the SDK, in a process of its own."""
        for result in self._trained(number, self.seconds):
            same = result["sample"] == self.quiet[number]["sample"]
            if not same or not np.allclose(
                result["losses"], self.quiet[number]["losses"], rtol=1e-5
            ):
                self.wrong.append(f"trainer {number}: {result}, quiet {self.quiet[number]}")
            self.count("trained")

    def _trained(self, number: int, seconds: float) -> list[dict]:
        drawn = random.Random(number)
        rows = [[[drawn.randrange(5, 4000) for _ in range(20 + 8 * number)], 8] for _ in range(2)]
        lora = {"rank": 4 + 4 * number, "seed": number}
        settings = {"lora": lora, "adam": {"learning_rate": 1e-3}}
        url = f"http://127.0.0.1:{self.port}"
        result = client("repeated", url, seconds=seconds, batches=[rows] * 4, **settings)
        return result["results"]

    def rates(self, number: int) -> None:
        """Ask, and rate or correct the answer."""
        drawn = random.Random(number)
        connection = self.connection()
        while not self.over.wait(0.5):
            body = {"model": LEARNED, "max_tokens": TOKENS, "temperature": 1}
            body |= {"messages": [{"role": "user", "content": drawn.choice(PROMPTS)}]}
            feedback = drawn.choice(({"rating": "down"}, {"correction": "A better answer."}))
            try:
                answer = self._posted(connection, "/v1/chat/completions", body)
                self._posted(connection, "/v1/feedback", {"id": answer["id"], **feedback})
                self.count("rated")
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.count(f"lost: rated {error!r}"[:80])
                connection.close()

    def _posted(self, connection: http.client.HTTPConnection, path: str, body: dict) -> dict:
        connection.request("POST", path, json.dumps(body), _HEADERS)
        response = connection.getresponse()
        answer = json.loads(response.read())
        if response.status >= 300:
            raise ValueError(f"{path}: {response.status} {answer}")
        return answer


def level(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the MB of the process in the second and in the last quarter of the time."""
    sizes = np.array([mb for _, mb in samples])
    quarter = len(sizes) // 4
    return float(sizes[quarter : 2 * quarter].mean()), float(sizes[-quarter:].mean())


def records_of(load: Soak, before: float, after: float, minutes: float) -> list[Record]:
    """Return requests by outcome, and the growth of memory, for the history."""
    here = Environment.here()
    shape = f"{minutes:g} minutes, {CLIENTS} + {RATERS} clients, {TRAINERS} trainers"
    note = ", ".join(f"{n:,} {outcome}" for outcome, n in sorted(load.outcomes.items()))
    answered = load.outcomes["answered"] / (60 * minutes)
    growth = 100 * (after / before - 1)
    quarters = f"{before:.0f} MB in the second, {after:.0f} MB in the last quarter"
    task = "mixed load tiny"
    return [
        record(here, task, "packs serve", shape, "answered", "requests/s", [answered], note=note),
        record(here, task, "packs serve", shape, "growth: process", "%", [growth], note=quarters),
    ]


def faults_of(load: Soak, before: float, after: float, state: dict) -> list[str]:
    """Return what must not happen, in words."""
    allowed = ("answered", "status 404", "status 429", "vanished", "read slowly", "half open")
    allowed += ("swapped", "rated", "trained")
    faults = [f"{n} {outcome}" for outcome, n in load.outcomes.items() if outcome not in allowed]
    faults += load.wrong[:5]
    if (state["status"], state["running"], state["waiting"]) != ("ok", 0, 0):
        faults.append(f"the server ended as {state}")
    if after > before * (1 + LEVEL):
        faults.append(f"memory grew from {before:.0f} to {after:.0f} MB")
    return faults


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks mixed_load", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--model", default=TINY, help="checkpoint folder [tiny]")
    parser.add_argument("--minutes", type=float, default=60.0, metavar="N", help="[60]")
    history.add_option(parser)
    options = parser.parse_args(arguments)

    with tempfile.TemporaryDirectory() as folder:
        more = ["--train", str(Path(folder) / "states"), "--learn", str(Path(folder) / "learn")]
        load, samples, state = served(options, MixedLoad, more)

    before, after = level(samples)
    tenths = np.array_split([mb for _, mb in samples], 10)
    print("MB by tenths of the time: " + " ".join(f"{tenth.mean():.0f}" for tenth in tenths))
    for outcome, n in sorted(load.outcomes.items()):
        print(f"{n:>8,}  {outcome}")
    print(f"memory: {before:.1f} MB in the second, {after:.1f} MB in the last quarter")
    new_records = records_of(load, before, after, options.minutes)
    history.append(new_records, options.history)
    print(report.render(new_records))

    faults = faults_of(load, before, after, state)
    for fault in faults:
        print(f"benchmarks: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
