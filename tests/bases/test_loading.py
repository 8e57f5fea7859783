"""Loading a base: every storage that mlx-lm reads, offline first, one line for what is wrong."""

import shutil
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from mlx_packs.bases.files import resolve_checkpoint, weight_files
from mlx_packs.bases.fingerprint import fingerprint
from mlx_packs.bases.loading import lazy_base
from mlx_packs.nn.frozen_weight import frozen_weight
from mlx_packs.nn.quantized import quantized_modules
from mlx_packs.packs.base import load_base
from mlx_packs.runtime import mx
from tests.bases.changes import set_keys, tensors_of
from tests.helpers.checkpoints import write_stored
from tests.helpers.errors import raises

TOKENS = mx.array([[1, 2, 3, 4, 5]])


@pytest.fixture
def checkpoint(tmp_path):
    """Write a small Qwen3 checkpoint; return its folder."""
    return lambda name="base", **options: write_stored(tmp_path / name, **options)


@pytest.fixture
def no_network(monkeypatch):
    """Any use of a socket is counted and fails as it does on a machine without network."""
    attempts = []

    def refuse(*arguments, **_):
        attempts.append(arguments)
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    return attempts


@pytest.fixture
def hub_cache(tmp_path, monkeypatch) -> Path:
    """An empty Hugging Face cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "hub").mkdir()
    return tmp_path / "hub"


@pytest.mark.parametrize(
    "stored",
    [
        {"bits": 4, "shards": 3},
        {"bits": 4, "finer": ["model.layers.1.mlp.down_proj"]},
        {"dtype": mx.bfloat16},
        {"dtype": mx.float16},
        {"dtype": mx.float32},
    ],
    ids=["sharded", "mixed", "bf16", "fp16", "fp32"],
)
def test_load_base_computes_what_mlx_lm_computes(checkpoint, stored):
    folder = checkpoint(**stored)
    base = load_base(folder)
    reference, _ = load_model(folder)
    reference.set_dtype(mx.float32)
    assert mx.allclose(base.model(TOKENS), reference(TOKENS), atol=1e-4)
    assert not base.model.trainable_parameters()["model"]["layers"][0]["self_attn"]["q_proj"]
    if bits := stored.get("bits"):
        assert base.model.layers[0].self_attn.q_proj.bits == bits
        assert base.quantization["bits"] == bits and f"{bits}-bit" in base.summary()
    if "finer" in stored:
        down = base.model.layers[1].mlp.down_proj
        assert [down.bits, down.group_size] == [8, 64]


def test_the_error_of_quantizing_is_measured_and_shown(checkpoint):
    folder = checkpoint()
    plain = load_base(folder)
    dense = dict(plain.model.named_modules())
    base = load_base(folder, quantize="nf4")
    change = total = 0.0
    for path, module in quantized_modules(base.model):
        weight = np.array(dense[path].weight)
        change += ((np.array(frozen_weight(module).dense()) - weight) ** 2).sum()
        total += (weight**2).sum()
    assert base.rounding_error == pytest.approx((change / total) ** 0.5, rel=0.02)
    shown = f"relative error of the weights {100 * base.rounding_error:.1f} %"
    assert shown in base.summary() and "relative" not in plain.summary()


def test_load_base_rejects_quantizing_twice(checkpoint):
    folder = checkpoint(bits=4)
    set_keys(folder / "config.json", quantization=None)
    with raises("conflict", "quantize", ".weight is U32"):
        load_base(folder, quantize="nf4")


def test_a_config_that_transformers_rejects_is_one_line(checkpoint):
    with raises("unreadable", None, "tokenizer", "head_dim"):
        load_base(checkpoint(head_dim=33))


LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn"}
ROPE = {"factor": 8.0, "original_max_position_embeddings": 512, "rope_theta": 10000.0}


@pytest.mark.parametrize("scaling", [LLAMA3, YARN], ids=["llama3", "yarn"])
def test_a_loaded_base_computes_in_any_thread(checkpoint, scaling):
    """A server computes in a thread of its own, where rope's frequencies must be known already."""
    folder = checkpoint(rope_scaling=scaling | ROPE)
    expected = np.array(load_base(folder).model(TOKENS))

    base = load_base(folder)
    found = []
    thread = threading.Thread(target=lambda: found.append(np.array(base.model(TOKENS))))
    thread.start()
    thread.join()
    assert np.array_equal(found[0], expected)


