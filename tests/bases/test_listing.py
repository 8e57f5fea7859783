"""`packs list --bases`: the base models on this disk, from configs and headers alone."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from mlx_packs.bases import listing
from mlx_packs.bases.files import resolve_checkpoint
from mlx_packs.runtime import mx
from tests.bases.changes import set_keys
from tests.helpers.checkpoints import write_stored
from tests.helpers.gguf_file import write_tiny

COMMIT = "0" * 40
HEAD_AND_SOURCES = ("source", "bundled", "Hub cache", "Hub cache")
DIGEST = "ab" * 32
LAYER = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{DIGEST}"}


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    """A checkpoint in 4 bits, of two shards."""
    return write_stored(tmp_path_factory.mktemp("stored") / "base", bits=4, shards=2)


@pytest.fixture
def disk(tmp_path, monkeypatch) -> Path:
    """A home without models, which no network leads out of."""

    def refuse(*_, **__):
        raise AssertionError("the network was used")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


@pytest.fixture
def listed(run):
    """The entries of `packs list --bases --json`, without the bundled one, by name."""

    def go() -> dict[str, dict]:
        code, out, err = run("list", "--bases", "--json")
        assert code == 0, err
        bundled, *others = json.loads(out)["bases"]
        assert (bundled["name"], bundled["source"], bundled["usable"]) == ("tiny", "bundled", True)
        return {entry["name"]: entry for entry in others}

    return go


def in_hub_cache(disk: Path, repo: str) -> Path:
    """The empty snapshot of a Hub id in the cache."""
    folder = disk / "hub" / f"models--{repo.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "snapshots" / COMMIT).mkdir(parents=True)
    return folder / "snapshots" / COMMIT


def in_ollama(disk: Path, path: str, **changes) -> Path:
    """The blob of a model that Ollama's manifest at a path names; it is not written."""
    manifest = disk / "ollama" / "manifests" / path
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"layers": [LAYER | changes]}))
    (disk / "ollama" / "blobs").mkdir(exist_ok=True)
    return disk / "ollama" / "blobs" / f"sha256-{DIGEST}"


def test_every_source_is_listed_under_the_name_that_model_takes(disk, stored, listed):
    copied = shutil.copytree(stored, in_hub_cache(disk, "some/model-4bit"), dirs_exist_ok=True)
    write_tiny(in_hub_cache(disk, "some/model-GGUF") / "m.gguf", "qwen2", kind="Q8_0")
    write_tiny(in_ollama(disk, "registry.ollama.ai/library/qwen3/4b"), "qwen3")
    in_ollama(disk, "registry.ollama.ai/me/mine/latest")
    in_ollama(disk, "hf.co/some/model/Q4_0")
    studio = disk / ".lmstudio" / "models" / "mlx-community"
    studio.mkdir(parents=True)
    write_stored(studio / "dense", dtype=mx.bfloat16)
    (studio / "of-files").mkdir()
    write_tiny(studio / "of-files" / "a.gguf", "llama")
    (studio / "of-files" / "mmproj-a.gguf").write_bytes(b"")

    result = listed()
    hub_file = str(copied.parents[2] / "models--some--model-GGUF/snapshots" / COMMIT / "m.gguf")
    described = {
        name: (e["source"], e["format"], e["architecture"], e["bits"]) for name, e in result.items()
    }
    assert described == {
        "some/model-4bit": ("Hub cache", "safetensors", "qwen3", 4),
        hub_file: ("Hub cache", "GGUF", "qwen2", pytest.approx(8.5, abs=0.3)),
        "ollama:hf.co/some/model:Q4_0": ("Ollama", "GGUF", "qwen3", pytest.approx(5, abs=0.3)),
        "ollama:me/mine:latest": ("Ollama", "GGUF", "qwen3", pytest.approx(5, abs=0.3)),
        "ollama:qwen3:4b": ("Ollama", "GGUF", "qwen3", pytest.approx(5, abs=0.3)),
        str(studio / "dense"): ("LM Studio", "safetensors", "qwen3", 16),
        str(studio / "of-files" / "a.gguf"): (
            "LM Studio",
            "GGUF",
            "llama",
            pytest.approx(5, abs=0.3),
        ),
    }
    assert all(entry["usable"] and entry["why"] is None for entry in result.values())
    weights = sum(file.stat().st_size for file in copied.iterdir())
    assert result["some/model-4bit"]["gb"] == round(weights / 1e9, 4)
    for name in ("some/model-4bit", str(studio / "dense")):
        assert resolve_checkpoint(name).is_dir()


