"""Files beside a base that its index does not name: no reader sees them."""

import shutil

import pytest
from mlx.utils import tree_flatten

from mlx_packs.bases.files import weight_files
from mlx_packs.bases.fingerprint import fingerprint
from mlx_packs.bases.loading import lazy_base
from mlx_packs.packs.base import load_base
from mlx_packs.runtime import mx
from tests.helpers.checkpoints import write_stored
from tests.helpers.errors import raises


def shards(folder, weights, number):
    """Write weights as shards without an index."""
    for i in range(number):
        name = f"model-{i + 1:05d}-of-{number:05d}.safetensors"
        part = {key: weights[key] for key in sorted(weights)[i::number]}
        mx.save_safetensors(str(folder / name), part, {"format": "mlx"})


@pytest.fixture
def clean(tmp_path):
    """A checkpoint of two shards."""
    return write_stored(tmp_path / "clean", shards=2)


def zeros(folder):
    weights = {n: w for file in folder.glob("*-of-00002*") for n, w in mx.load(str(file)).items()}
    return {name: mx.zeros_like(w) for name, w in weights.items()}


def older_shards(folder):
    shards(folder, zeros(folder), 4)


def older_single_file(folder):
    mx.save_safetensors(str(folder / "model.safetensors"), zeros(folder))


def other_tensors(folder):
    mx.save_safetensors(str(folder / "model-extra.safetensors"), {"other": mx.zeros((3,))})


@pytest.mark.parametrize("add", [older_shards, older_single_file, other_tensors])
def test_files_that_the_index_does_not_name_are_not_read(clean, tmp_path, add, caplog):
    mixed = shutil.copytree(clean, tmp_path / "mixed")
    add(mixed)
    assert [f.name for f in weight_files(mixed)] == [f.name for f in weight_files(clean)]
    assert fingerprint(mixed) == fingerprint(clean)

    plain, loaded = load_base(clean), load_base(mixed)
    expected = dict(tree_flatten(plain.model.parameters()))
    for base in (loaded, lazy_base(mixed)):
        weights = dict(tree_flatten(base.model.parameters()))
        assert set(weights) == set(expected)
        assert all(mx.array_equal(weights[name], w).item() for name, w in expected.items())
    assert loaded.summary() == plain.summary().replace("clean", "mixed")
    assert "not read" in caplog.text


@pytest.mark.parametrize("add", [older_shards, older_single_file])
def test_without_an_index_a_tensor_in_two_files_is_rejected(clean, add):
    (clean / "model.safetensors.index.json").unlink()
    load_base(clean)
    add(clean)
    with raises("conflict", "model", "clean", "model-00001-of-0000"):
        load_base(clean)