def test_load_base_of_a_folder_never_touches_the_network(checkpoint, no_network):
    load_base(checkpoint())
    assert no_network == []


def test_load_base_of_a_cached_hub_id_never_touches_the_network(checkpoint, hub_cache, no_network):
    stored = hub_cache / "models--some--model"
    (stored / "refs").mkdir(parents=True)
    (stored / "refs" / "main").write_text("0" * 40)
    cached = shutil.copytree(checkpoint(shards=2), stored / "snapshots" / ("0" * 40))
    base = load_base("some/model")
    assert base.path == cached and base.name == "some/model" and no_network == []
    (cached / SHARD).unlink()
    with raises("network", "model", "only in part", "`hf download some/model`"):
        load_base("some/model")


def test_load_base_missing_hub_id_says_what_to_do_at_once(hub_cache, no_network, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
    with raises("network", "model", "some/model", "`hf download some/model`") as error:
        load_base("some/model")
    assert no_network and "\n" not in error.value.message


@pytest.mark.parametrize(
    ("name", "code", "part"),
    [
        ("Qwen3-4B-4bit", "not-found", "'mlx-community/Qwen3-4B-4bit'"),
        ("a/b/c", "not-found", "owner/name"),
        ("x" * 300, "not-found", "owner/name"),
        ("", "invalid", "'tiny'"),
    ],
)
def test_resolve_checkpoint_names_what_is_no_model(no_network, name, code, part):
    with raises(code, "model", name, part):
        resolve_checkpoint(name)
    assert no_network == []


def written(name: str, text: str):
    return lambda folder: (folder / name).write_text(text)


def removed(pattern: str):
    return lambda folder: [file.unlink() for file in folder.glob(pattern)]


def with_config(**changes):
    return lambda folder: set_keys(folder / "config.json", **changes)


def cut(name: str):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-100])


INDEX, SHARD = "model.safetensors.index.json", "model-00002-of-00002.safetensors"
BROKEN = {
    "no_config": (removed("config.json"), "not-found", "config.json"),
    "config_empty": (written("config.json", "{}"), "unreadable", "model_type"),
    "other_width": (with_config(hidden_size=96), "unreadable", "Expected shape"),
    "more_blocks": (with_config(num_hidden_layers=3), "unreadable", "Missing"),
    "fewer_blocks": (with_config(num_hidden_layers=1), "unreadable", "Received"),
    "truncated": (cut(SHARD), "unreadable", SHARD),
    "missing_shard": (removed(SHARD), "unreadable", SHARD),
    "no_weights": (removed("*.safetensors"), "not-found", "model*.safetensors"),
    "index_no_index": (written(INDEX, "{}"), "unreadable", INDEX),
    "no_tokenizer": (removed("tokenizer*"), "not-found", "tokenizer.json"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_load_base_names_folder_and_fault(checkpoint, no_network, fault):
    folder = checkpoint(shards=2)
    break_it, code, part = BROKEN[fault]
    break_it(folder)
    with raises(code, None, str(folder), part) as error:
        load_base(folder)
    assert "\n" not in error.value.message and len(error.value.message) < 700
    assert no_network == []


@pytest.fixture
def clean(checkpoint):
    """A checkpoint of two shards."""
    return checkpoint("clean", shards=2)


def zeros(folder):
    return {name: mx.zeros_like(tensor) for name, tensor in tensors_of(folder).items()}


def older_shards(folder):
    weights = zeros(folder)
    for i in range(4):
        part = {name: weights[name] for name in sorted(weights)[i::4]}
        mx.save_safetensors(str(folder / f"model-{i + 1:05d}-of-00004.safetensors"), part)


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
