"""Tokens as answers: reasoning and tool calls apart, whole and as a stream."""

import asyncio
import json

import pytest
from mlx_lm.tool_parsers import json_tools, pythonic

from mlx_packs.serving.answers import ChatAnswer, Texts
from mlx_packs.serving.protocol import Tool, tool_calls
from mlx_packs.serving.request import Finished, Logprob, Output, Progress, Started, TextRequest

WEATHER = Tool.model_validate_json(
    '{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}'
)
CALL = '{"name": "weather", "arguments": {"city": "Bonn é"}}'


class Detokenizer:
    last_segment = ""

    def add_token(self, token):
        self.last_segment = chr(token)

    def finalize(self):
        self.last_segment = ""


class Letters:
    has_thinking, think_start, think_end = True, "<think>", "</think>"
    has_tool_calling, response_initial_state, response_transitions = True, None, {}
    structural_markers = ()

    def __init__(self, parser=json_tools) -> None:
        self.tool_call_start, self.tool_call_end = parser.tool_call_start, parser.tool_call_end
        self.tool_parser = parser.parse_tool_call

    @property
    def detokenizer(self):
        return Detokenizer()

    added_tokens_decoder = {}

    def decode(self, tokens):
        return "".join(map(chr, tokens))

    def convert_ids_to_tokens(self, token):
        return chr(token)


class Writer:
    """What computes texts, in a generator's place: it writes what it is told to."""

    def __init__(self, tokenizer, text, reason="stop", state="normal", stop=()):
        self.tokenizer, self.text, self.reason = tokenizer, text, reason
        self.state, self.stop = state, stop

    def submit(self, request):
        request.on_event(Started(2))
        output = Output(self.tokenizer, self.stop, self.state)
        for character in self.text:
            logprob = Logprob(ord(character), -0.5, ())
            request.on_event(Progress(tuple(output.add(ord(character))), logprob))
        request.on_event(Progress(tuple(output.finish()), None))
        request.on_event(Finished(self.reason, len(self.text)))

    def cancel(self, request):
        pass


def answers(writer, tools=(WEATHER,)) -> tuple[dict, list[dict]]:
    """The message of the whole answer, and what the deltas of the stream add up to."""

    def answer() -> tuple[Texts, ChatAnswer]:
        texts = Texts(writer, 1, lambda i, tell: TextRequest("m", [1], 9, tell))
        return texts, ChatAnswer(texts, "m", 1, writer.tokenizer, tools)

    async def both():
        texts, first = answer()
        await texts.start()
        whole = await first.whole()
        texts, second = answer()
        await texts.start()
        return whole, [chunk async for chunk in second.stream(True)]

    return asyncio.run(both())


def check(writer, tools=(WEATHER,)) -> dict:
    """The choice of the whole answer, which the stream says too."""
    whole, chunks = answers(writer, tools)
    for answer in (whole, *chunks):
        json.dumps(answer, allow_nan=False, ensure_ascii=False).encode()

    (choice,) = whole["choices"]
    message = choice["message"]
    joined = {"content": "", "reasoning_content": ""}
    calls = []
    for chunk in chunks[:-1]:
        delta = chunk["choices"][0]["delta"]
        for name in joined:
            joined[name] += delta.get(name, "")
        calls += delta.get("tool_calls", [])

    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]][-1] == (
        choice["finish_reason"]
    )
    assert joined["reasoning_content"] == message.get("reasoning_content", "")
    content = joined["content"].strip() if calls else joined["content"]
    assert content == (message["content"] or "")
    assert [call["function"] for call in calls] == [
        call["function"] for call in message.get("tool_calls", [])
    ]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    return choice


def test_a_call_is_read_and_its_marks_are_gone():
    choice = check(Writer(Letters(), f"Let me see.\n<tool_call>{CALL}</tool_call>"))
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather" and call["id"].startswith("call-")
    assert json.loads(call["function"]["arguments"]) == {"city": "Bonn é"}
    assert choice["message"]["content"] == "Let me see."


def test_several_calls_in_one_and_in_several_marks_and_as_python_writes_them():
    text = f"<tool_call>{CALL}</tool_call>\n<tool_call>[{CALL}, {CALL}]</tool_call>"
    choice = check(Writer(Letters(), text))
    assert len({call["id"] for call in choice["message"]["tool_calls"]}) == 3
    assert choice["message"]["content"] is None

    text = "<|tool_call_start|>[weather(city='Bonn', days=2)]<|tool_call_end|>"
    (call,) = check(Writer(Letters(pythonic), text))["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Bonn", "days": 2}


@pytest.mark.parametrize(
    "written",
    [
        '{"name": "weather"}',
        '{"name": 5, "arguments": {}}',
        "[1, 2]",
        "{",
        '{"name": "weather", "arguments": {"a": NaN}}',
        '{"name": "weather", "arguments": {"a": "\\ud800"}}',
    ],
    ids=lambda written: written[:20],
)
def test_what_is_no_call_is_shown_as_it_was_written(written):
    choice = check(Writer(Letters(), f"So: <tool_call>{written}</tool_call>"))
    assert choice["message"]["content"] == f"So: {written}"
    assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]


def test_a_call_of_very_many_lists_is_no_call():
    assert tool_calls(json_tools.parse_tool_call, "[" * 5_000, [WEATHER]) == []


@pytest.mark.parametrize(
    ("text", "reason", "state", "tools", "content"),
    [
        (f"<tool_call>{CALL[:20]}", "length", "normal", (WEATHER,), CALL[:20]),  # cut off
        (f"<tool_call>{CALL}</tool_call>", "stop", "normal", (), CALL),  # without tools
        ("<think>a</think><tool_call>b", "stop", None, (), "<think>a</think><tool_call>b"),
    ],
)
def test_what_is_shown_as_it_was_written(text, reason, state, tools, content):
    choice = check(Writer(Letters(), text, reason, state), tools)
    assert choice["finish_reason"] == reason and choice["message"]["content"] == content


def test_reasoning_is_apart():
    for state, begin in (("normal", "<think>"), ("reasoning", "")):
        choice = check(Writer(Letters(), f"{begin}a < b</think>So <b", state=state))
        assert choice["message"]["reasoning_content"] == "a < b"
        assert choice["message"]["content"] == "So <b"
