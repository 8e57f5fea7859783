"""An imported adapter whose folder has a tokenizer or template that its base does not have."""

import json
import shutil

import pytest

from mlx_packs import export_pack, import_adapter
from mlx_packs.bases.files import resolve_checkpoint
from tests.helpers.packs import random_pack

BASE = resolve_checkpoint("tiny")
CONFIG = "tokenizer_config.json"
TEMPLATE = "{{ messages }}"
ANOTHER = "the adapter was trained with another chat template: the pack answers"


@pytest.fixture
def adapter(shared_tiny, tmp_path):
    pack = random_pack(shared_tiny, num_layers=1).save(tmp_path / "pack")
    export_pack(pack, "peft", tmp_path / "adapter")
    (tmp_path / "adapter" / "mlx_packs.json").unlink()
    return tmp_path / "adapter"


def config(**values) -> str:
    return json.dumps({**json.loads((BASE / CONFIG).read_text()), **values})


def notes(adapter):
    return import_adapter(adapter, adapter.parent / "again", "tiny", overwrite=True)["notes"]


def test_a_folder_without_texts_or_with_equal_ones_says_nothing(adapter):
    assert notes(adapter) == []
    for file in (*BASE.glob("tokenizer*"), *BASE.glob("chat_template*")):
        shutil.copy(file, adapter)
    assert notes(adapter) == []


@pytest.mark.parametrize(
    ("file", "text"),
    [("chat_template.jinja", TEMPLATE), (CONFIG, config(chat_template=TEMPLATE))],
)
def test_another_chat_template_is_named(adapter, file, text):
    (adapter / file).write_text(text)
    (note,) = notes(adapter)
    assert ANOTHER in note
