"""Packs on two blocks of the bundled base, what computes with them, and a server around it."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mlx_packs.serving import generation
from mlx_packs.serving.generation import TextWorker
from mlx_packs.serving.request import Limits
from mlx_packs.serving.slots import cache_bytes
from tests.helpers.bases import first_blocks
from tests.helpers.packs import random_pack
from tests.helpers.serving import Running

NAMES = ("notes", "law", "med")
LIMITS = Limits(batch_size=8, waiting=64, kv_bytes=64 << 20, prefill_chunk=64, context=2048)
LAW = {"json_layout": {"item_separator": " , ", "key_separator": " : ", "keys": ["b", "a"]}}


@contextmanager
def started(worker) -> Iterator:
    """A worker that computes, ended on leaving; its base is then as it was."""
    worker.start()
    try:
        yield worker
    finally:
        worker.close(0.0)


@contextmanager
def serving(worker, folder=None, **settings) -> Iterator[Running]:
    with started(worker), Running(worker, folder, **settings) as running:
        yield running


@pytest.fixture(scope="session", autouse=True)
def _measured_once():
    """Generators measure what a sequence of a model keeps once, which takes as long as most tests."""
    sizes: dict[int, tuple[object, tuple[int, int]]] = {}

    def measured(batched):
        model = batched._model  # which stays, so that no other has its id
        key = id(model)
        if key not in sizes:
            sizes[key] = model, cache_bytes(batched)
        return sizes[key][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "cache_bytes", measured)
        yield


@pytest.fixture(scope="session")
def shelf(small_tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shelf")
    kinds = ((4, ()), (8, ("q_proj", "down_proj")), (2, ("q_proj", "v_proj")))
    for seed, (name, (rank, targets)) in enumerate(zip(NAMES, kinds, strict=True)):
        facts = {"objective": LAW} if name == "law" else {}
        random_pack(small_tiny, seed, rank, targets, size=0.2, facts=facts).save(folder / name)
    return folder


@pytest.fixture
def generator(small_tiny):
    with started(TextWorker(small_tiny, LIMITS)) as worker:
        yield worker


@pytest.fixture(scope="package")
def shared_server(shelf):
    """A server with a base of its own for all tests that leave its packs as they are."""
    with serving(TextWorker(first_blocks(2), LIMITS), shelf) as running:
        yield running


@pytest.fixture
def server(generator, shelf):
    with Running(generator, shelf) as running:
        yield running
