"""What rows and prompts say and the chat template or the training leaves out is named."""

import json

import pytest

from mlx_packs.bases.tokenizer import with_template as templated
from mlx_packs.config.schema import DataConfig
from mlx_packs.data import left_out
from mlx_packs.data.formats import PREFERENCE, PROMPT, Row, first_format
from mlx_packs.data.left_out import template_notes
from mlx_packs.inference.generate import chat_prompt
from mlx_packs.serving.fields import parsed
from mlx_packs.serving.prompts import RequestPrompts
from mlx_packs.serving.protocol import ChatBody
from tests.helpers.errors import raises
from tests.helpers.rows import chat

COLUMNS = DataConfig()
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "f"}}
THOUGHT = "<think>Two and three make five.</think>5"
# As DeepSeek-R1-Distill: no thoughts, no tools.
DROPS = """{%- for m in messages %}{% if m.role in ('user', 'assistant', 'system') %}
{{- '<|im_start|>' + m.role + '\n' + m.content.split('</think>')[-1] + '<|im_end|>\n' }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# As Qwen3-Thinking and distills of R1: the prompt opens thoughts.
OPENS = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking|default(true) %}{{ '<think>\n' }}{% endif %}{% endif %}"""
# As templates that people write themselves: no token ends an answer.
OPEN_END = "{% for m in messages %}{{ '### ' + m.role + ': ' + m.content + '\n' }}{% endfor %}"


@pytest.fixture(scope="module")
def with_template(tokenizer):
    """A tokenizer of the tiny base with another chat template."""
    return lambda template=None: templated(tokenizer, template)


def notes_of(tokenizer, *values, row_format=None, columns=COLUMNS) -> list[str]:
    rows = [Row(f"f:{i + 1}", value) for i, value in enumerate(values)]
    row_format = row_format or first_format(rows, columns)[1]
    return template_notes(rows, row_format, columns, tokenizer)


def noted(kind: str, first: str) -> str:
    return f"leaves out {kind}, the first in {first}. "


PROMPTED = [*chat("1+1?", THOUGHT)["messages"], {"role": "user", "content": "?"}]


@pytest.mark.parametrize(
    ("plain", "row", "row_format"),
    [
        (chat("Hello", "Hi."), chat("2+3?", THOUGHT), None),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            {"prompt": "2+3?", "chosen": THOUGHT, "rejected": "6"},
            PREFERENCE,
        ),
        ({"prompt": chat("Hello")["messages"]}, {"prompt": PROMPTED}, PROMPT),
    ],
)
def test_thoughts_that_a_template_removes_are_counted(with_template, plain, row, row_format):
    (note,) = notes_of(with_template(DROPS), plain, row, row, row_format=row_format)
    assert noted("thoughts", "f:2, answer 1") in note and "training template" in note
    assert notes_of(with_template(), plain, row, row, row_format=row_format) == []


def test_messages_calls_tools_and_thoughts_in_a_key_that_are_lost_are_named(with_template):
    row = chat("Look.", "Yes.")
    row["messages"][1] |= {"tool_calls": [CALL]}
    row["messages"] += [{"role": "tool", "content": "1", "name": "f"}]
    row["messages"] += chat("And?", "One.")["messages"]
    row |= {"tools": [TOOL]}

    notes = "".join(notes_of(with_template(DROPS), row))
    for kind, place in (
        ("tools", ""),
        ("calls of tools", ", answer 1"),
        ("messages of tool", ", message 3"),
    ):
        assert noted(kind, f"f:1{place}") in notes
    assert notes.count("leaves out") == 3
    assert notes_of(with_template(), row) == []

    row = chat("1+1?", "2", "2+2?", "4")
    row["messages"][1]["thinking"] = "A sum of small numbers."
    (note,) = notes_of(with_template(), row)
    assert noted("thoughts", "f:1, answer 1") in note


def test_variables_that_the_template_does_not_read_are_named(with_template):
    wrong, right = {"enable_thinkng": False}, {"enable_thinking": False}
    for of_run, of_row, count in ((wrong, None, 1), ({}, wrong, 1), (right, None, 0)):
        rows = [chat("a", "b") | {"chat_template_kwargs": of_row}] * 2
        notes = notes_of(with_template(OPENS), *rows, columns=DataConfig(template_kwargs=of_run))
        text = "does not read enable_thinkng, the first in f:1"
        assert [text in note for note in notes if "does not read" in note] == [True] * count


def test_an_unusual_end_is_named_where_a_template_renders_rows(with_template):
    for row, row_format in (
        (chat("a", "b"), None),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, PREFERENCE),
        ({"prompt": "a"}, PROMPT),
    ):
        (note,) = notes_of(with_template(OPEN_END), row, row_format=row_format)
        assert "does not end the last answer: <|im_end|> is put behind it" in note
    assert notes_of(with_template(OPEN_END), {"text": "a"}) == []


