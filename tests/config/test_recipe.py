"""Recipes that older versions wrote are read by the names of today."""

import json
from pathlib import Path

import pytest

from mlx_packs.config.fields import read_settings
from mlx_packs.config.recipe import resolve
from mlx_packs.packs.pack import Pack
from mlx_packs.training.run_folder import read_identity
from tests.helpers.errors import check, raises

OLD_KEYS = {
    "matmul_path": "base_path",
    "matmul_path_ms": "base_path_ms",
    "cache_frozen": "cache_prefix",
}


@pytest.fixture
def older(trained_copy) -> Path:
    """A run and its pack, with the keys that an older version wrote."""
    for file, parts in (("o/pack.json", ["recipe", "measured"]), ("o-run/config.json", ["recipe"])):
        values = json.loads((trained_copy / file).read_text())
        for part in parts:
            values[part] = {OLD_KEYS.get(key, key): v for key, v in values[part].items()}
            assert "base_path" in values[part]
        del values["sha256"]
        (trained_copy / file).write_text(json.dumps(values))
    return trained_copy


def test_manifest_of_an_older_pack_has_the_names_of_today(trained, older):
    today, before = Pack.open(trained / "o"), Pack.open(older / "o")
    assert before._part("recipe") == today._part("recipe")
    assert before._part("measured") == today._part("measured")
    assert before._part("measured")["matmul_path"] == "dense"


def test_identity_of_an_older_run_has_the_names_of_today(trained, older):
    assert read_identity(older / "o-run") == read_identity(trained / "o-run")


def test_older_run_goes_on_with_its_own_settings(run, trained, older):
    code, _, _ = run("train", "--resume", "--out", "o", "--iters", 3)
    assert code == 0
    recipe = Pack.open("o")._part("recipe")
    assert (recipe["matmul_path"], recipe["iters"]) == ("dense", 3)
    assert not {"base_path", "cache_prefix"} & set(recipe)


@pytest.mark.parametrize("name", ["matmul_path", "cache_frozen"])
def test_old_name_of_a_setting_is_unknown_and_the_new_one_named(run, tmp_path, name):
    old = OLD_KEYS[name]
    flag, new = (f"--{key.replace('_', '-')}" for key in (old, name))
    run("train", flag, "auto")
    check(run.error, "unknown", old, new)
    (tmp_path / "c.yaml").write_text(f"{old}: auto\n")
    with raises("unknown", old, name):
        resolve(read_settings(tmp_path / "c.yaml"), "c.yaml")
    with raises("unknown", None, name):
        resolve({old: "auto"})
