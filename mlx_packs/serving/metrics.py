"""What a server counts, as Prometheus reads it."""

from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from ..runtime import mx

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    media_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._all = CollectorRegistry()

        def made(kind: Any, name: str, text: str, labels: tuple[str, ...] = (), **more: Any) -> Any:
            return kind(f"mlx_packs_{name}", text, labels, registry=self._all, **more)

        self._requests = made(
            Counter, "requests", "Requests by route and status.", ("route", "status")
        )
        self._took = made(Histogram, "request_seconds", "Seconds of a request.", buckets=_SECONDS)
        self.first = made(
            Histogram, "place_seconds", "Seconds until a request has its place.", buckets=_SECONDS
        )
        self._tokens = made(
            Gauge,
            "tokens",
            "Tokens so far: generated, of prompts, of prompts in memory.",
            ("kind",),
        )
        self._running = made(Gauge, "running", "Requests that are computed.")
        self._waiting = made(Gauge, "waiting", "Requests that wait for a place.")
        self._packs = made(Gauge, "packs", "Packs that are served.")
        self._memory = made(Gauge, "memory_bytes", "Bytes in memory.", ("kind",))
        self._passes = made(
            Gauge, "training_passes", "Forward passes of models in training so far."
        )
        self._steps = made(Gauge, "steps", "Forward passes so far.")

        self._answered = 0
        self._seconds = 0.0

    def count(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, status).inc()
        self._took.observe(seconds)
        if route.endswith("completions") and status == 200:
            self._answered += 1
            self._seconds += seconds

    def seconds_per_request(self) -> float:
        """Return how long an answered request took on average; 1 before the first."""
        if not self._answered:
            return 1.0
        return self._seconds / self._answered

    def text(self, worker: Any, passes: int) -> bytes:
        """Return all numbers in Prometheus's text format.

        ``worker`` gives those of now; ``passes`` are of training.
        """
        running, waiting = worker.counts
        self._running.set(running)
        self._waiting.set(waiting)
        self._packs.set(len(worker.registry.packs))
        self._steps.set(worker.steps)
        self._passes.set(passes)

        for kind, value in (
            ("generated", worker.generated),
            ("prompt", worker.prefilled),
            ("prompt_cached", worker.reused),
        ):
            self._tokens.labels(kind).set(value)
        for kind, value in (
            ("mlx_active", mx.get_active_memory()),
            ("adapters", worker.registry.slots.nbytes),
            ("cached_prompts", worker.cached_bytes),
        ):
            self._memory.labels(kind).set(value)

        return generate_latest(self._all)
