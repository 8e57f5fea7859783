"""Headers of a base: of the Hub, of a config alone."""

import json
from types import SimpleNamespace

import huggingface_hub
import pytest

from mlx_packs.memory.headers import Headers
from mlx_packs.memory.read import read_headers
from tests.helpers.errors import check
from tests.helpers.headers import dense_headers


def test_a_hub_id_is_planned_by_its_headers(monkeypatch, tmp_path):
    real = dense_headers("qwen3-4b")
    tensors = {n: SimpleNamespace(**t) for n, t in real.tensors.items()}
    metadata = SimpleNamespace(
        files_metadata={"model.safetensors": SimpleNamespace(tensors=tensors)}
    )
    (tmp_path / "config.json").write_text(json.dumps(real.config))

    def absent(*_, **__):
        raise FileNotFoundError("not cached")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", absent)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", lambda _: metadata)
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda *_: str(tmp_path / "config.json")
    )
    assert read_headers("owner/name") == Headers("owner/name", real.config, real.tensors)


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch, rejected):
    def unreachable(*_, **__):
        raise ConnectionError("no network\nmore of it")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", unreachable)
    error = rejected("plan", "--model", "owner/name")
    check(error, "network", "model", "owner/name", "no network")


@pytest.mark.parametrize("name", ["llama-3-8b", "qwen3-4b"])
def test_config_alone_is_planned_as_the_dense_checkpoint(name, tmp_path):
    complete = dense_headers(name)
    (tmp_path / "config.json").write_text(json.dumps(complete.config))
    described = read_headers(tmp_path)
    assert described.config == complete.config
    wanted = {n: (t["dtype"], list(t["shape"])) for n, t in complete.tensors.items()}
    assert {n: (t["dtype"], t["shape"]) for n, t in described.tensors.items()} == wanted


@pytest.mark.parametrize(
    ("changes", "code", "name"),
    [
        ({"quantization": {"bits": 4, "group_size": 64}}, "not-found", "model*.safetensors"),
        ({"model_type": "mamba"}, "unsupported", "'mamba'"),
        ({"hidden_size": None}, "unsupported", "hidden"),
    ],
)
def test_a_config_alone_that_does_not_say_enough_is_rejected(
    changes, code, name, tmp_path, rejected
):
    config = dense_headers("llama-3-8b").config | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    check(rejected("plan", "--model", tmp_path, "--memory", 8), code, None, name)
