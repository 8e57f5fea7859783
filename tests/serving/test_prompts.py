"""Bodies as prompts and processors: what templates, grammars and tokens may be."""

import json

import pytest

from mlx_packs.bases.tokenizer import opens_thoughts
from mlx_packs.inference.generate import chat_prompt, raw_prompt
from mlx_packs.serving.fields import parsed
from mlx_packs.serving.grammar import Grammars
from mlx_packs.serving.prompts import RequestPrompts
from mlx_packs.serving.protocol import ChatBody, CompletionBody
from mlx_packs.serving.request import Output, first_state
from tests.helpers.errors import raises

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
    """What a template shows, by the variables of a request and the defaults of a server."""
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


def test_prompts_of_a_completion(prompts, small_tiny):
    def of(prompt):
        body = json.dumps({"model": "m", "prompt": prompt}).encode()
        return prompts.of_texts(parsed(CompletionBody, body))

    text = raw_prompt(small_tiny, "The list")
    assert of("The list") == of(["The list"]) == of(text) == [text]
    assert of(["The list"] * 64) == [text] * 64


ENDS = {  # of the prompt, after the mark of the assistant
    "": False,
    "<think>\n": True,
    "<think>": True,
    "<think>\n\n": True,
    "<think>\n\n</think>\n\n": False,
    "<think></think>": False,
}
TURNS = {
    "plain": {"user": "Hi."},
    "question_end": {"user": "What is <think>"},
    "closed": {"user": "What does </think> do?"},
    "system": {"system": "Write <think> first.", "user": "Hi."},
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


def test_tokenizers_without_thoughts_open_none(small_tiny, monkeypatch):
    monkeypatch.setattr(small_tiny.tokenizer, "_think_start", None)
    assert first_state(small_tiny.tokenizer, [4092]) == "normal"
