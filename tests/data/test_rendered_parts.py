"""Messages, calls and tools that a chat template leaves out: in prompts, and in rows."""

import json

import pytest

from mlx_packs.bases.tokenizer import with_template
from mlx_packs.config.data import DataConfig
from mlx_packs.data import left_out
from mlx_packs.data.formats import TOKEN_FORMATS, format_of
from mlx_packs.data.row_format import Row
from mlx_packs.inference.generate import chat_prompt
from mlx_packs.serving.fields import parsed
from mlx_packs.serving.prompts import RequestPrompts
from mlx_packs.serving.protocol import ChatBody
from tests.helpers.errors import raises

# A system message is rendered at the beginning only, and a message of a tool nowhere.
PARTIAL = """\
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- for m in messages if m.role in ('user', 'assistant') %}<{{ m.role }}>{{ m.content }}{% endfor %}"""
SYSTEM = {"role": "system", "content": "Answer in one word, please."}
USER = {"role": "user", "content": "Weather in Bonn?"}
ANSWER = {"role": "assistant", "content": "It is clear in Bonn today."}
RESULT = {"role": "tool", "content": "It is clear in Bonn today.", "tool_call_id": "a"}
CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": {"c": "Bonn"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def partial(shared_tiny):
    return with_template(shared_tiny.tokenizer, PARTIAL)


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
    from mlx_packs.data.conversations import Conversation

    monkeypatch.setattr(Conversation, "render", None)  # what was checked is not rendered again
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


def test_rows_after_the_first_are_checked_if_they_have_another_shape(partial, monkeypatch):
    monkeypatch.setattr(left_out, "_RENDERINGS", 2)
    values = [[SYSTEM, USER, ANSWER]] * 4 + [[USER, ANSWER, SYSTEM, USER, ANSWER]]
    rows = [Row(f"rows:{i}", {"messages": turns}) for i, turns in enumerate(values)]
    row_format = format_of(rows[0], DataConfig(), TOKEN_FORMATS)
    note, _ = left_out.template_notes(rows, row_format, DataConfig(), partial)
    assert "messages of system: 1 of 3 checked, the first in rows:4, message 3" in note


def test_a_text_that_another_message_repeats_is_not_taken_for_the_lost_one(partial):
    row = Row("rows:0", {"messages": [USER, RESULT, ANSWER]})
    row_format = format_of(row, DataConfig(), TOKEN_FORMATS)
    note, _ = left_out.template_notes([row], row_format, DataConfig(), partial)
    assert "messages of tool: 1 of 1" in note
