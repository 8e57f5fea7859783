"""What ends an answer, where the template is, and BOS once: exact tokens and texts, also of families."""

import json
from itertools import groupby
from operator import itemgetter

import pytest
from transformers import AutoTokenizer

from mlx_packs import load_base
from mlx_packs.bases.chat_template import render_chat
from mlx_packs.bases.tokenizer import load_tokenizer, text_tokens
from mlx_packs.bases.turns import AnswerEnd, answer_end, answer_end_note, render_conversation
from mlx_packs.config.schema import DataConfig
from mlx_packs.data.encoding import EncodingOptions, encode
from mlx_packs.data.formats import PREFERENCE, PROMPT, Row, format_of
from mlx_packs.data.preferences import RATED, encode_preferences
from mlx_packs.data.prompts import encode_prompts
from mlx_packs.errors import PackError
from mlx_packs.inference.generate import chat_prompt
from mlx_packs.reading import read_json
from mlx_packs.serving.prompts import RequestPrompts
from mlx_packs.serving.protocol import ChatBody
from tests.bases.changes import set_keys
from tests.helpers.bases import copy_tiny
from tests.helpers.rows import chat

PLAIN = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"

OPEN = "{% for m in messages %}{{ ('<|im_start|>' if m.role == 'user' else '<tool_call>') + '\n' + m.content }}{% endfor %}{% if add_generation_prompt %}{{ '<tool_call>\n' }}{% endif %}"
EMPTY_THOUGHT = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n</think>' }}{% endif %}"
CALLS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}{{ 'END' if m.tool_calls else '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TURNS = [
    {"role": "user", "content": "Say blue."},
    {"role": "assistant", "content": "blue"},
    {"role": "user", "content": "Again."},
    {"role": "assistant", "content": "blue blue"},
]


@pytest.fixture
def folder(tmp_path):
    return copy_tiny(tmp_path / "base")


def loaded(folder, template=None):
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return load_tokenizer(folder, read_json(folder / "config.json"), False)


def learned(tokenizer, row, loss_on=None):
    (item,) = encode([Row("r:1", row)], tokenizer, DataConfig(), EncodingOptions(loss_on)).items
    return tokenizer.decode(item.tokens[item.target].tolist()), item.tokens.tolist()


def test_the_mark_of_the_next_turn_ends_the_last_answer(folder):
    tokenizer = loaded(folder, OPEN)
    row = {"prompt": "Say blue.", "completion": "blue"}
    assert learned(tokenizer, row)[0] == "blue<|im_start|>"
    assert learned(tokenizer, {"messages": TURNS})[0] == "blue<|im_start|>blue blue<|im_start|>"
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") in tokenizer.eos_token_ids
    assert "<|im_start|> is put behind it" in answer_end_note(tokenizer)


def test_an_end_that_is_added_without_being_special_ends_an_answer(folder):
    set_keys(
        folder / "tokenizer_config.json", eos_token="<|endoftext|>", additional_special_tokens=[]
    )
    set_keys(folder / "config.json", eos_token_id=4089)
    added = read_json(folder / "tokenizer.json")["added_tokens"]
    added = [t | {"special": t["content"] == "<|endoftext|>"} for t in added]
    set_keys(folder / "tokenizer.json", added_tokens=added)
    tokenizer = loaded(folder)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end not in tokenizer.all_special_ids
    assert answer_end(tokenizer).token == end and answer_end(tokenizer).missing == ""
    assert {end, 4089} <= tokenizer.eos_token_ids and tokenizer.eos_token_id == 4089
    assert learned(tokenizer, {"messages": TURNS[:2]})[0] == "blue<|im_end|>"
    assert "an answer ends with <|im_end|>" in answer_end_note(tokenizer)


@pytest.mark.parametrize(
    ("behind_a_call", "others"),
    [
        ("<|endoftext|>", (4089,)),
        ("<|im_end|>", ()),
        ("<|im_start|>", (4090,)),  # Gemma: the mark of the result
        ("", (4090,)),  # GLM: the next turn begins
    ],
)
def test_an_answer_that_calls_a_tool_may_end_otherwise(folder, behind_a_call, others):
    tokenizer = loaded(folder, CALLS.replace("END", behind_a_call))
    assert tokenizer.convert_ids_to_tokens([4089, 4090]) == ["<|endoftext|>", "<|im_start|>"]
    assert answer_end(tokenizer).others == others
    assert {*answer_end(tokenizer).tokens} <= tokenizer.eos_token_ids
    assert all(tokenizer.decode([end]) in answer_end_note(tokenizer) for end in others)


def test_a_mark_between_calls_does_not_end_an_answer(folder):
    between = CALLS.replace("{{ c.function.name }}", "{{ c.function.name + '<|endoftext|>' }}")
    assert answer_end(loaded(folder, between.replace("END", "<|im_end|>"))).others == ()


def test_the_end_is_found_in_conversations_that_need_a_system_message(folder):
    first = "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}"
    plain = (folder / "chat_template.jinja").read_text()
    tokenizer = loaded(folder, first + plain.replace("<|im_end|>", "<|endoftext|>"))
    assert answer_end(tokenizer).token == 4089 and 4089 in tokenizer.eos_token_ids
    assert "<|endoftext|>" in answer_end_note(tokenizer)


def test_an_end_that_cannot_be_found_is_said_to_be_unknown(folder):
    tokenizer = loaded(folder, "{{ raise_exception('three questions') }}")
    assert answer_end(tokenizer) == AnswerEnd(4091, is_known=False)
    assert "is unknown" in answer_end_note(tokenizer)


def test_an_empty_thought_in_the_prompt_leaves_completions_trainable(folder):
    tokenizer = loaded(folder, EMPTY_THOUGHT)
    text, tokens = learned(tokenizer, {"instruction": "Say blue.", "output": "blue"})
    chat, same = learned(tokenizer, {"messages": TURNS[:2]}, "assistant")
    assert (text, tokens) == ("blue<|im_end|>\n", same) and chat == "blue<|im_end|>"


@pytest.fixture
def with_bos(folder):
    name, bos = "<|endoftext|>", {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    single = [bos, {"Sequence": {"id": "A", "type_id": 0}}]
    processor = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {name: {"id": name, "ids": [4089], "tokens": [name]}},
    }
    set_keys(folder / "tokenizer.json", post_processor=processor)
    set_keys(folder / "tokenizer_config.json", bos_token=name)
    return loaded(folder)


def test_a_text_begins_with_bos_once(with_bos):
    plain = with_bos.encode("Once there was.", add_special_tokens=False)
    for text in ("Once there was.", "<|endoftext|>Once there was."):
        assert text_tokens(with_bos, text) == [4089, *plain]
        assert learned(with_bos, {"text": text})[1] == [4089, *plain, with_bos.eos_token_id]
    twice = "<|endoftext|><|endoftext|>Once there was."  # which the text itself says
    assert text_tokens(with_bos, twice) == [4089, 4089, *plain]


def test_the_template_of_chat_template_json_is_read(folder):
    template = (folder / "chat_template.jinja").read_text()
    expected = loaded(folder).chat_template
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    (folder / "chat_template.jinja").unlink()
    tokenizer = loaded(folder)
    assert tokenizer.has_chat_template and tokenizer.chat_template == expected


@pytest.mark.parametrize("place", ["a file", "by name"])
def test_calls_of_a_template_for_tools_are_read(folder, place):
    expected = loaded(folder)
    end = "{{- '<|endoftext|>' if message.tool_calls else '<|im_end|>\n' }}"
    own = (folder / "chat_template.jinja").read_text()
    own = own.replace(
        "{{- '<|im_end|>\\n' }}\n    {%- endif %}\n{%- endfor", end + "{% endif %}{% endfor"
    )
    assert end in own

    if place == "a file":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(own)
        tokenizer = loaded(folder, NO_PROMPT)
    else:
        (folder / "chat_template.jinja").unlink()
        by_name = {"default": NO_PROMPT, "tool_use": own}
        listed = [{"name": name, "template": text} for name, text in by_name.items()]
        set_keys(folder / "tokenizer_config.json", chat_template=listed)
        tokenizer = loaded(folder)

    assert tokenizer.has_tool_calling
    assert tokenizer.tool_call_start == expected.tool_call_start
    assert answer_end(tokenizer).others == (4089,)

    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    body = ChatBody.model_validate({"model": "m", "messages": TURNS[:1], "tools": tools})
    base = load_base(folder)
    assert '"name": "f"' in base.tokenizer.decode(RequestPrompts(base, 8, 512).of_chat(body))


SWITCH = "{% if enable_thinking is defined %}Thinking is {{ enable_thinking }}.{% endif %}"


@pytest.mark.parametrize(
    ("of_run", "of_row", "expected"),
    [
        ({"enable_thinking": False}, None, "False"),
        ({}, {"enable_thinking": False}, "False"),
        ({"enable_thinking": False}, {"enable_thinking": True}, "True"),
    ],
)
def test_variables_of_the_template_come_from_run_and_row(folder, of_run, of_row, expected):
    tokenizer = loaded(folder, SWITCH + EMPTY_THOUGHT)
    row = {"messages": TURNS[:2], "chat_template_kwargs": of_row}
    columns = DataConfig(template_kwargs=of_run)
    (item,) = encode([Row("r:1", row)], tokenizer, columns).items
    begins = f"Thinking is {expected}." if expected else ""
    assert tokenizer.decode(item.tokens.tolist()).startswith(begins + "<|im_start|>user")


@pytest.mark.parametrize("value", ["off", {"tokenize": True}])
def test_variables_of_a_row_that_are_none_are_an_error(folder, value):
    row = {"messages": TURNS[:2], "chat_template_kwargs": value}
    with pytest.raises(PackError, match="r:1"):
        encode([Row("r:1", row)], loaded(folder), DataConfig())


NO_PROMPT = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
HEADER = "<|im_start|>assistant\n"


def test_the_header_is_prompt_in_training_generation_metrics_and_server_alike(folder):
    tokenizer = loaded(folder, NO_PROMPT)
    assert learned(tokenizer, {"messages": TURNS})[0] == "blue<|im_end|>blue blue<|im_end|>"
    text, tokens = learned(tokenizer, {"prompt": "Say blue.", "completion": "blue"})
    assert text.rstrip() == "blue<|im_end|>"
    assert tokenizer.decode(tokens).startswith("<|im_start|>user\nSay blue.<|im_end|>\n" + HEADER)

    base, columns, row = load_base(folder), DataConfig(), Row("r:1", {"messages": TURNS[:2]})
    tokens = encode([row], tokenizer, columns).items[0]
    prompt = tokens.tokens[: int(tokens.target.argmax())].tolist()
    body = ChatBody.model_validate({"model": "m", "messages": TURNS[:1]})
    assert tokenizer.decode(prompt).endswith(HEADER)
    assert chat_prompt(base, TURNS[:1]) == prompt
    assert format_of(row, columns).read(row, columns, tokenizer).prompt()[1] == prompt
    assert RequestPrompts(base, 8, 64).of_chat(body) == prompt


INST = "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else ' ' + m.content + '<|im_end|>' }}{% endfor %}"


@pytest.mark.parametrize("template", [INST, OPEN])
def test_a_prompt_without_a_header_of_its_own_stays(folder, template):
    tokenizer = loaded(folder, template)
    options = {"add_generation_prompt": True}
    plain = render_chat(tokenizer, TURNS[:1], **options)
    assert render_conversation(tokenizer, TURNS[:1], **options) == plain


PARTS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% for part in m.content %}{{ part.text }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


def test_contents_are_parts_where_the_template_shows_only_parts(folder):
    tokenizer = loaded(folder, PARTS)
    text, tokens = learned(tokenizer, {"messages": TURNS[:2]})
    question = "<|im_start|>user\nSay blue.<|im_end|>\n" + HEADER
    assert text == "blue<|im_end|>" and tokenizer.decode(tokens) == question + text + "\n"
    prompt = tokenizer.decode(chat_prompt(load_base(folder), TURNS[:1]))
    assert prompt == question
    assert answer_end(tokenizer).token == tokenizer.eos_token_id


RENDERED = "<|im_start|>user\nSay blue.<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"prompt": RENDERED, "completion": "blue"}, "message 1 is already"),
        ({"prompt": "Say blue.", "completion": "blue<|im_end|>\n"}, "message 2 is already"),
        (chat("<|im_start|>user\nHi", "blue"), "message 1 is already"),
    ],
)
def test_texts_that_are_rendered_already_are_rejected(folder, row, fault):
    with pytest.raises(PackError, match=f"r:1: the text of {fault}"):
        learned(loaded(folder), row)


