"""Inputs that fuzzing found to end in a traceback, hang or worse: each is rejected in one line now."""

import json
import os
import shutil
from contextlib import suppress

import pytest

from mlx_packs.bases.files import tiny_checkpoint
from mlx_packs.bases.loading import lazy_base
from mlx_packs.bases.tokenizer import load_tokenizer
from mlx_packs.config.recipe import resolve
from mlx_packs.errors import PackError
from mlx_packs.inference.generate import stream
from mlx_packs.packs.base import load_base
from mlx_packs.packs.share import pull
from mlx_packs.training.run_folder import RunFolder
from tests.bases.changes import change_tensors, set_keys
from tests.fuzz.subjects import write_tokenizer
from tests.helpers.checkpoints import write_checkpoint, write_quantized
from tests.helpers.encoders import write_encoder
from tests.helpers.errors import raises
from tests.helpers.gguf_file import write_tiny
from tests.helpers.local_hub import Repo


@pytest.mark.parametrize(
    ("key", "value"), [("fine_tune_type", ["lora"]), ("clear_cache_threshold", "9" * 400 + "GB")]
)
def test_setting_of_mlx_lm_with_a_wrong_value(key, value):
    with raises("invalid", key, "c.yaml: "):
        resolve({key: value}, "c.yaml")


@pytest.mark.parametrize(
    "change",
    [{"siblings": [1.5]}, {"siblings": [{"rfilename": ["pack.json"]}]}, {"sha": 4294967296}],
    ids=str,
)
def test_answer_of_the_hub_with_a_wrong_type(hub, tmp_path, change):
    hub.repos["me/p"] = Repo()
    hub.repos["me/p"].commit({"pack.json": b"{}"})
    hub.tamper = lambda data: json.dumps(json.loads(data) | change).encode()
    with raises("network", None, "me/p@main: "):
        pull("me/p", tmp_path / "p")


def test_identity_of_a_run_that_is_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with raises("unreadable", None, "config.json: "):
        RunFolder(tmp_path).read_identity()


def test_prompt_of_which_the_template_leaves_nothing(shared_tiny):
    with raises("unreadable", None, "tiny: "):
        next(stream(shared_tiny, []))


def test_tokenizer_whose_library_prints_a_strangers_key(tmp_path, capfd):
    write_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["added_tokens"][0]["x\x1b[31my"] = 1
    file.write_text(json.dumps(tokenizer))
    shutil.copy(tiny_checkpoint() / "config.json", tmp_path)
    load_tokenizer(tmp_path, {"eos_token_id": 0}, False)
    out, err = capfd.readouterr()
    assert not out and "x?[31my" in err and "\x1b" not in err


def changed(folder, mode="affine", **values):
    """Write a small checkpoint in a format of MLX, without its record, with another config.json."""
    bits = 8 if mode == "mxfp8" else 4
    base = write_quantized(folder / "q", write_checkpoint(folder / "dense"), bits, mode)
    (base / "quantization.json").unlink()
    set_keys(base / "config.json", **values)
    return base


def test_scales_of_another_shape_than_their_weight(tmp_path):
    """mlx-lm divides by the scales of a row, and MLX then by zero: the process ended."""
    base, name = changed(tmp_path), "model.embed_tokens.scales"
    change_tensors(base, lambda tensors: tensors.update({name: tensors[name].T}))
    with raises("unreadable", None, name):
        load_base(base)


@pytest.mark.parametrize(("mode", "size"), [("affine", 1), ("affine", 3), ("mxfp8", 1)])
def test_config_with_fewer_columns_than_scales(tmp_path, mode, size):
    """MLX divides by a group size of 0, and the process ended."""
    base = changed(tmp_path, mode, intermediate_size=size)
    for load in (load_base, lazy_base):
        with raises("unreadable", None, "down_proj.scales", "config.json"):
            load(base)


@pytest.mark.parametrize("key", ["group_size", "bits"])
@pytest.mark.parametrize("value", [0, 1.5, "4"], ids=str)
def test_config_with_a_group_size_or_bits_of_a_module(tmp_path, key, value):
    path = "model.layers.0.mlp.up_proj"
    settings = {"group_size": 32, "bits": 4, path: {"group_size": 32, "bits": 4} | {key: value}}
    base = changed(tmp_path, quantization=settings)
    with raises("unreadable", None, "config.json", f"quantization.{path}.{key}"):
        load_base(base)


def test_gguf_with_a_feed_forward_length_of_one(tmp_path):
    file = tmp_path / "m.gguf"
    write_tiny(file)
    data = file.read_bytes()
    name = b"llama.feed_forward_length"
    at = data.index(name) + len(name) + 4  # a type precedes the number
    file.write_bytes(data[:at] + (1).to_bytes(4, "little") + data[at + 4 :])
    for load in (load_base, lazy_base):
        with raises("unreadable", None, "scales"):
            load(file)


def test_encoder_whose_epsilon_is_null(tmp_path):
    folder = write_encoder(tmp_path / "e")
    config = json.loads((folder / "config.json").read_text()) | {"layer_norm_eps": None}
    (folder / "config.json").write_text(json.dumps(config))
    with suppress(PackError):  # of transformers, which wants a number for its tokenizer
        load_base(folder)
