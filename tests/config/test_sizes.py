"""Sizes as people write them, and what of a Mac's memory MLX may use."""

import pytest

from mlx_packs.cli.main import packs
from mlx_packs.config.values import bytes_of
from mlx_packs.runtime import metal_share
from tests.helpers.errors import raises


@pytest.mark.parametrize(
    ("text", "count"),
    [("8", 8e9), ("8 GB", 8e9), ("8G", 8e9), (".5", 5e8), ("2GiB", 2 * 2**30), ("100kb", 1e5)]
    + [("7B", 7), *((text, None) for text in ("", "GB", "-1", "8 x", "1e3", "inf", "9" * 400))],
)
def test_a_size_is_a_number_and_a_unit(text, count):
    assert bytes_of(text, "GB") == count


@pytest.mark.parametrize(
    ("gib", "logged"),
    [(16, 11453.25), (32, 22906.50), (36, 28991.03)],
)
def test_metals_share_is_what_macs_log(gib, logged):
    assert metal_share(gib << 30) / 1e6 == pytest.approx(logged, abs=0.1)


def planned(capsys, *arguments: str) -> str:
    packs(["plan", *arguments], standalone_mode=False)
    return capsys.readouterr().out


def test_memory_of_a_mac_is_what_metal_gives_of_it(capsys):
    assert "memory  17.2 GB: " in planned(capsys, "--memory", "24", "--device", "gpu")
    assert "memory  " not in planned(capsys, "--budget", "24GB", "--device", "gpu")
    assert "memory  " not in planned(capsys, "--memory", "24", "--device", "cpu")


def test_one_of_memory_and_budget_is_given():
    with raises("conflict", "budget"):
        packs(["plan", "--memory", "8", "--budget", "8"], standalone_mode=False)
    with raises("invalid", "budget"):
        packs(["plan", "--budget", "lots"], standalone_mode=False)
