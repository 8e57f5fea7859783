"""Bodies as prompts and processors: what templates, grammars and layouts of JSON may be."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from mlx_packs.bases.tokenizer import opens_thoughts
from mlx_packs.config.schema import DataConfig
from mlx_packs.data.json_layout import json_layout
from mlx_packs.inference.generate import chat_prompt
from mlx_packs.serving.fields import parsed
from mlx_packs.serving.grammar import Grammars, schema_in_layout
from mlx_packs.serving.prompts import RequestPrompts
from mlx_packs.serving.protocol import ChatBody, CompletionBody
from mlx_packs.serving.request import Output, TextRequest, first_state
from tests.helpers.errors import raises
from tests.helpers.rows import train_split

MESSAGES = [{"role": "user", "content": "The list"}]


def chat(**fields) -> ChatBody:
    return parsed(ChatBody, json.dumps({"model": "base", "messages": MESSAGES, **fields}).encode())


@pytest.fixture
def prompts(small_tiny):
    return RequestPrompts(small_tiny, 512, 600)


def test_names_of_arguments_are_no_variables_of_a_template(prompts):
    for name in ("self", "base", "messages", "tools", "tokenize", "add_generation_prompt"):
        with raises("invalid", "chat_template_kwargs", name):
            prompts.of_chat(chat(chat_template_kwargs={name: [1]}))


@pytest.fixture
def shown(prompts, small_tiny, monkeypatch):
    tokenizer = small_tiny.tokenizer

    def show(template: str, variables: dict, defaults: dict | None = None) -> str:
        whole = template + "{{ messages[0].content }}"
        monkeypatch.setattr(tokenizer._tokenizer, "chat_template", whole)
        prompt = prompts.of_chat(chat(chat_template_kwargs=variables), defaults)
        return tokenizer.decode(prompt).removesuffix("The list")

    return show


def test_variables_of_a_request_come_before_the_defaults(shown, small_tiny):
    assert shown("{{ tone }} {{ missing }}", {"tone": "kind", "a b": None}) == "kind "
    defaults = {"tone": "warm", "mood": "calm"}
    assert shown("{{ tone }} {{ mood }}", {"tone": "cold"}, defaults) == "cold calm"

    template = "{{ tone is defined }} {{ tone|default('none') }}"
    assert shown(template, {"tone": None}) == "False none"  # null is not given
    assert shown(template, {"tone": None}, {"tone": "kind"}) == "True kind"
    tokens = chat_prompt(small_tiny, MESSAGES, tone=None)
    assert small_tiny.tokenizer.decode(tokens) == "False noneThe list"


def test_a_request_without_max_tokens_takes_what_the_context_leaves(prompts):
    def limit(body, prompt):
        return prompts.text_maker(body, [prompt], 0.0)(0, print).max_tokens

    body = parsed(CompletionBody, b'{"model": "base", "prompt": "a"}')
    assert limit(body, [5] * 10) == 512
    assert limit(body, [5] * 500) == 100
    assert limit(body, [5] * 600) == 1  # which is then too much, and rejected as such
    assert prompts.chat_maker(chat(), [5] * 500, 0.0)(0, print).max_tokens == 100
    body = chat(max_tokens=7)
    assert prompts.chat_maker(body, [5] * 500, 0.0)(0, print).max_tokens == 7
    body = chat(max_tokens=7, max_completion_tokens=8)
    assert prompts.chat_maker(body, [5], 0.0)(0, print).max_tokens == 8


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nope"},
        {"$ref": "#"},  # nothing obeys it
        {"$ref": "http://example.org/schema"},
        {"type": "string", "pattern": "(" * 1000},
        {"properties": 5},
    ],
    ids=str,
)
def test_schemas_that_cannot_be_obeyed_are_rejected_at_once(small_tiny, schema):
    grammars = Grammars(small_tiny.tokenizer, small_tiny.vocab_size)
    with raises("invalid", "response_format") as caught:
        grammars.check(schema, {})
    assert "\n" not in caught.value.message and len(caught.value.message) < 500


ENDS = {  # of the prompt, after the mark of the assistant
    "": False,
    "<think>\n": True,
    "<think>\n\n</think>\n\n": False,
}
TURNS = {
    "plain": {"user": "Hi."},
    "question": {"system": "Write <think> first.", "user": "What is <think>"},
    "tool": {"user": "Hi.", "assistant": "Let me see.", "tool": "<think>"},
    "earlier": {"assistant": "The tag is <think>.", "user": "And?"},
}


@pytest.mark.parametrize(
    ("turns", "end"),
    [*(("plain", end) for end in ENDS), *((turns, "") for turns in TURNS if turns != "plain")],
)
def test_only_the_end_of_the_prompt_counts(small_tiny, monkeypatch, turns, end):
    tokenizer = small_tiny.tokenizer
    start, opened = "{{- '<|im_start|>assistant\\n' }}", f"<|im_start|>assistant\n{end}"
    assert tokenizer.chat_template.count(start) == 1
    changed = tokenizer.chat_template.replace(start, "{{- " + json.dumps(opened) + " }}")
    monkeypatch.setattr(tokenizer._tokenizer, "chat_template", changed)
    messages = [{"role": role, "content": text} for role, text in TURNS[turns].items()]
    prompt = chat_prompt(small_tiny, messages)
    assert opens_thoughts(tokenizer, prompt) is ENDS[end]

    state = first_state(tokenizer, prompt)
    output, pieces = Output(tokenizer, (), state), []
    for token in tokenizer.encode("It is</think> red", add_special_tokens=False):
        pieces += output.add(token)
    pieces += output.finish()
    thoughts = "".join(piece.text for piece in pieces if piece.kind == "reasoning")
    assert thoughts == ("It is" if ENDS[end] else "")


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


def request_of(prompts, base, layout: dict, **fields) -> tuple[str, TextRequest]:
    body = chat(**fields)
    prompt = prompts.of_chat(body, None, (), layout)
    request = prompts.chat_maker(body, prompt, 0.0, (), layout)(0, print)
    return base.tokenizer.decode(prompt[-8:]), request


def test_the_opening_of_a_code_block_ends_the_prompt(prompts, small_tiny):
    for form in ({"type": "json_object"}, None):
        layout = {"opening": "```json\n"}
        end, request = request_of(prompts, small_tiny, layout, response_format=form)
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


def test_a_model_without_marks_of_thoughts_writes_none(prompts, small_tiny, monkeypatch):
    form = {"type": "json_object"}
    monkeypatch.setattr(small_tiny.tokenizer, "_think_start", None)
    _, request = request_of(prompts, small_tiny, {"thoughts": True}, response_format=form)
    assert request.processors and request.state is None
