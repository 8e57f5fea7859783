"""Observers that tests add to a run."""

from collections.abc import Callable

import pytest

from mlx_packs.training.observer import Observer
from mlx_packs.training.observers import OBSERVERS


def observe(monkeypatch: pytest.MonkeyPatch, **events: Callable[..., None]) -> None:
    """Let runs call functions at events, as in ``observe(monkeypatch, on_step=print)``."""
    methods = {name: staticmethod(function) for name, function in events.items()}
    assert all(hasattr(Observer, name) for name in methods)
    observer = type("TestObserver", (Observer,), methods)()
    monkeypatch.setitem(OBSERVERS, "test", lambda run: observer)
