"""Names of models that Ollama has on this machine."""

import json

import pytest

from mlx_packs.bases.files import resolve_checkpoint
from mlx_packs.bases.readers import local_model
from mlx_packs.errors import PackError
from tests.helpers.gguf_file import write_tiny

DIGEST = "sha256:" + "ab" * 32


@pytest.fixture
def ollama(tmp_path, monkeypatch):
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    monkeypatch.setenv("MLX_PACKS_CACHE", str(tmp_path / "cache"))
    manifest = tmp_path / "manifests/registry.ollama.ai/library/qwen3/4b"
    manifest.parent.mkdir(parents=True)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": DIGEST}
    manifest.write_text(json.dumps({"layers": [layer]}))
    (tmp_path / "blobs").mkdir()
    return tmp_path / "blobs" / DIGEST.replace(":", "-")


def test_a_name_of_ollama_leads_to_its_blob(ollama):
    write_tiny(ollama, "qwen3")
    assert local_model("ollama:qwen3:4b") == ollama
    assert (resolve_checkpoint("ollama:qwen3:4b") / "config.json").is_file()


def test_a_blob_that_is_gone(ollama):
    with pytest.raises(PackError) as raised:
        resolve_checkpoint("ollama:qwen3:4b")
    assert str(ollama) in raised.value.message and "\n" not in raised.value.message


@pytest.mark.parametrize("name", ["ollama:none", "ollama:../../x:4b", "lmstudio:a/b"])
def test_names_of_nothing(ollama, name):
    with pytest.raises(PackError) as raised:
        resolve_checkpoint(name)
    assert f"--model {name}" in raised.value.message
