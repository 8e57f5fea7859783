"""--template-kwargs of commands that generate: over what the pack was trained with."""

import json
import shutil

import pytest
from click.testing import CliRunner

from mlx_packs import train_pack
from mlx_packs.cli.main import packs
from mlx_packs.config.schema import DataConfig
from mlx_packs.evaluation.rows import columns_of
from mlx_packs.inference import chat as chatting
from mlx_packs.inference import generate as generation
from tests.helpers.bases import copy_tiny
from tests.helpers.rows import chat

TONE = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{{ 'tone ' + tone|default('none') + ' ' + mood|default('none') + '\n' }}{% endif %}"
CHAT = [chat(f"{i}?", str(i)) for i in range(4)]


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tone")
    base = copy_tiny(folder / "base")
    (base / "chat_template.jinja").write_text(TONE)
    columns = DataConfig(data=CHAT, template_kwargs={"tone": "warm", "mood": "calm"})
    few = {"iters": 1, "batch_size": 2, "test_batches": 1, "loss_on": "all"}
    return train_pack(base, columns=columns, train=few, out=folder / "pack").pack


@pytest.fixture
def prompts(pack, monkeypatch):
    texts = []

    def recorded(base, messages, *args, **variables):
        tokens = chat_prompt(base, messages, *args, **variables)
        texts.append(base.tokenizer.decode(tokens))
        return tokens

    chat_prompt = generation.chat_prompt
    monkeypatch.setattr(generation, "chat_prompt", recorded)
    monkeypatch.setattr(chatting, "chat_prompt", recorded)
    return texts


def run(*arguments, **options):
    return CliRunner().invoke(packs, [*map(str, arguments)], **options)


def test_generate_and_chat_take_the_variables(pack, prompts):
    where = ["--pack", pack.path, "--model", pack.path.parent / "base", "--max-tokens", 1]
    result = run("generate", *where, "--prompt", "a")
    assert result.exit_code == 0, result.output
    assert "tone warm calm" in prompts[-1]
    result = run("chat", *where, "--template-kwargs", '{"tone": "cold"}', input="hello\n")
    assert result.exit_code == 0, result.output
    assert "tone cold calm" in prompts[-1] and "hello" in prompts[-1]


def test_an_evaluation_takes_the_variables(pack):
    assert columns_of(pack, CHAT).template_kwargs == {"tone": "warm", "mood": "calm"}
    columns = columns_of(pack, CHAT, template_kwargs={"tone": "cold"})
    assert columns.template_kwargs == {"tone": "cold", "mood": "calm"}


def test_data_shows_the_variables(pack, tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, CHAT)))
    base = shutil.copytree(pack.path.parent / "base", tmp_path / "base")
    (base / "chat_template.jinja").write_text("{{ 'tone ' + tone|default('none') }}" + TONE)
    given = ["--template-kwargs", '{"tone": "cold"}', "--loss-on", "all"]
    result = run("data", tmp_path / "a.jsonl", "--model", base, *given)
    assert result.exit_code == 0, result.output
    assert "one cold" in result.output
