"""The chat templates of five families as they are published: targets, prompts and BOS of a chat."""

import pytest
from transformers import AutoTokenizer

from mlx_packs.bases.tokenizer import load_tokenizer
from mlx_packs.config.schema import DataConfig
from mlx_packs.data.encoding import EncodingOptions, encode
from mlx_packs.data.formats import Row
from mlx_packs.reading import read_json
from tests.helpers.bases import copy_tiny

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
TURNS = [
    {"role": "user", "content": "Say blue."},
    {"role": "assistant", "content": "Blue it is."},
    {"role": "user", "content": "Again."},
    {"role": "assistant", "content": "Blue."},
]
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """A tokenizer with the template and the special tokens of a family, and what is expected."""
    template, end, bos, eos, takes_system = FAMILIES[request.param]
    folder = copy_tiny(tmp_path_factory.mktemp("family") / "base")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    extra = [mark for mark in [*MARKS.split(), end] if mark not in (bos, eos)]
    tokenizer.add_special_tokens({"bos_token": bos, "eos_token": eos})
    tokenizer.add_special_tokens({"additional_special_tokens": extra})
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template)
    loaded = load_tokenizer(folder, read_json(folder / "config.json"), False)
    return loaded, end, bos, [SYSTEM, *TURNS] if takes_system else TURNS


def encoded(tokenizer, messages: list[dict]):
    rows = [Row("r:1", {"messages": messages})]
    (item,) = encode(rows, tokenizer, DataConfig(), EncodingOptions()).items
    return item


def pieces(tokenizer, item) -> list[str]:
    """The texts of the stretches that are targets."""
    texts, run = [], []
    for token, is_target in zip(
        [*item.tokens.tolist(), 0], [*item.target.tolist(), False], strict=True
    ):
        if is_target:
            run.append(token)
        elif run:
            texts.append(tokenizer.decode(run))
            run = []
    return texts


def test_targets_prompts_and_bos_are_those_of_the_template(family):
    tokenizer, end, bos, messages = family
    item = encoded(tokenizer, messages)
    after_last = "\n<|end_of_text|>"  # phi's template ends a text, as well as its last answer
    texts = [text.removesuffix(after_last).strip() for text in pieces(tokenizer, item)]
    assert texts == [f"Blue it is.{end}", f"Blue.{end}"]
    assert tokenizer.convert_tokens_to_ids(end) in tokenizer.eos_token_ids

    first = item.target.tolist().index(True)
    prompt = tokenizer.apply_chat_template(messages[:-3], add_generation_prompt=True, tokenize=True)
    assert item.tokens[:first].tolist() == list(prompt)

    number = tokenizer.convert_tokens_to_ids(bos)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert item.tokens.tolist().count(number) == text.count(bos)
