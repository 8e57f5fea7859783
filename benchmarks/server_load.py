"""Load on a server of the OpenAI API: how many requests it answers, and how long each waits."""

import http.client
import json
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from urllib.parse import urlsplit

from mlx_packs.errors import PackError
from mlx_packs.reading import parse_json

PERCENTILES = (50, 95, 99)
_SUBJECTS = "a list|the weather|an old house|a function|the sea|a long letter|numbers".split("|")


@dataclass(frozen=True)
class Target:
    """Where requests go, and how.

    ``url`` is with or without ``/v1``, ``seconds`` is what an answer may take, and ``extra``
    returns more fields of a request by its model.
    """

    url: str
    key: str = ""
    seconds: float = 600.0
    extra: Callable[[str], dict] = lambda model: {}

    def connect(self) -> http.client.HTTPConnection:
        url = self.url
        if "://" not in url:
            url = f"http://{url}"
        parts = urlsplit(url)
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        if parts.scheme not in kinds or not parts.hostname:
            raise PackError(
                f"--url {self.url}: is no address of a server, such as http://127.0.0.1:8080."
            )
        return kinds[parts.scheme](parts.hostname, parts.port, timeout=self.seconds)

    @property
    def headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        return headers

    def models(self) -> list[str]:
        """Return the models that the server lists; a PackError if it is no such server."""
        connection = self.connect()
        try:
            connection.request("GET", "/v1/models", headers=self.headers)
            response = connection.getresponse()
            body = response.read()
            if response.status != 200:
                raise PackError(
                    f"--url {self.url}: answers with status {response.status}.", "network"
                )

            return [str(entry["id"]) for entry in _parsed(body)["data"]]
        except (OSError, http.client.HTTPException) as error:
            raise PackError(f"--url {self.url}: does not answer ({error}).", "network") from None
        except (ValueError, KeyError, TypeError):
            raise PackError(
                f"--url {self.url}: is no server of the OpenAI API.", "network"
            ) from None
        finally:
            connection.close()


@dataclass(frozen=True)
class Load:
    """Requests of one measurement, to ``models`` one after the other, again and again.

    Each prompt begins differently, so that none is in memory already.
    """

    models: tuple[str, ...]
    concurrency: int
    requests: int
    prompt_words: int
    max_tokens: int
    seed: int = 0


@dataclass(frozen=True)
class _Answer:
    """What one request took, in seconds; ``first`` is None if it had no text."""

    first: float | None
    total: float
    tokens: int
    error: str | None


def run_load(target: Target, load: Load) -> dict:
    """Send all requests, so many at once, and return rates and latencies.

    Returns:
        ``requests``, ``errors`` (by reason), ``seconds``, ``requests_per_s``, ``tokens_per_s``, and
        ``first_token_ms`` and ``latency_ms`` with their percentiles.
    """
    answers: list[_Answer] = []
    numbers = count()
    lock = threading.Lock()

    def work() -> None:
        connection = target.connect()
        try:
            while True:
                with lock:
                    i = next(numbers)
                if i >= load.requests:
                    return
                answers.append(_ask(connection, target, _body(target, load, i)))
        finally:
            connection.close()

    threads = [threading.Thread(target=work) for _ in range(load.concurrency)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return _summary(load, answers, time.perf_counter() - began)


def _body(target: Target, load: Load, i: int) -> dict:
    drawn = random.Random(load.seed * 1_000_003 + i)
    words = [str(drawn.randrange(10_000)), *drawn.choices(_SUBJECTS, k=max(1, load.prompt_words))]
    model = load.models[i % len(load.models)]

    return {
        "model": model,
        "messages": [{"role": "user", "content": " ".join(words)}],
        "max_tokens": load.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **target.extra(model),
    }


def _ask(connection: http.client.HTTPConnection, target: Target, body: dict) -> _Answer:
    began = time.perf_counter()
    first = None
    tokens = None
    pieces = 0
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), target.headers)
        response = connection.getresponse()
        if response.status != 200:
            response.read()
            return _Answer(None, time.perf_counter() - began, 0, f"status {response.status}")

        for line in response:
            data = line.strip().removeprefix(b"data: ")
            if not line.startswith(b"data: ") or data == b"[DONE]":
                continue
            event = _parsed(data)
            if "error" in event:
                return _Answer(first, time.perf_counter() - began, 0, "error in the stream")
            if usage := event.get("usage"):
                tokens = usage["completion_tokens"]
            if any(_text(choice) for choice in event.get("choices", ())):
                first = first or time.perf_counter() - began
                pieces += 1
    except (OSError, http.client.HTTPException, ValueError) as error:
        connection.close()
        return _Answer(first, time.perf_counter() - began, 0, type(error).__name__)

    if tokens is None:  # the server does not count them
        tokens = pieces
    return _Answer(first, time.perf_counter() - began, tokens, None)


def _text(choice: dict) -> str:
    delta = choice.get("delta") or {}
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""


def _parsed(data: bytes) -> dict:
    return parse_json(data.decode())


def _summary(load: Load, answers: Sequence[_Answer], seconds: float) -> dict:
    good = [answer for answer in answers if answer.error is None]
    errors: dict[str, int] = {}
    for answer in answers:
        if answer.error is not None:
            errors[answer.error] = errors.get(answer.error, 0) + 1

    return {
        "models": list(load.models),
        "concurrency": load.concurrency,
        "requests": len(answers),
        "errors": errors,
        "seconds": round(seconds, 3),
        "requests_per_s": round(len(good) / seconds, 3),
        "tokens_per_s": round(sum(answer.tokens for answer in good) / seconds, 1),
        "first_token_ms": _percentiles([a.first for a in good if a.first is not None]),
        "latency_ms": _percentiles([answer.total for answer in good]),
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return the percentiles of times, in milliseconds; empty where there is none."""
    if not seconds:
        return {}
    if len(seconds) == 1:
        return {f"p{p}": round(1e3 * seconds[0], 1) for p in PERCENTILES}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {f"p{p}": round(1e3 * cuts[p - 1], 1) for p in PERCENTILES}
