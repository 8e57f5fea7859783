"""Calls and tools of every dialect have one form, which training and serving render."""

import json
from datetime import date, datetime, time

import pytest

from mlx_packs.data.messages import normal_arguments, normal_calls, normal_tools, turns_of
from mlx_packs.serving.protocol import Message

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
TEXT = json.dumps({"name": "weather", "arguments": {"city": "Bonn"}})
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"city": "Bonn"}, {"city": "Bonn"}),
        ('{"city": "Bonn", "a": null}', {"city": "Bonn", "a": None}),
        ({"city": "Bonn", "a": None, "at": {"x": 1, "y": None}}, {"city": "Bonn", "at": {"x": 1}}),
        (
            {"of": [{"day": date(2026, 5, 1)}, time(8, 30)]},
            {"of": [{"day": "2026-05-01"}, "08:30:00"]},
        ),
        *((nothing, {}) for nothing in (None, " ", "null", {"a": None})),
    ],
)
def test_arguments_are_an_object(value, expected):
    assert normal_arguments(value) == expected


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("{city", "not valid JSON"),
        ('{"a": NaN}', "not valid JSON: NaN"),
        ({"a": [{"b": float("nan")}]}, r"have, in 'a\[0\].b', nan, which JSON does not have"),
        ({"a": {5: 1}}, "have the key 5, which is no text"),
        (5, "must be an object"),
    ],
)
def test_arguments_that_are_no_object_are_a_fault(value, fault):
    with pytest.raises(ValueError, match=fault):
        normal_arguments(value)


@pytest.mark.parametrize("levels", [101, 5000])
def test_a_text_that_is_nested_too_deeply_is_a_fault(levels):
    deep = '{"a":' * levels + "1" + "}" * levels
    for read, value in (
        (normal_arguments, deep),
        (normal_tools, [{"name": "f", "parameters": deep}]),
    ):
        with pytest.raises(ValueError, match="nested more than 100 deep|not valid JSON"):
            read(value)


@pytest.mark.interop
def test_a_missing_date_of_pandas_is_a_fault():
    import pandas

    with pytest.raises(ValueError, match="in 'a', a NaTType"):
        normal_arguments({"a": pandas.NaT})


@pytest.mark.parametrize(
    "calls",
    [
        [CALL],
        {"name": "weather", "arguments": '{"city": "Bonn"}'},
        [{"function": CALL["function"], "id": None, "index": 0}],
        [{"type": "tool_use", "name": "weather", "input": {"city": "Bonn"}}],
        [{**CALL["function"], "input": {"city": "Bonn"}, "args": {}, "parameters": {"a": None}}],
        [CALL, {"name": None, "arguments": {"city": None}}, {"function": {"name": None}}, None],
    ],
)
def test_calls_of_every_form_are_one(calls):
    assert normal_calls(calls) == [CALL]
    assert normal_calls([{**CALL, "id": "c1"}]) == [{"id": "c1", **CALL}]


@pytest.mark.parametrize(
    ("calls", "fault"),
    [
        (["x"], "call"),
        ([{"arguments": {"a": 1}}], "call"),
        (5, "call"),
        ([{"function": {"name": "f", "values": {"a": 1}}}], "unknown key 'values'"),
        ([{"name": "f", "arguments": {"a": 1}, "input": {"a": 2}}], "different arguments"),
    ],
)
def test_what_is_no_call_is_a_fault(calls, fault):
    with pytest.raises(ValueError, match=fault):
        normal_calls(calls)


def test_a_null_in_a_text_stays_and_none_elsewhere():
    for nothing in (None, "", "null", [], [{}]):
        assert normal_calls(nothing) == [] and normal_tools(nothing) is None
    schema = {"properties": {"city": {"default": None}}}
    text = json.dumps([{"name": "f", "parameters": schema}])
    assert normal_tools(text)[0]["function"]["parameters"] == schema
    call = {"name": "weather", "arguments": {"city": "Bonn", "unit": None}}
    text = json.dumps(call)
    for calls in (f"[{text}]", text):
        assert normal_calls(calls) == [{"type": "function", "function": call}]
    assert normal_calls([call]) == [CALL]


@pytest.mark.parametrize(
    "tools",
    [
        [TOOL],
        TOOL,
        json.dumps([TOOL]),
        [{**TOOL["function"], "parameters": json.dumps(SCHEMA)}],
        [{**TOOL, "function": {**TOOL["function"], "strict": True}, "x": None}],
        [TOOL, {}, None, {"type": None, "function": {"name": None}}],
    ],
)
def test_tools_of_every_form_are_one(tools):
    assert normal_tools(tools) == [TOOL]


def test_dates_in_tools_are_iso_texts():
    (tool,) = normal_tools([{"name": "f", "parameters": {"at": datetime(2026, 5, 1, 8)}}])
    assert tool["function"]["parameters"] == {"at": "2026-05-01T08:00:00"}
    with pytest.raises(ValueError, match="a tool has, in 'function.parameters.x', a bytes"):
        normal_tools([{"name": "f", "parameters": {"x": b"x"}}])


USER = {"role": "user", "content": "Weather in Bonn?"}
NORMAL = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "clear"}


@pytest.mark.parametrize(
    ("called", "result"),
    [
        (NORMAL, RESULT),
        (
            {**NORMAL, "tool_calls": None, "function_call": CALL["function"]},
            {**RESULT, "role": "function"},
        ),
        ({"role": "function_call", "content": TEXT}, {"role": "observation", "content": "clear"}),
        ({"from": "function_call", "value": TEXT}, {"from": "observation", "value": "clear"}),
    ],
)
def test_messages_of_every_dialect_have_one_form(called, result):
    messages = [turn.message for turn in turns_of([USER, called, result])]
    assert messages == [USER, NORMAL, RESULT]
    answer = {"role": "assistant", "content": f"<tool_call>\n{TEXT}\n</tool_call>"}
    assert turns_of([answer])[0].message == answer  # a call as text stays text


@pytest.mark.parametrize("before", [{"role": "assistant", "content": "I look."}, None])
def test_a_call_after_an_answer_or_a_call_and_a_turn_without_one_are_faults(before):
    called = {"role": "function_call", "content": TEXT}
    with pytest.raises(ValueError, match="Write them as one answer"):
        turns_of([USER, before or called, called])
    assert len(turns_of([USER, called, RESULT, called])) == 4
    for content in ("", "clear", None):
        with pytest.raises(ValueError, match="call"):
            turns_of([USER, {**called, "content": content}])


def test_arguments_that_a_model_wrote_wrong_are_served_as_they_are():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{city"}}
    served = Message.model_validate({"role": "assistant", "tool_calls": [call]}).to_template()
    assert served["tool_calls"][0]["function"]["arguments"] == "{city"


@pytest.mark.parametrize("arguments", ['{"city": "Bonn", "a": null}', ""])
def test_serving_has_the_same_form_as_training(arguments):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    served = Message.model_validate(message).to_template()
    assert served == turns_of([message])[0].message
    call["function"]["arguments"] = "{city"  # as a model wrote it
    served = Message.model_validate(message).to_template()
    assert served["tool_calls"][0]["function"]["arguments"] == "{city"
