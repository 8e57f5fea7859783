"""Whether a prompt ends in the thoughts of an answer: only its end counts."""

import json

import pytest

from mlx_packs.bases.tokenizer import opens_thoughts
from mlx_packs.inference.generate import chat_prompt
from mlx_packs.serving.request import Output, first_state

ENDS = {  # of the prompt, after the mark of the assistant
    "": False,
    "<think>\n": True,
    "<think>": True,
    "<think>\n\n": True,
    "<think>\n\n</think>\n\n": False,
    "<think></think>": False,
}
TURNS = {
    "plain": [{"role": "user", "content": "Hi."}],
    "question_end": [{"role": "user", "content": "What is <think>"}],
    "closed": [{"role": "user", "content": "What does </think> do?"}],
    "system": [
        {"role": "system", "content": "Write <think> first."},
        {"role": "user", "content": "Hi."},
    ],
    "tool": [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "Let me see."},
        {"role": "tool", "content": "<think>"},
    ],
    "earlier": [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "The tag is <think>."},
        {"role": "user", "content": "And?"},
    ],
}


@pytest.mark.parametrize(
    ("turns", "end"),
    [*(("plain", end) for end in ENDS), *((turns, "") for turns in TURNS if turns != "plain")],
)
def test_only_the_end_of_the_prompt_counts(small_tiny, monkeypatch, turns, end):
    tokenizer = small_tiny.tokenizer
    template = tokenizer.chat_template
    assert template.count("{{- '<|im_start|>assistant\\n' }}") == 1
    changed = template.replace(
        "{{- '<|im_start|>assistant\\n' }}",
        "{{- " + json.dumps(f"<|im_start|>assistant\n{end}") + " }}",
    )
    monkeypatch.setattr(tokenizer._tokenizer, "chat_template", changed)
    prompt = chat_prompt(small_tiny, TURNS[turns])
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
