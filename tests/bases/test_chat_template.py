"""Chat templates of a stranger: limits of time and size, and one line that names the template."""

from pathlib import Path

import pytest

from mlx_packs.bases.chat_template import encode_rendered, render_chat
from mlx_packs.data.conversations import Conversation
from mlx_packs.errors import PackError
from mlx_packs.sandbox import process
from tests.helpers.bases import copy_tiny
from tests.helpers.errors import check, raises

CONVERSATION = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
LOOP = "{% for i in range(99999) %}%s{% endfor %}"
ENDLESS = {
    "loops": LOOP.replace("%s", LOOP).replace("%s", ""),
    "text": "{{ 'a' * 600000000 }}",
    "doubled": "{% set n = namespace(x='a') %}"
    "{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "list that has itself": "{% set ns = namespace(a=1) %}{% set l = [ns] %}{% set ns.a = l %}{{ l * 2 }}",
    "bytes": "{{ ('a'.encode() * 3000000000) | length }}",
    "compiled": "{{ " + "+".join(["1"] * 40_000) + " }}",
}


@pytest.fixture
def with_template(tokenizer, monkeypatch):
    """The tiny tokenizer with another template."""

    def go(text: str):
        monkeypatch.setattr(tokenizer._tokenizer, "chat_template", text)
        return tokenizer

    return go


@pytest.fixture
def small_limits(monkeypatch):
    monkeypatch.setattr(process, "CPU_S", 0.15)
    monkeypatch.setattr(process, "MEMORY_BYTES", 64 << 20)


@pytest.mark.parametrize("text", ENDLESS.values(), ids=ENDLESS)
def test_a_template_without_end_or_measure_is_stopped(with_template, small_limits, text):
    try:
        shown = render_chat(with_template(text), CONVERSATION)
    except PackError as error:
        assert error.code in ("unreadable", "data")
        assert "chat_template.jinja: the chat template" in error.message
        assert "\n" not in error.message and len(error.message) < 400
    else:
        assert len(shown) < 1 << 22


FAULTS = {
    "{% for %}": ("unreadable", "line 1"),
    "{{ nobody.name.first }}": ("data", "nobody"),
    "{{ raise_exception('Roles must alternate') }}": ("data", "Roles must alternate"),
    "{{ ''.__class__.__mro__ }}": ("unreadable", "__class__"),
    "{{ messages.append(1) }}": ("unreadable", "append"),
    "{{ 1 / 0 }}": ("data", "division"),
    "{{ [] | first | upper | nothing }}": ("unreadable", "nothing"),
    "{% include '/etc/passwd' %}": ("data", ""),
    "{{ '\\ud800' }}": ("data", ""),
    "{{ " + "not " * 50_000 + "1 }}": ("unreadable", "end"),
}


@pytest.mark.parametrize(("text", "expected"), FAULTS.items())
def test_a_template_with_a_fault_is_one_line(with_template, text, expected):
    code, name = expected
    with raises(code, None, "chat_template.jinja", name) as caught:
        tokenizer = with_template(text)
        encode_rendered(tokenizer, render_chat(tokenizer, CONVERSATION))
    assert "\n" not in caught.value.message and len(caught.value.message) < 600


def test_a_template_that_is_no_text_is_one_line(with_template):
    for template in (5, ["a"], {"a": "b"}, {"default": 5}):
        with pytest.raises(PackError, match="chat template"):
            render_chat(with_template(template), CONVERSATION)


def test_limits_change_no_rendered_byte(tokenizer):
    template = tokenizer._tokenizer.chat_template
    thoughts = [CONVERSATION[0], {**CONVERSATION[1], "reasoning": "Hm.", "tool_calls": None}]
    for messages in (CONVERSATION, CONVERSATION * 50, CONVERSATION[:1], thoughts):
        for options in ({}, {"add_generation_prompt": True}, {"tools": [{"name": "a"}]}):
            plain = tokenizer.apply_chat_template(messages, tokenize=False, **options)
            text = render_chat(tokenizer, messages, **options)
            assert text == plain
            plain = tokenizer.apply_chat_template(messages, tokenize=True, **options)
            assert encode_rendered(tokenizer, text) == plain
    assert tokenizer._tokenizer.chat_template == template


USES = """
{%- macro line(role, text) -%}<{{ role }}>{{ text | trim }}</{{ role }}>{%- endmacro -%}
{%- set ns = namespace(seen=[], text='', system=none) -%}
{%- for m in messages if m.content is string -%}
  {%- if loop.first and m.role == 'system' %}{% set ns.system = m.content %}{% continue %}{% endif -%}
  {%- set ns.seen = ns.seen + [m.role] -%}
  {%- set ns.text = ns.text ~ line(m['role'], m.content) ~ ('%03d|' % loop.index) -%}
  {{- '{:>6}'.format(loop.index) + ' ' * 2 + m.content.replace('\\n', ' ').split(' ')[-1] | upper }}
{% endfor -%}
{{ ns.text }}{{ ns.seen | join(', ') }}{{ {'a': 1, 'b': [1, (2, 3)]} | tojson(indent=2) }}
{% for x in messages | map(attribute='role') | unique | sort recursive %}{{ x }}{{ 2 ** 10 }}{% endfor %}
{% generation %}{{ messages | length }}{% endgeneration %}{{ '%s of %s' | format(1, 2) }}
{%- set block %}{{ messages[-1].role | center(20) }}{% endset %}{{ block | indent(4) }}
{% filter upper %}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}x{% endfilter %}
{% for role in ['a', 'b'] %}{{ loop.cycle('x', 'y') }}{{ cycler('m', 'n').next() }}{% else %}none{% endfor %}
"""


def test_what_templates_use_is_rendered_as_by_transformers(with_template):
    tokenizer = with_template(USES)
    plain = tokenizer.apply_chat_template(CONVERSATION * 3, tokenize=False)
    assert "YES" in plain
    assert render_chat(tokenizer, CONVERSATION * 3) == plain


def test_a_long_conversation_is_within_the_limits(with_template):
    doubled = "{% for m in messages %}{{ m.content | replace('a', 'bb') }}{% endfor %}"
    tokenizer = with_template(doubled)
    messages = [{"role": "user", "content": "a" * 1000}] * 5000
    assert len(render_chat(tokenizer, messages)) == 10**7


def test_a_row_that_the_template_rejects_is_named(with_template):
    tokenizer = with_template("{{ raise_exception('no') }}")
    with raises("data", None, "d.jsonl:3: ", "chat_template.jinja", "no"):
        Conversation("d.jsonl:3", CONVERSATION, None, tokenizer).supervised("all")


def test_an_answer_is_not_looked_for_with_a_template_that_does_not_end(with_template, small_limits):
    """Where an answer stands is found by several renderings; the first that is stopped is the last."""
    tokenizer = with_template(
        "{% if add_generation_prompt %}" + ENDLESS["loops"] + "{% endif %}{{ messages | length }}"
    )
    with raises("unreadable", None, "chat_template.jinja", "seconds"):
        Conversation("d.jsonl:3", CONVERSATION, None, tokenizer).supervised("assistant")


@pytest.mark.parametrize(
    "command", ["train --model b --data tiny --show-mask", "generate --model b --prompt Hi"]
)
def test_commands_name_the_template(here, rejected, command):
    copy_tiny(Path("b"))
    Path("b/chat_template.jinja").write_text("{{ 'a' * 20000000000 }}")
    check(rejected(*command.split()), "unreadable", None, "b/chat_template.jinja: ")