@pytest.mark.parametrize("row_format", [PREFERENCE, RATED, PROMPT])
def test_rendered_preferences_and_prompts_are_rejected(folder, row_format):
    tokenizer, columns = loaded(folder), DataConfig()
    sides = {"chosen": "blue<|im_end|>", "rejected": "red<|im_end|>"}
    sides |= {"completion": "blue<|im_end|>", "label": True}
    row = Row("r:1", {"prompt": RENDERED, **sides})
    with pytest.raises(PackError, match="r:1: the text of message 1 is already rendered"):
        if row_format is PROMPT:
            encode_prompts([row], tokenizer, columns, 512)
        else:
            encode_preferences([row], tokenizer, columns, EncodingOptions(), row_format)


@pytest.mark.parametrize(
    "texts",
    [
        ("What does <|im_start|> mean, and <|im_end|>?", "It begins a turn; <|im_end|> ends it."),
        ("Say <|im_end|>", "<think>Short.</think>no"),
    ],
)
def test_texts_about_marks_are_no_rendered_texts(folder, texts):
    assert learned(loaded(folder), chat(*texts))[0].endswith("<|im_end|>")


def test_a_rendered_prompt_is_known_by_a_mark_that_is_no_token(folder):
    with pytest.raises(PackError, match=r"'\[INST\]'"):
        learned(loaded(folder, INST), chat("[INST] Say blue. [/INST]", "blue"))
    assert learned(loaded(folder, INST), chat("Say blue.", "blue"))[0] == " blue<|im_end|>"


