"""The layouts of JSON that a schema allows."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from mlx_packs.config.schema import DataConfig
from mlx_packs.data.json_layout import json_layout
from mlx_packs.serving.grammar import Grammars, schema_in_layout
from mlx_packs.serving.prompts import RequestPrompts
from mlx_packs.serving.request import TextRequest
from tests.helpers.rows import train_split
from tests.serving.test_prompts import chat

BYTES = LLTokenizer("byte")
VALUE = {"spam": True, "amount": "£5 😀", "list": [{"n": 1}, {}], "to": {"town": None, "none": []}}
OBJECT = {"type": "object"}
SHORT = '{\n  "a": [1, 2, 3],\n  "b": {"c": [], "d": null}\n}'  # lists in one line
SCHEMA = {
    "type": "object",
    "properties": {"to": OBJECT, "list": {"type": "array", "items": OBJECT}}
    | {"amount": {"type": "string"}, "spam": {"type": "boolean"}},
    "required": ["spam", "amount", "list", "to"],
    "additionalProperties": False,
}
LAYOUTS = {
    "as json.dumps": {},
    "compact": {"separators": (",", ":")},
    "indented": {"indent": 4},
    "tabs": {"indent": "\t"},
    "raw": {"ensure_ascii": False},
}


def allows(schema: dict, layout: dict, text: str) -> bool:
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema_in_layout(schema, layout)))
    matcher = LLMatcher(BYTES, grammar)
    tokens = BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def recorded(text: str) -> dict:
    rows = [{"prompt": "Extract.", "completion": text}] * 3
    return json_layout(train_split(rows), DataConfig())


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("schema", [OBJECT, SCHEMA], ids=["any", "schema"])
def test_the_layout_of_the_rows_is_the_one_that_answers_may_have(name, schema):
    text = json.dumps(VALUE, **LAYOUTS[name])
    assert allows(schema, recorded(text), text)
    others = {"as json.dumps": "compact", "compact": "as json.dumps"}
    if name in others:
        assert not allows(schema, recorded(text), json.dumps(VALUE, **LAYOUTS[others[name]]))


@pytest.mark.parametrize(
    ("rows", "text", "is_allowed"),
    [
        (None, '{"a": 1, "b": 2}', True),  # without a layout, single spaces are optional
        (None, '{"a":1,"b":2}', True),
        (None, '{"a":  1}', False),
        (None, '{"a":\n1}', False),
        (SHORT, SHORT, True),
        (json.dumps(VALUE, indent=2), '{\n\n  "a": 1}', False),
        (json.dumps(VALUE, indent=2), "{\n" + " " * 200 + '"a": 1}', False),
    ],
)
def test_white_space_is_that_of_the_rows(rows, text, is_allowed):
    assert allows(OBJECT, recorded(rows) if rows else {}, text) is is_allowed


def test_properties_have_the_order_of_the_rows_and_new_ones_come_last():
    schema = {"$defs": {"in": SCHEMA}, "$ref": "#/$defs/in"}
    ordered = schema_in_layout(schema, {"keys": ["spam", "amount", "gone", "to"]})
    assert list(ordered["$defs"]["in"]["properties"]) == ["spam", "amount", "to", "list"]


def request_of(base, layout: dict, **fields) -> tuple[str, TextRequest]:
    """The end of a prompt, and its request."""
    prompts = RequestPrompts(base, 512, 600)
    body = chat(**fields)
    prompt = prompts.of_chat(body, None, (), layout)
    request = prompts.chat_maker(body, prompt, 0.0, (), layout)(0, print)
    return base.tokenizer.decode(prompt[-8:]), request


def test_the_opening_of_a_code_block_ends_the_prompt(small_tiny):
    for form in ({"type": "json_object"}, None):
        end, request = request_of(small_tiny, {"opening": "```json\n"}, response_format=form)
        assert end.endswith("```json\n") is bool(request.processors) is bool(form)


@pytest.mark.parametrize(
    ("state", "layout", "answer", "is_right"),
    [
        ("reasoning", {}, 'Why {?</think>\n\n{"a": 1}', True),
        ("reasoning", {}, '{"a": 1}', False),
        ("normal", {"thoughts": True}, '<think>\nWhy?</think>{"a": 1}', True),
        ("normal", {"thoughts": True}, '{"a": 1}', True),
        ("normal", {}, '<think>Why?</think>{"a": 1}', False),
    ],
)
def test_json_after_thoughts(small_tiny, state, layout, answer, is_right):
    grammars = Grammars(small_tiny.tokenizer, small_tiny.vocab_size)
    grammar = grammars.check({"const": {"a": 1}}, {"key_separator": ": "} | layout, state)
    matcher = LLMatcher(grammars._tokens, grammar)
    tokens = small_tiny.tokenizer.encode(answer)
    is_accepted = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
    assert is_accepted is is_right


def test_a_model_without_marks_of_thoughts_writes_none_before_json(small_tiny, monkeypatch):
    form = {"type": "json_object"}
    monkeypatch.setattr(small_tiny.tokenizer, "_think_start", None)
    _, request = request_of(small_tiny, {"thoughts": True}, response_format=form)
    assert request.processors and request.state is None
