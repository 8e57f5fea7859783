"""A server at its limits while everything around it goes wrong: each request has one outcome."""

import argparse
import os
import sys

import pytest

from benchmarks import serve_soak
from mlx_packs.bases.files import TINY
from tests.helpers.serving import until

KINDS = ("answered", "status 404", "status 429", "status 500")
KINDS += ("vanished", "read slowly", "swapped", "broken steps")


class Soak(serve_soak.Soak):
    """Clients of a server, whose open files are no more at the end than at the start."""

    def run(self, seconds: float) -> list[tuple[float, float]]:
        before = self.open_files()
        samples = super().run(seconds)
        until(lambda: self.open_files() <= before + 1)
        return samples

    def open_files(self) -> int:
        if sys.platform != "linux":
            return 0
        return len(os.listdir(f"/proc/{self.server.pid}/fd"))


@pytest.mark.slow
def test_every_request_has_one_outcome(monkeypatch):
    monkeypatch.setattr(serve_soak, "FLOOD_S", 1.0)
    monkeypatch.setattr(serve_soak, "BREAK_S", 1.0)
    options = argparse.Namespace(model=TINY, minutes=0.15)
    soak, _, state = serve_soak.served(options, Soak)

    assert soak.wrong == [] and state == {"status": "ok", "running": 0, "waiting": 0}
    assert {*KINDS} <= set(soak.outcomes) <= {*KINDS, "half open"}, soak.outcomes