def cut_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def pickled(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


HARMS = {
    "config": (cut_config, None, "config.json: "),
    "shard": (lambda p: (p / "model-00002-of-00002.safetensors").unlink(), None, "hf download a/b"),
    "header": (
        lambda p: os.truncate(p / "model-00001-of-00002.safetensors", 20),
        "qwen3",
        "model-00001-of-00002.safetensors: ",
    ),
    "pickle": (pickled, None, "pytorch_model.bin is pickled"),
    "encoder": (
        lambda p: set_keys(p / "config.json", model_type="roberta"),
        "roberta",
        "'roberta'",
    ),
    "unknown": (lambda p: set_keys(p / "config.json", model_type="new99"), "new99", "new99 not"),
    "untrainable": (lambda p: set_keys(p / "config.json", model_type="dbrx"), "dbrx", ""),
}


@pytest.mark.parametrize("harm, architecture, reason", HARMS.values(), ids=HARMS)
def test_a_base_that_cannot_be_used_says_why_among_the_others(
    disk, stored, listed, run, harm, architecture, reason
):
    shutil.copytree(stored, in_hub_cache(disk, "some/good"), dirs_exist_ok=True)
    folder = shutil.copytree(stored, in_hub_cache(disk, "a/b"), dirs_exist_ok=True)
    harm(folder)
    result = listed()
    assert result["some/good"]["usable"]
    entry = result["a/b"]
    assert not entry["usable"] and reason in entry["why"] and "\n" not in entry["why"]
    assert str(folder) not in entry["why"]
    if architecture:
        assert entry["architecture"] == architecture and entry["gb"] > 0

    _, out, _ = run("list", "--bases")
    (row,) = [line for line in out.splitlines() if line.startswith("a/b ")]
    assert f"no: {entry['why']}" in row


def test_models_of_ollama_that_are_gone_or_adapters(disk, listed):
    in_ollama(disk, "registry.ollama.ai/library/gone/1b")
    adapter = "application/vnd.ollama.image.adapter"
    in_ollama(disk, "registry.ollama.ai/library/tuned/1b", mediaType=adapter)
    result = listed()
    assert "`ollama pull gone:1b`" in result["ollama:gone:1b"]["why"]
    assert "FROM" in result["ollama:tuned:1b"]["why"]
    assert not any(entry["usable"] for entry in result.values())


def test_a_base_with_code_is_usable_and_says_which_flag_it_needs(disk, stored, listed):
    folder = disk / ".lmstudio" / "models" / "me" / "own"
    shutil.copytree(stored, folder)
    set_keys(folder / "config.json", model_file="model.py", model_type="own")
    entry = listed()[str(folder)]
    assert entry["usable"] and "--trust-remote-code" in entry["why"]


def test_the_table_is_aligned_and_breaks_after_long_names(disk, stored, run):
    shutil.copytree(stored, in_hub_cache(disk, "some/good"), dirs_exist_ok=True)
    long_name = in_hub_cache(disk, "owner/" + "n" * 50)
    shutil.copytree(stored, long_name, dirs_exist_ok=True)
    code, out, _ = run("list", "--bases")
    lines = out.splitlines()
    assert code == 0 and len(lines) == 5
    assert lines[2] == "owner/" + "n" * 50 and lines[3].startswith(" ")
    rows = [lines[i] for i in (0, 1, 3, 4)]
    places = [row.index(word) for row, word in zip(rows, HEAD_AND_SOURCES, strict=True)]
    assert len(set(places)) == 1
    ends = [re.search(r"(size|B)  (?=usable|yes)", row).end() for row in rows]
    assert len(set(ends)) == 1


def test_bits_follow_from_the_config_or_the_dtype_of_most_weights(stored):
    for quantization, bits in (
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "awq", "bits": 4}, 4),
        ({"quant_method": "other"}, None),
    ):
        assert listing._bits(stored, {"quantization_config": quantization}) == bits


def test_bases_are_listed_alone(rejected):
    for arguments in (["packs"], ["--hub-cache"]):
        assert rejected("list", "--bases", *arguments).flag == "bases"
