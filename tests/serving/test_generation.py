"""Continuous batches over several packs: the texts are those that each request has alone."""

import queue
import threading
import time

import pytest

from mlx_packs import Pack
from mlx_packs.errors import PackError
from mlx_packs.inference.generate import complete, raw_prompt
from mlx_packs.serving import generation
from mlx_packs.serving.generation import Generator
from mlx_packs.serving.request import Failed, Finished, Limits, Progress, Request
from tests.helpers.errors import check
from tests.helpers.serving import SECONDS, texts_of
from tests.serving.conftest import NAMES

TEXTS = ("The list", "It was a fine day when Emma", "def", "A tuple is " * 12, "Python " * 40)


def with_packs(generator: Generator, shelf) -> Generator:
    for name in NAMES:
        generator.call(
            lambda name=name: generator.registry.add(name, Pack.open(shelf / name))
        ).result()
    return generator


def alone(base, shelf, model: str, prompt: list[int], tokens: int) -> str:
    if model == "base":
        return complete(base, prompt, tokens)
    with base.applied(shelf / model):
        return complete(base, prompt, tokens)


@pytest.fixture
def expected(shared_tiny, shelf):
    """Requests over the base and three packs, and the text of each alone."""
    models = ("base", *NAMES)
    requests = [
        (models[i % 4], raw_prompt(shared_tiny, text), 6 + i % 5)
        for i, text in enumerate(TEXTS * 2)
    ]
    return requests, [alone(shared_tiny, shelf, *request) for request in requests]


def test_texts_of_a_batch_are_those_of_each_request_alone(expected, generator, shelf):
    requests, texts = expected
    with_packs(generator, shelf)
    assert texts_of(generator, requests) == texts
    assert generator.reused < generator.prefilled
    assert texts_of(generator, requests) == texts  # with prompts that are in memory now
    assert generator.reused > 0
    assert generator.generated <= 2 * sum(tokens for _, _, tokens in requests)
    assert generator.counts == (0, 0)


@pytest.mark.slow
def test_packs_come_and_go_and_no_request_is_lost(expected, generator, shelf):
    requests, texts = expected
    with_packs(generator, shelf)
    done = threading.Event()
    swaps = []

    def swap():
        while not done.is_set():
            for name in ("other", "more"):
                pack = Pack.open(shelf / NAMES[len(swaps) % 3])
                generator.call(lambda n=name, p=pack: generator.registry.add(n, p)).result()
            generator.call(lambda: generator.registry.remove("other")).result()
            swaps.append(time.monotonic())

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        assert texts_of(generator, requests * 2) == texts * 2
    finally:
        done.set()
        thread.join()
    assert swaps


def test_requests_in_flight_end_with_the_pack_they_began_with(generator, shelf, shared_tiny):
    prompt = raw_prompt(shared_tiny, "The list of")
    expected = [alone(shared_tiny, shelf, name, prompt, 40) for name in ("notes", "law")]
    assert expected[0] != expected[1]
    with_packs(generator, shelf)
    pieces: queue.Queue = queue.Queue()
    generator.submit(Request("notes", prompt, 40, pieces.put))
    while not isinstance(pieces.get(timeout=SECONDS), Progress):
        pass
    generator.call(lambda: generator.registry.add("notes", Pack.open(shelf / "law"))).result()
    entries = generator.registry.slots._loaded
    assert sum(entry is not None for entry in entries) == 4  # three names, and the one in use
    assert texts_of(generator, [("notes", prompt, 40)]) == [expected[1]]
    while not isinstance(pieces.get(timeout=SECONDS), Finished):
        pass
    assert sum(entry is not None for entry in entries) == 3


@pytest.mark.parametrize(
    ("model", "code"),
    [
        ("other", "not-found"),
        ("notes+other:0.5", "not-found"),
        ("notes+law:much", "invalid"),
        ("base+notes", "invalid"),
        ("notes:inf", "invalid"),
        ("notes+notes", "conflict"),
        ("+".join(["notes"] * 9), "invalid"),
        ("", "not-found"),
    ],
)
def test_models_that_are_not_served(generator, shelf, model, code):
    with_packs(generator, shelf)
    (error,) = texts_of(generator, [(model, [5, 6], 3)])
    assert isinstance(error, PackError)
    check(error, code)
    assert texts_of(generator, [("notes", [5, 6], 3)])[0] != ""


def test_weighted_sums_are_those_of_applied_packs(generator, shelf, shared_tiny):
    prompt = raw_prompt(shared_tiny, "The list of")
    weights = {shelf / "notes": 1.0, shelf / "law": 0.3}
    with shared_tiny.applied(weights):
        expected = complete(shared_tiny, prompt, 12)
    with_packs(generator, shelf)
    assert texts_of(generator, [("notes+law:0.3", prompt, 12)] * 2) == [expected] * 2
    assert generator.call(lambda: list(generator.registry._sums)).result() == ["notes+law:0.3"]
    generator.call(lambda: generator.registry.remove("law")).result()
    assert generator.call(lambda: list(generator.registry._sums)).result() == []


def test_sums_that_nobody_uses_make_room(generator, shelf):
    with_packs(generator, shelf)
    requests = [(f"notes+law:0.{i}", [5, 6], 1) for i in range(1, 10)]
    for request in requests:
        assert isinstance(texts_of(generator, [request])[0], str)
    sums = generator.call(lambda: list(generator.registry._sums)).result()
    assert len(sums) == 8 and sums[-1] == "notes+law:0.9"