# The chat templates of five families as they are published.
LLAMA_3 = """\
{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
MISTRAL = """\
{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}{{- bos_token }}{%- for message in loop_messages %}{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('After the optional system message, conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif %}{%- if message['role'] == 'user' %}{%- if loop.first and system_message is defined %}{{- '[INST] ' + system_message + '\\n\\n' + message['content'] + '[/INST]' }}{%- else %}{{- '[INST] ' + message['content'] + '[/INST]' }}{%- endif %}{%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] + eos_token }}{%- endif %}{%- endfor %}"""
GEMMA_2 = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""
PHI_3 = """\
{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == 'user' %}{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}}{% elif message['role'] == 'assistant' %}{{'<|assistant|>\\n' + message['content'] + '<|end|>\\n'}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""
SMOLLM2 = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# template, what ends an answer, the tokenizer's BOS and EOS, whether it takes a system message
FAMILIES = {
    "llama 3": (LLAMA_3, "<|eot_id|>", "<|begin_of_text|>", "<|eot_id|>", True),
    "mistral": (MISTRAL, "</s>", "<s>", "</s>", True),
    "gemma 2": (GEMMA_2, "<end_of_turn>", "<bos>", "<eos>", False),
    "phi 3": (PHI_3, "<|end|>", "<s>", "<|end_of_text|>", True),
    "smollm2": (SMOLLM2, "<|im_end|>", "<|im_start|>", "<|im_end|>", True),
}
MARKS = "<|start_header_id|> <|end_header_id|> [INST] [/INST] <start_of_turn> <|system|> <|user|> <|assistant|>"
SYSTEM = {"role": "system", "content": "Be brief."}


def of_family(folder, family):
    """Give a checkpoint the template and marks of a family; return its tokenizer."""
    template, end, bos, eos, _ = FAMILIES[family]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    extra = [mark for mark in [*MARKS.split(), end] if mark not in (bos, eos)]
    tokenizer.add_special_tokens({"bos_token": bos, "eos_token": eos})
    tokenizer.add_special_tokens({"additional_special_tokens": extra})
    tokenizer.save_pretrained(folder)
    return loaded(folder, template)


@pytest.mark.parametrize("family", FAMILIES)
def test_targets_prompts_and_bos_are_those_of_a_published_template(folder, family):
    _, end, bos, _, takes_system = FAMILIES[family]
    tokenizer = of_family(folder, family)

    messages = [SYSTEM, *TURNS] if takes_system else TURNS
    rows = [Row("r:1", {"messages": messages})]
    (item,) = encode(rows, tokenizer, DataConfig(), EncodingOptions()).items
    tokens, target = item.tokens.tolist(), item.target.tolist()
    stretches = groupby(zip(tokens, target, strict=True), key=itemgetter(1))
    texts = [
        tokenizer.decode([token for token, _ in each]) for is_target, each in stretches if is_target
    ]
    after_last = "\n<|end_of_text|>"  # phi's template ends a text, as well as its last answer
    texts = [text.removesuffix(after_last).strip() for text in texts]
    assert texts == [f"blue{end}", f"blue blue{end}"]
    assert tokenizer.convert_tokens_to_ids(end) in tokenizer.eos_token_ids

    prompt = tokenizer.apply_chat_template(messages[:-3], add_generation_prompt=True, tokenize=True)
    assert tokens[: target.index(True)] == list(prompt)

    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokens.count(tokenizer.convert_tokens_to_ids(bos)) == text.count(bos)


@pytest.mark.parametrize(
    "row", [{"messages": TURNS[:2]}, {"prompt": "Say blue.", "completion": "blue"}]
)
def test_the_prompt_in_training_is_the_prompt_in_use(folder, row):
    tokenizer = loaded(folder, PLAIN)
    prompt = tokenizer.encode("user: Say blue.\nassistant: ", add_special_tokens=False)
    assert learned(tokenizer, row)[1] == [
        *prompt,
        *tokenizer.encode("blue<|im_end|>", add_special_tokens=False),
    ]
