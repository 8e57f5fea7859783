"""Files beside a base that its index does not name: no reader sees them."""

import json
import shutil

import pytest
from mlx.utils import tree_flatten

from mlx_packs.bases.files import tiny_checkpoint, weight_files
from mlx_packs.bases.fingerprint import fingerprint
from mlx_packs.bases.loading import lazy_base
from mlx_packs.bases.writer import quantize
from mlx_packs.packs.base import load_base
from mlx_packs.runtime import mx
from tests.helpers.errors import raises
from tests.helpers.models import model_of


def shards(folder, weights, number, index=True):
    """Write weights as shards, with an index or without."""
    names, where = sorted(weights), {}
    for i in range(number):
        shard = f"model-{i + 1:05d}-of-{number:05d}.safetensors"
        part = {name: weights[name] for name in names[i::number]}
        mx.save_safetensors(str(folder / shard), part, {"format": "mlx"})
        where |= dict.fromkeys(part, shard)
    if index:
        content = json.dumps({"metadata": {}, "weight_map": where})
        (folder / "model.safetensors.index.json").write_text(content)


@pytest.fixture
def weights():
    return mx.load(str(tiny_checkpoint() / "model.safetensors"))


@pytest.fixture
def clean(tmp_path, weights):
    folder = tmp_path / "clean"
    shutil.copytree(tiny_checkpoint(), folder)
    (folder / "model.safetensors").unlink()
    shards(folder, weights, 2)
    return folder


def zeros(weights):
    return {name: mx.zeros_like(w) for name, w in weights.items()}


def older_shards(folder, weights):
    shards(folder, zeros(weights), 4, index=False)


def older_single_file(folder, weights):
    mx.save_safetensors(str(folder / "model.safetensors"), zeros(weights))


def other_tensors(folder, weights):
    mx.save_safetensors(str(folder / "model-extra.safetensors"), {"other": mx.zeros((3,))})


def damaged(folder, weights):
    (folder / "model-00003-of-00004.safetensors").write_bytes(b"\xff" * 100)


@pytest.mark.parametrize("add", [older_shards, older_single_file, other_tensors, damaged])
def test_files_that_the_index_does_not_name_are_not_read(clean, weights, tmp_path, add, caplog):
    mixed = tmp_path / "mixed"
    shutil.copytree(clean, mixed)
    add(mixed, weights)
    assert [f.name for f in weight_files(mixed)] == [f.name for f in weight_files(clean)]
    assert fingerprint(mixed) == fingerprint(clean)

    expected = dict(tree_flatten(load_base(clean).model.parameters()))
    for base in (load_base(mixed), lazy_base(mixed)):
        loaded = dict(tree_flatten(base.model.parameters()))
        assert set(loaded) == set(expected)
        for name, w in expected.items():
            assert mx.array_equal(loaded[name].astype(w.dtype), w).item(), name
    assert load_base(mixed).summary() == load_base(clean).summary().replace("clean", "mixed")
    assert "not read" in caplog.text


@pytest.mark.parametrize("single", [True, False])
def test_without_an_index_a_tensor_in_two_files_is_rejected(clean, weights, single):
    (clean / "model.safetensors.index.json").unlink()
    load_base(clean)
    if single:
        older_single_file(clean, weights)
    else:
        older_shards(clean, weights)
    with raises("conflict", "model", "clean", "model-00001-of-0000"):
        load_base(clean)


def test_quantizing_reads_what_the_index_names(tmp_path):
    model, config = model_of("qwen3", vocab_size=4096)
    weights, hashes = dict(tree_flatten(model.parameters())), []
    for name in ("clean", "mixed"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny_checkpoint() / file, folder)
        shards(folder, weights, 2)
        if name == "mixed":
            older_shards(folder, weights)
        quantize(folder, tmp_path / f"quantized-{name}")
        hashes.append(fingerprint(tmp_path / f"quantized-{name}"))
    assert hashes[0] == hashes[1]
