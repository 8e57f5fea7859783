"""What clients send: null for what is not given, answers sent back, and tools as agents have them."""

import json
from dataclasses import replace

import pytest

from mlx_packs.config.schema import DataConfig
from mlx_packs.data.formats import Chat, Row
from mlx_packs.serving.fields import parsed
from mlx_packs.serving.prompts import RequestPrompts
from mlx_packs.serving.protocol import ChatBody, CompletionBody, EmbeddingBody, PackBody
from tests.helpers.errors import raises
from tests.serving.test_bad_requests import CHAT, rejected

MESSAGES = [{"role": "user", "content": "The list"}]
REQUIRED = {"model", "messages", "prompt", "input", "source"}
BODIES = {
    ChatBody: {"model": "notes", "messages": MESSAGES},
    CompletionBody: {"model": "notes", "prompt": "The list"},
    EmbeddingBody: {"model": "notes", "input": "The list"},
    PackBody: {"source": "me/notes"},
}
# Of OpenAI's API, and not implemented here.
OTHERS = "audio best_of function_call metadata modalities prediction service_tier suffix".split()
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bonn", "Rome"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": None, "parameters": SCHEMA, "strict": True},
}
OTHER = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}


def parse(kind, **fields):
    return parsed(kind, json.dumps({**BODIES[kind], **fields}).encode())


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_null_is_not_given(kind):
    fields = {*kind.model_fields, *OTHERS} - REQUIRED
    assert parse(kind, **dict.fromkeys(fields)) == parse(kind)


@pytest.mark.parametrize("field", sorted(REQUIRED))
def test_null_is_no_value_of_a_field_that_is_required(field):
    kind = next(kind for kind in BODIES if field in BODIES[kind])
    with raises("invalid", field, "required"):
        parse(kind, **{field: None})


@pytest.mark.parametrize("stop", ["", [], [""], None, [""] * 16 + ["a"]])
def test_a_stop_without_text_ends_nothing_and_is_not_counted(stop):
    assert parse(ChatBody, stop=stop).stop == (stop or [])[16:]


TOOL_IN_OTHER_ORDER = {
    "function": {
        "strict": False,
        "description": "Say the weather.",
        "parameters": {"properties": {"city": {"default": None, "type": "string"}}, "x": [None]},
        "name": "weather",
    },
    "type": "function",
}


def test_tools_and_calls_have_the_text_that_training_has(small_tiny):
    arguments = {"unit": None, "city": "Bonn", "of": {"b": 1, "a": None}}
    calls = [{"type": "function", "function": {"arguments": arguments, "name": "weather"}}]
    messages = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": calls}]
    messages += [{"role": "tool", "content": "sun"}]
    fields = {"tools": [TOOL_IN_OTHER_ORDER], "messages": messages}

    served = RequestPrompts(small_tiny, 8, 512).of_chat(parse(ChatBody, **fields))
    row = Row("f:1", fields)
    trained = Chat().read(row, DataConfig(), small_tiny.tokenizer)
    assert served == replace(trained, asked=len(trained.messages)).prompt()[1]
    text = small_tiny.tokenizer.decode(served)
    assert '{"description": "Say the weather.", "parameters"' in text
    assert '{"city": {"type": "string"}}, "x": [null]}' in text
    assert '"arguments": {"city": "Bonn", "of": {"b": 1}}' in text


def test_numbers_that_json_does_not_have_are_rejected():
    nan = float("nan")
    tool = {**OTHER, "function": {"name": "f", "parameters": {"minimum": nan}}}
    with raises("invalid", "tools.0", "in 'function.parameters.minimum', nan"):
        parse(ChatBody, tools=[tool])
    call = {"function": {"name": "f", "arguments": {"a": nan}}}
    with raises("invalid", "messages.0.tool_calls.0.function.arguments", "in 'a', nan"):
        parse(ChatBody, messages=[{"role": "assistant", "tool_calls": [call]}])


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
PARSED = {"id": "call_1", "function": {**CALL["function"], "parsed_arguments": {"a": 1}}}
CALLED = {"content": "", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {"a": 1}}}]}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": None, "tool_calls": [CALL]}, CALLED),
        ({"tool_calls": [{**CALL, "index": None}], "parsed": None}, CALLED),
        ({"tool_calls": [PARSED]}, CALLED),
        ({"tool_calls": [{**CALL, "function": {"name": "f", "arguments": {"a": 1}}}]}, CALLED),
        ({"content": "a", "tool_calls": None, "annotations": []}, {"content": "a"}),
        ({"content": [{"type": "text", "text": each} for each in "ab"]}, {"content": "ab"}),
        ({"content": None, "refusal": "No."}, {"content": "No."}),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, {"content": "No."}),
        (
            {"content": "a", "reasoning_content": "why"},
            {"content": "a", "reasoning_content": "why", "reasoning": "why", "thinking": "why"},
        ),
    ],
)
def test_messages_of_an_assistant(message, expected):
    body = parse(ChatBody, messages=[{"role": "assistant", **message}])
    assert body.messages[0].to_template() == {"role": "assistant", **expected}


@pytest.mark.parametrize(
    ("message", "where", "named"),
    [
        ({"content": [{"type": "text", "text": "a"}, {"type": "file"}]}, "content.1", "file"),
        ({"content": [{"type": "text"}]}, "content.0", "text"),
        ({"content": 5}, "content", "text"),
        ({"content": "a", "audio": {"id": "x"}}, "audio", "not supported"),
        ({"content": "a", "function_call": {"name": "f"}}, "function_call", "not supported"),
        ({"tool_calls": [{**CALL, "type": "custom"}]}, "tool_calls.0.type", "function"),
    ],
)
def test_what_is_not_supported_in_a_message_is_named(shared_server, message, where, named):
    messages = [{"role": "user", **message}]
    error = rejected(shared_server, CHAT, {"model": "notes", "messages": messages})
    assert error["param"] == f"messages.0.{where}"
    assert error["message"].startswith(error["param"]) and named in error["message"]


@pytest.fixture
def prompts(small_tiny):
    return RequestPrompts(small_tiny, 512, 600)


def test_calls_are_not_enforced(prompts):
    for fields, code, named in (
        ({}, "unsupported", "tools"),
        ({"tool_choice": "required"}, "invalid", "tool_choice"),
        ({"tool_choice": TOOL}, "invalid", "tool_choice"),
    ):
        with raises(code, named, "Send"):
            parse(ChatBody, tools=[TOOL], **fields)
    assert parse(ChatBody, tools=[TOOL], tool_choice="none").usable_tools == []
    plain = parse(ChatBody, tools=[OTHER], tool_choice="auto", parallel_tool_calls=False)
    request = prompts.chat_maker(plain, [5], 0.0)(0, print)
    assert request.one_call and not request.processors
