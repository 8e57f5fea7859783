"""A few seconds of the mixed load of a server; the benchmark itself takes an hour."""

import argparse

import pytest

from benchmarks.mixed_load import CLIENTS, MixedLoad, served
from mlx_packs.bases.files import TINY

pytestmark = [pytest.mark.interop, pytest.mark.nightly, pytest.mark.filterwarnings("default")]


def test_nothing_is_lost_or_different(tmp_path):
    options = argparse.Namespace(model=TINY, minutes=0.15)
    more = ["--train", str(tmp_path / "states"), "--learn", str(tmp_path / "learned")]
    load, samples, state = served(options, MixedLoad, more)

    assert load.wrong == [] and not [each for each in load.outcomes if each.startswith("lost")]
    assert load.outcomes["answered"] >= CLIENTS and load.outcomes["trained"] >= 2
    assert load.outcomes["rated"] and samples and state["running"] == state["waiting"] == 0
    rows = (tmp_path / "learned" / "kto.jsonl").read_text(encoding="utf-8").splitlines()
    corrected = (tmp_path / "learned" / "dpo.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(rows) + len(corrected) == load.outcomes["rated"]
