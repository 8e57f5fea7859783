"""Fixtures: small bases that take images, and a cache for each test."""

from functools import cache

import pytest

from tests.helpers.vision_bases import write_vision_base


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """Writes a base of each family once; tests only read it."""
    return cache(lambda family: write_vision_base(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_PACKS_CACHE", str(tmp_path / "cache"))
