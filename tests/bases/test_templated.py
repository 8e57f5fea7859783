"""--chat-template, and prompts with completions for a base model that has no template."""

import json
from unittest.mock import Mock

import pytest

from mlx_packs import DataConfig, TrainConfig, load_base, merge_pack, train_pack
from mlx_packs.bases.tokenizer import with_template
from mlx_packs.config.data import CHAT_TEMPLATES, MARKS
from mlx_packs.data.encoding import EncodingOptions, encode
from mlx_packs.data.row_format import Row
from mlx_packs.evaluation.rows import columns_of
from mlx_packs.inference.generate import chat_prompt, raw_prompt
from mlx_packs.packs.compatibility import check_same_use
from mlx_packs.packs.manifest import chat_template_of
from mlx_packs.packs.pack import Pack
from mlx_packs.serving.registry import PackRegistry, Served
from tests.helpers.bases import copy_tiny
from tests.helpers.errors import raises
from tests.helpers.packs import random_pack

CAPITAL = {"prompt": "The capital of France is", "completion": " Paris.\n"}
ROLES = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
OWN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The embedded base without a chat template, as base models are."""
    folder = copy_tiny(tmp_path_factory.mktemp("bare") / "base")
    (folder / "chat_template.jinja").unlink()
    return load_base(folder)


def example(tokenizer, row: dict, **columns):
    rows = [Row("rows:1", row)]
    return encode(rows, tokenizer, DataConfig(**columns), EncodingOptions()).items[0]


def test_a_prompt_and_its_completion_are_joined_as_trl_joins_them(bare):
    tokenizer = bare.tokenizer
    text = CAPITAL["prompt"] + CAPITAL["completion"] + tokenizer.eos_token
    encoded = example(tokenizer, CAPITAL)
    assert encoded.tokens.tolist() == tokenizer.encode(text)
    prompt = tokenizer.encode(CAPITAL["prompt"])
    assert encoded.target.tolist() == [i >= len(prompt) for i in range(len(encoded.tokens))]

    ended = {**CAPITAL, "completion": CAPITAL["completion"] + tokenizer.eos_token}
    assert example(tokenizer, ended).tokens.tolist() == encoded.tokens.tolist()
    question = [{"role": "user", "content": CAPITAL["prompt"]}]
    assert chat_prompt(bare, question) == prompt == raw_prompt(bare, CAPITAL["prompt"])


@pytest.mark.parametrize(
    "row",
    [ROLES, {**CAPITAL, "system": "Short."}, {"prompt": ROLES["messages"][:1], "completion": "b"}],
)
def test_roles_need_a_template(bare, row):
    with raises("unsupported", "chat_template", "rows:1", "chatml"):
        example(bare.tokenizer, row)
    with raises("unsupported", "messages"):
        chat_prompt(bare, [{"role": "system", "content": "a"}, *ROLES["messages"][:1]])


def test_a_template_by_name_by_file_and_by_its_text(bare, tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text(OWN)
    for given in (file, OWN):
        assert DataConfig(chat_template=str(given)).chat_template == OWN
        tokens = example(bare.tokenizer, ROLES, chat_template=str(given)).tokens.tolist()
        assert bare.tokenizer.decode(tokens) == "[user] a\n[assistant] b" + bare.tokenizer.eos_token
    tokens = example(bare.tokenizer, ROLES, chat_template="chatml").tokens.tolist()
    assert tokens == example(load_base("tiny").tokenizer, ROLES).tokens.tolist()


def test_a_template_replaces_the_one_of_the_base(shared_tiny):
    tokens = example(shared_tiny.tokenizer, CAPITAL, chat_template="plain").tokens.tolist()
    text = "The capital of France is Paris.\n<|im_end|>"
    assert shared_tiny.tokenizer.decode(tokens) == text
    with raises("data", None, "rows:1", "one prompt and one completion"):
        example(shared_tiny.tokenizer, {**CAPITAL, "system": "Short."}, chat_template="plain")


def test_templates_that_a_base_cannot_have(bare, monkeypatch):
    template = "<start_of_turn>{{ messages[0].content }}"
    monkeypatch.setitem(CHAT_TEMPLATES, "turns", template)
    monkeypatch.setitem(MARKS, template, ("<start_of_turn>",))
    with raises("unsupported", "chat_template", "<start_of_turn>", "plain"):
        with_template(bare.tokenizer, template)
    with raises("unreadable", None, "--chat-template", "Jinja"):
        with_template(bare.tokenizer, "{% for %}")


def with_recipe(base, **recipe) -> Pack:
    pack = random_pack(base)
    pack.manifest["recipe"] = recipe
    return pack


def test_a_pack_brings_its_template(bare):
    own = with_recipe(bare, chat_template=OWN)
    plain = with_recipe(bare)
    turns = [*ROLES["messages"], {"role": "user", "content": "c"}]
    with bare.applied(own):
        assert bare.tokenizer.chat_template == OWN
        with bare.applied(plain):
            assert not bare.tokenizer.has_chat_template
        assert bare.tokenizer.chat_template == OWN
    assert not bare.tokenizer.has_chat_template

    text = bare.tokenizer.decode(bare._prompt_tokens(turns, False, own))
    assert text == "[user] a\n[assistant] b\n[user] c\n[assistant]"
    assert columns_of(own, "tiny").chat_template == OWN


def test_a_served_model_has_the_template_of_its_packs(bare):
    slots = Mock(base=bare)
    registry = PackRegistry(slots)
    for name, text in (("a", OWN), ("c", None)):
        registry._entries[name] = Served(name, 1, with_recipe(bare, chat_template=text), 1)
    templates = {model: chat_template_of(registry.recorded(model)) for model in ("a", "c", "base")}
    assert templates == {"a": OWN, "c": None, "base": None}
    with raises("mismatch", None, "chat_template"):  # as their sum is made
        check_same_use([registry.packs["a"], registry.packs["c"]])


@pytest.mark.slow
def test_a_run_records_its_template_and_resumes_with_it(bare, tmp_path):
    few = {"batch_size": 2, "test_batches": 1}
    for iters in (2, 3):
        train_pack(
            bare,
            [ROLES] * 8,
            columns=DataConfig(chat_template=OWN),
            train=TrainConfig(iters=iters, **few),
            out=tmp_path / "pack",
            resume=iters == 3,
        )
    recipe = json.loads((tmp_path / "pack" / "pack.json").read_text())["recipe"]
    assert recipe["chat_template"] == OWN and not bare.tokenizer.has_chat_template
    options = {"columns": DataConfig(chat_template="chatml"), "train": TrainConfig(iters=4, **few)}
    with raises("mismatch", "chat_template"):
        train_pack(bare, [ROLES] * 8, **options, out=tmp_path / "pack", resume=True)
    merge_pack(tmp_path / "pack", bare.path, tmp_path / "merged", max_drift=9.0)
    assert (tmp_path / "merged" / "chat_template.jinja").read_text() == OWN
    prompt = chat_prompt(load_base(tmp_path / "merged"), ROLES["messages"][:1])
    assert bare.tokenizer.decode(prompt) == "[user] a\n[assistant]"
