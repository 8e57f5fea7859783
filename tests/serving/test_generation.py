"""Continuous batches over several packs: the texts are those that each request has alone."""

import queue
from functools import partial

import pytest

from mlx_packs import Pack
from mlx_packs.inference.generate import complete, raw_prompt
from mlx_packs.serving.generation import TextWorker
from mlx_packs.serving.request import Finished, Limits, Progress, TextRequest
from tests.helpers.errors import check
from tests.helpers.serving import SECONDS, texts_of
from tests.serving.conftest import LIMITS, NAMES, started

TEXTS = ("The list", "It was a fine day when Emma", "def", "A tuple is " * 12, "Python " * 40)


class Panic(BaseException):
    """What a library in Rust raises where it is broken."""


def until_event(events: queue.Queue, *kinds: type) -> object:
    while not isinstance(event := events.get(timeout=SECONDS), kinds):
        pass
    return event


def with_packs(generator: TextWorker, shelf) -> None:
    for name in NAMES:
        add = partial(generator.registry.add, name, Pack.open(shelf / name))
        generator.call(add).result()


def alone(base, shelf, model: str, prompt: list[int], tokens: int) -> str:
    if model == "base":
        return complete(base, prompt, tokens)
    with base.applied(shelf / model):
        return complete(base, prompt, tokens)


@pytest.fixture
def expected(small_tiny, shelf):
    """Requests over the base and three packs, and the text of each alone."""
    models = ("base", *NAMES)
    requests = [
        (models[i % 4], raw_prompt(small_tiny, text), 6 + i % 5) for i, text in enumerate(TEXTS * 2)
    ]
    return requests, [alone(small_tiny, shelf, *request) for request in requests]


def test_texts_of_a_batch_are_those_of_each_request_alone(expected, generator, shelf):
    requests, texts = expected
    with_packs(generator, shelf)
    assert texts_of(generator, requests) == texts
    assert texts_of(generator, requests) == texts  # with prompts that are in memory now
    assert generator.counts == (0, 0)


@pytest.mark.slow
def test_requests_in_flight_end_with_the_pack_they_began_with(generator, shelf, small_tiny):
    prompt = raw_prompt(small_tiny, "It was a fine day when Emma")
    expected = [alone(small_tiny, shelf, name, prompt, 40) for name in ("notes", "law")]
    assert expected[0] != expected[1]
    with_packs(generator, shelf)
    pieces: queue.Queue = queue.Queue()
    generator.submit(TextRequest("notes", prompt, 40, pieces.put))
    until_event(pieces, Progress)
    generator.call(lambda: generator.registry.add("notes", Pack.open(shelf / "law"))).result()
    entries = generator.registry.slots._loaded
    assert sum(entry is not None for entry in entries) == 4  # three names, and the one in use
    assert texts_of(generator, [("notes", prompt, 40)]) == [expected[1]]
    until_event(pieces, Finished)
    assert sum(entry is not None for entry in entries) == 3


def test_keys_and_values_wait_for_room(small_tiny):
    """With room for two requests, five are computed two at a time."""
    with started(TextWorker(small_tiny, Limits(8, 64, 1 << 30, 64, 2048))) as one:
        room = one.call(lambda: one.kv_bytes(2, 12)).result()
    worker = TextWorker(small_tiny, Limits(8, 64, room, 64, 2048))
    most = 0

    def step(original=worker.step):
        nonlocal most
        original()
        most = max(most, len(worker._running))

    worker.step = step
    with started(worker):
        texts = texts_of(worker, [("base", [5, 6, 7, i], 6) for i in range(5)])
        assert all(isinstance(text, str) for text in texts) and most == 2
        (error,) = texts_of(worker, [("base", [5] * 600, 20)])
        check(error, "memory", "max_tokens")


@pytest.mark.parametrize("error", [ValueError, Panic])
def test_an_error_ends_its_own_request_alone(shared_server, error):
    def breaks(tokens, logits):
        raise error("broken")

    good: queue.Queue = queue.Queue()
    shared_server.worker.submit(TextRequest("base", [5, 6], 10, good.put))
    (failure,) = texts_of(shared_server.worker, [("base", [5, 6], 10)], processors=[breaks])
    assert isinstance(failure, Exception)
    assert isinstance(until_event(good, Finished, Exception), Finished)


@pytest.mark.parametrize("error", [RuntimeError, Panic])
def test_a_failed_step_ends_its_requests_and_the_next_is_computed(generator, monkeypatch, error):
    before = texts_of(generator, [("base", [5, 6], 5)])

    def fails():
        monkeypatch.undo()
        raise error("out of memory")

    monkeypatch.setattr(generator._generator, "next", fails)
    (failure,) = texts_of(generator, [("base", [5, 6], 5)])
    assert isinstance(failure, Exception)
    assert texts_of(generator, [("base", [5, 6], 5)]) == before


def test_closing_tells_every_request(small_tiny):
    worker = TextWorker(small_tiny, LIMITS)
    worker.start()
    events: queue.Queue = queue.Queue()
    for _ in range(20):
        worker.submit(TextRequest("base", [5, 6], 1900, events.put))
    worker.close(0.0)
    assert sum(isinstance(events.get_nowait(), Exception) for _ in range(events.qsize())) == 20
    assert not worker.is_alive
    assert not [m for m in small_tiny.model.modules() if type(m).__name__ == "ServedLoRA"]
