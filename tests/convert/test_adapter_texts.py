"""An imported adapter whose folder has a tokenizer or template that its base does not have."""

import json
import shutil

import pytest

from mlx_packs import export_pack, import_adapter
from mlx_packs.bases.files import resolve_checkpoint
from tests.helpers.packs import random_pack

BASE = resolve_checkpoint("tiny")


@pytest.fixture
def adapter(shared_tiny, tmp_path):
    pack = random_pack(shared_tiny, num_layers=1).save(tmp_path / "pack")
    export_pack(pack, "peft", tmp_path / "adapter")
    (tmp_path / "adapter" / "mlx_packs.json").unlink()
    return tmp_path / "adapter"


def config(folder, **values):
    file = folder / "tokenizer_config.json"
    was = json.loads((BASE / file.name).read_text())
    file.write_text(json.dumps({**was, **values}))


def notes(adapter):
    return import_adapter(adapter, adapter.parent / "again", "tiny", overwrite=True)["notes"]


def test_a_folder_without_texts_or_with_equal_ones_says_nothing(adapter):
    assert notes(adapter) == []
    for file in (*BASE.glob("tokenizer*"), *BASE.glob("chat_template*")):
        shutil.copy(file, adapter)
    assert notes(adapter) == []


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json", "by name"])
def test_another_template_is_named_wherever_it_is(adapter, place):
    if place == "chat_template.jinja":
        (adapter / place).write_text("{{ messages }}")
    elif place == "by name":
        config(adapter, chat_template=[{"name": "default", "template": "{{ messages }}"}])
    else:
        config(adapter, chat_template="{{ messages }}")
    (note,) = notes(adapter)
    assert note.startswith("the adapter was trained with another chat template: the pack answers")


def test_another_end_is_named(adapter):
    config(adapter, eos_token={"content": "<|stop|>"})
    (note,) = notes(adapter)
    assert "another EOS (<|stop|> instead of " in note


def test_a_file_that_cannot_be_read_is_named(adapter):
    (adapter / "tokenizer_config.json").write_text("[" * 100_000)
    (note,) = notes(adapter)
    assert "cannot be compared" in note and "tokenizer_config.json" in note