def test_sums_that_were_used_all_at_once_make_room_later(generator, shelf):
    registry = with_packs(generator, shelf).registry

    def use():
        entries = [registry.lease(f"notes+law:0.{i}") for i in range(1, 10)]
        entries += [registry.lease(f"notes+law:1.{i}") for i in range(1, 4)]
        assert len(registry._sums) == 12
        for entry in entries:
            registry.release(entry)
        registry.release(registry.lease("notes+law:2"))
        return len(registry._sums), sum(e is not None for e in registry.slots._loaded)

    assert generator.call(use).result() == (8, 11)


def test_keys_and_values_wait_for_room(shared_tiny):
    """With room for two requests, ten are computed two at a time."""
    one = Generator(shared_tiny, Limits(8, 64, 1 << 30, 64, 2048))
    one.start()
    room = one.call(lambda: one.kv_bytes(2, 30)).result()
    one.close(0.0)
    worker = Generator(shared_tiny, Limits(8, 64, room, 64, 2048))
    most = 0

    def step(original=worker.step):
        nonlocal most
        original()
        most = max(most, len(worker._running))

    worker.step = step
    worker.start()
    try:
        texts = texts_of(worker, [("base", [5, 6, 7, i], 20) for i in range(10)])
        assert all(isinstance(text, str) for text in texts) and most == 2
        (error,) = texts_of(worker, [("base", [5] * 600, 20)])
        check(error, "memory", "max_tokens")
    finally:
        worker.close(0.0)


def test_limits_of_queue_context_and_time(shared_tiny):
    worker = Generator(shared_tiny, Limits(1, 2, 1 << 30, 64, 100))
    worker.start()
    try:
        answers = texts_of(worker, [("base", [5, 6], 30)] * 8)
        errors = [answer for answer in answers if isinstance(answer, PackError)]
        assert 4 <= len(errors) <= 6
        for error in errors:
            check(error, "busy")
        (error,) = texts_of(worker, [("base", [5] * 90, 11)])
        check(error, "invalid", "messages", "90", "100")
        (error,) = texts_of(worker, [("base", [5, 6], 90)], deadline=time.monotonic())
        check(error, "timeout")
    finally:
        worker.close(0.0)


def test_a_cancelled_request_leaves_the_batch(generator):
    events: queue.Queue = queue.Queue()
    request = Request("base", [5, 6], 2000, events.put)
    generator.submit(request)
    while not isinstance(events.get(timeout=SECONDS), Progress):
        pass
    generator.cancel(request)
    assert generator.call(lambda: generator.counts).result() == (0, 0)
    generator.cancel(request)  # again: nothing happens
    assert texts_of(generator, [("base", [5, 6], 3)])[0] != ""


def test_an_error_ends_its_own_request_alone(generator):
    def breaks(tokens, logits):
        raise ValueError("broken")

    good: queue.Queue = queue.Queue()
    generator.submit(Request("base", [5, 6], 30, good.put))
    (error,) = texts_of(generator, [("base", [5, 6], 30)], processors=[breaks])
    assert isinstance(error, ValueError)
    while not isinstance(event := good.get(timeout=SECONDS), (Finished, Failed)):
        pass
    assert isinstance(event, Finished)


def test_a_failed_step_ends_its_requests_and_the_next_is_computed(generator, monkeypatch):
    before = texts_of(generator, [("base", [5, 6], 5)])

    def fails():
        monkeypatch.undo()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(generator._generator, "next", fails)
    (error,) = texts_of(generator, [("base", [5, 6], 5)])
    assert isinstance(error, RuntimeError)
    assert texts_of(generator, [("base", [5, 6], 5)]) == before


def test_closing_tells_every_request(shared_tiny, limits):
    worker = Generator(shared_tiny, limits)
    worker.start()
    events: queue.Queue = queue.Queue()
    for _ in range(20):
        worker.submit(Request("base", [5, 6], 1900, events.put))
    worker.close(0.0)
    ended = [e for e in iter(lambda: events.get_nowait() if events.qsize() else None, None)]
    failures = [e for e in ended if isinstance(e, Failed)]
    assert len(failures) == 20
    assert not worker.is_alive
    assert not [m for m in shared_tiny.model.modules() if type(m).__name__ == "ServedLoRA"]


def test_stop_strings_end_the_text_and_are_not_part_of_it(generator, shared_tiny):
    prompt = raw_prompt(shared_tiny, "The list of")
    (text,) = texts_of(generator, [("base", prompt, 30)])
    for stop in (text[5:8], text[10:11], text[:1], "never there"):
        expected = text.partition(stop)[0]
        assert texts_of(generator, [("base", prompt, 30)], stop=[stop]) == [expected]


def test_a_full_batch_takes_several_requests_at_a_time(shared_tiny, limits):
    """Places that become free one after the other wait for each other, but not for long."""
    worker = Generator(shared_tiny, limits)
    admitted, idle = [], []
    admit = worker._admit

    def counted():
        before = len(worker._running)
        admit()
        admitted.append(len(worker._running) - before)
        idle.append(bool(worker._waiting) and len(worker._running) < limits.batch_size)

    worker._admit = counted
    worker.start()
    try:
        requests = [("base", [5, 6, 7], 3 + i % 8) for i in range(32)]
        assert all(isinstance(text, str) for text in texts_of(worker, requests))
    finally:
        worker.close(0.0)
    groups = [n for n in admitted if n]
    assert sum(groups) == 32 and len(groups) < 16 and max(groups) >= 2
    longest = max(len(run) for run in "".join("x" if i else " " for i in idle).split())
    assert longest <= generation._PASSED_OVER
