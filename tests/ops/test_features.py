"""Kernels that an older MLX lacks: looked for, named with the version, once a run, and not on CPUs."""

import pytest

from mlx_packs import train_pack
from mlx_packs.ops import features
from mlx_packs.runtime import mx
from mlx_packs.training.precision import say_what_mlx_lacks
from tests.helpers.families import family_base
from tests.helpers.rows import CHATS
from tests.helpers.runs import LORA, TRAIN, Lines

ALL = (features.ATTENTION, features.CROSS_ENTROPY, features.GATED_DELTA)


@pytest.fixture
def older(monkeypatch):
    """Metal with an MLX that has none of the kernels."""
    monkeypatch.setattr(features.dispatch, "detect", lambda: "metal")
    monkeypatch.setattr(features, "has_fused_gradient", lambda *_: False)
    for name in ("cross_entropy", "gated_delta_update"):
        monkeypatch.delattr(mx.fast, name, raising=False)


def test_all_that_is_missing_is_one_line_with_the_version(older):
    line = features.missing(ALL)
    for feature in ALL:
        assert feature.name in line
    assert "MLX 0.32.4 has it" in line and "\n" not in line


def test_a_newer_mlx_and_a_cpu_say_nothing(monkeypatch):
    assert features.missing(ALL) is None
    monkeypatch.setattr(features.dispatch, "detect", lambda: "metal")
    monkeypatch.setattr(features, "has_fused_gradient", lambda *_: True)
    assert features.missing(ALL) is None


def test_cuda_needs_no_kernel_of_metal(older, monkeypatch):
    monkeypatch.setattr(features.dispatch, "detect", lambda: "cuda")
    line = features.missing(ALL)
    assert "cross_entropy" in line and "attention" not in line and "gated" not in line


def test_a_run_says_once_what_its_base_would_use(tiny, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(features, "missing", lambda wanted: asked.append(wanted) or "an old one")
    display = Lines()
    train_pack(tiny, CHATS, LORA, TRAIN, tmp_path / "pack", display=display)
    assert display.lines.count("mlx an old one") == 1
    assert asked == [ALL[:2]]


def test_a_hybrid_base_asks_for_its_recurrence_too(monkeypatch):
    asked = []
    monkeypatch.setattr(features, "missing", lambda wanted: asked.append(wanted))
    run = type("Run", (), {"display": Lines()})
    say_what_mlx_lacks(family_base("qwen3_next"), run)
    assert asked == [ALL] and run.display.lines == []