# The first tool and call only.
FIRST = """{%- for t in (tools or [])[:1] %}{{ t.function.name }}{% endfor %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}
{%- for c in (m.tool_calls or [])[:1] %}{{ c.function.name ~ c.function.arguments }}{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def test_each_tool_and_call_is_checked(with_template):
    row = chat("Look.", "")
    row["messages"][1] |= {"tool_calls": [CALL, CALL]}
    row |= {"tools": [TOOL, {"name": "g"}]}
    notes = sorted(notes_of(with_template(FIRST), row))
    places = [noted("calls of tools", "f:1, answer 1"), noted("tools", "f:1")]
    assert all(place in note for place, note in zip(places, notes, strict=True))


@pytest.mark.parametrize(
    ("row", "row_format", "unused"),
    [
        (chat("a", "b") | {"id": 7, "source": "web", "system": "c"}, None, "id, source"),
        ({"text": "a", "label": "b"}, None, "label; train on them with --task classify"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "score": 1}, PREFERENCE, "score"),
        ({"prompt": "a", "answer": "b"}, PROMPT, None),  # a reward function sees every column
    ],
)
def test_columns_without_a_use_are_named_once(with_template, row, row_format, unused):
    notes = notes_of(with_template(), row, row, row_format=row_format)
    assert notes == ([f"columns that are not used: {unused}"] if unused else [])


@pytest.mark.parametrize(
    ("row", "row_format", "is_missing"),
    [
        (chat("2+3?", "5"), None, True),
        (chat("2+3?", THOUGHT), None, False),
        (chat("2+3?", "5") | {"chat_template_kwargs": {"enable_thinking": False}}, None, False),
        ({"prompt": "2+3?", "chosen": THOUGHT, "rejected": "6"}, PREFERENCE, True),
        ({"prompt": "2+3?"}, PROMPT, False),
    ],
)
def test_answers_without_the_thoughts_that_a_prompt_opens_are_named(
    with_template, row, row_format, is_missing
):
    notes = "".join(notes_of(with_template(OPENS), row, row, row_format=row_format))
    assert notes.count("opens thoughts") == notes.count("the answer in f:1 has none") == is_missing


def test_a_large_split_costs_a_limited_number_of_renderings(with_template, monkeypatch):
    counted, render = [], left_out.Conversation.render
    monkeypatch.setattr(
        left_out.Conversation, "render", lambda *args: counted.append(1) or render(*args)
    )
    assert len(notes_of(with_template(DROPS), *[chat("2+3?", THOUGHT)] * 500)) == 1
    assert len(counted) <= 300 + 10


def test_bad_rows_are_left_to_those_who_name_them(with_template):
    bad = [{"messages": 5}, {"messages": [{"role": "user"}]}, [], {"text": "a"}]
    assert notes_of(with_template(), chat("a", "b"), *bad) == ["columns that are not used: text"]


# A system message is rendered at the beginning only, and a message of a tool nowhere.
PARTIAL = """\
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- for m in messages if m.role in ('user', 'assistant') %}<{{ m.role }}>{{ m.content }}{% endfor %}"""

SYSTEM = {"role": "system", "content": "Answer in one word, please."}
USER = {"role": "user", "content": "Weather in Bonn?"}
ANSWER = {"role": "assistant", "content": "It is clear in Bonn today."}
RESULT = {"role": "tool", "content": "It is clear in Bonn today.", "tool_call_id": "a"}


@pytest.fixture(scope="module")
def partial(with_template):
    return with_template(PARTIAL)


@pytest.mark.parametrize(
    ("messages", "tools", "named"),
    [
        ([USER, ANSWER, RESULT], None, "messages of tool, message 3"),
        ([USER, ANSWER, USER, {**RESULT, "content": "12"}], None, "messages of tool, message 4"),
        ([USER, SYSTEM], None, "messages of system, message 2"),
        ([USER, {**ANSWER, "tool_calls": [CALL]}], None, "calls of tools"),
        ([USER], [TOOL], "leaves out tools"),
    ],
)
def test_a_prompt_that_loses_a_part_is_rejected(shared_tiny, partial, messages, tools, named):
    for _ in range(2):  # nothing is remembered of what was rejected
        with raises("data", "messages", named):
            chat_prompt(shared_tiny, messages, tools, partial)


def test_a_prompt_that_is_rendered_whole(shared_tiny, partial, monkeypatch):
    thoughts = {**ANSWER, "reasoning_content": "Hm."}  # of earlier answers, left out on purpose
    for _ in range(2):
        chat_prompt(shared_tiny, [SYSTEM, USER, thoughts, USER], None, partial)
    monkeypatch.setattr(left_out.Conversation, "render", None)  # not rendered again
    other = [SYSTEM, {**USER, "content": "And tomorrow?"}, ANSWER, {**USER, "content": "?"}]
    chat_prompt(shared_tiny, other, None, partial)


def test_a_served_request_names_what_is_lost(shared_tiny, partial):
    fields = {"model": "base", "messages": [{**SYSTEM, "role": "developer"}, USER]}
    prompts = RequestPrompts(shared_tiny, 8, 512)
    prompt = prompts.of_chat(parsed(ChatBody, json.dumps(fields).encode()), tokenizer=partial)
    assert SYSTEM["content"] in shared_tiny.tokenizer.decode(prompt)
    fields["messages"].append({**SYSTEM, "role": "developer"})
    with raises("data", "messages", "messages of system, message 3"):
        prompts.of_chat(parsed(ChatBody, json.dumps(fields).encode()), tokenizer=partial)


def test_a_message_that_is_lost_is_found(partial):
    rows = [{"messages": [SYSTEM, USER, ANSWER]}] * 4  # of another shape than the fifth
    note, _ = notes_of(partial, *rows, {"messages": [USER, ANSWER, SYSTEM, USER, ANSWER]})
    assert "messages of system, the first in f:5, m" in note
    note, _ = notes_of(partial, {"messages": [USER, RESULT, ANSWER]})  # which repeats the result
    assert "messages of tool, the first in f:1" in note
