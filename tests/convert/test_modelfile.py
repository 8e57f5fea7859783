"""The prompts of a Modelfile, against those of the chat template that a pack was trained with."""

import re

import pytest

from mlx_packs.bases.tokenizer import with_template
from mlx_packs.bases.turns import render_conversation
from mlx_packs.config.data import CHAT_TEMPLATES
from mlx_packs.convert.modelfile import _prompts

DEFAULT = """\
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
IN_QUESTION = """\
{%- set system = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- for m in messages if m.role != 'system' %}
{{- '<|im_start|>' + m.role + '\\n' + (system if loop.first else '') + m.content + '<|im_end|>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
DATED = "{{ 'Today: ' + strftime_now('%d') + '\\n' }}" + DEFAULT
# Two questions: a template that begins the second one in another way.
UNEVEN = "{% for m in messages %}{{ '[' ~ loop.index ~ m.role ~ ']' ~ m.content }}{% endfor %}"


def ollama(lines: list[str], messages: list[dict]) -> str:
    """The prompt of the legacy form of Ollama's templates: once for each question."""
    text = "\n".join(lines)
    template = re.search(r'TEMPLATE """(.*?)"""', text, re.S)[1]
    default = re.search(r'SYSTEM """(.*?)"""', text, re.S)
    system = default[1] if default else ""
    if messages[0]["role"] == "system":
        system, messages = messages[0]["content"], messages[1:]

    prompt = ""
    for i in range(0, len(messages), 2):
        block = r"\{\{ if \.System \}\}(.*?)\{\{ end \}\}"
        turn = re.sub(block, r"\1" if system else "", template, flags=re.S)
        turn = turn.replace("{{ .System }}", system)
        turn = turn.replace("{{ .Prompt }}", messages[i]["content"])
        head, _, tail = turn.partition("{{ .Response }}")
        prompt += head
        if i + 1 < len(messages):
            prompt += messages[i + 1]["content"] + tail
        system = ""
    return prompt


@pytest.mark.parametrize("template", [CHAT_TEMPLATES["chatml"], IN_QUESTION, DEFAULT])
def test_prompts_are_those_of_the_template(shared_tiny, template):
    tokenizer = with_template(shared_tiny.tokenizer, template)
    lines = _prompts(tokenizer, {})
    assert ('SYSTEM """Be kind."""' in lines) == (template == DEFAULT)
    turns = [
        {"role": role, "content": text}
        for role, text in (("system", "S"), ("user", "Q"), ("assistant", "A"), ("user", "B"))
    ]
    for messages in (turns[:2], turns[1:2], turns, turns[1:]):
        expected = render_conversation(tokenizer, messages, add_generation_prompt=True)
        assert ollama(lines, messages) == expected


def test_joined_texts_and_the_end_of_answers(shared_tiny):
    plain = with_template(shared_tiny.tokenizer, CHAT_TEMPLATES["plain"])
    assert _prompts(plain, {}) == ['TEMPLATE """{{ .Prompt }}"""']
    assert _prompts(shared_tiny.tokenizer, {})[-1] == 'PARAMETER stop "<|im_end|>"'


@pytest.mark.parametrize("template", [DATED, UNEVEN])
def test_a_template_that_ollama_cannot_write_gives_no_lines(shared_tiny, template):
    assert _prompts(with_template(shared_tiny.tokenizer, template), {}) == []
