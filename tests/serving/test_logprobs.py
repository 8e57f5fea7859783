"""Log-probabilities of tokens that are parts of characters: true bytes, every candidate its own."""

import pytest

from mlx_packs.serving import answers
from tests.serving.test_bad_requests import CHAT, COMPLETIONS

EMOJI = list("\N{GRINNING FACE}".encode())


def biased(tokens: list[int]) -> dict:
    """Fields that make the answer be the first of ``tokens``, with the others behind."""
    bias = {str(token): 100 - 20 * i for i, token in enumerate(tokens)}
    return {"model": "notes", "temperature": 0, "logit_bias": bias}


@pytest.fixture
def tokens(shared_server) -> list[int]:
    tokenizer = shared_server.worker.base.tokenizer
    return tokenizer.encode("\N{GRINNING FACE}", add_special_tokens=False)


def choice_of(server, path: str, body: dict, streams: bool) -> dict:
    """The choice of an answer of one token, with its log-probabilities."""
    if not streams:
        return server.json("POST", path, body)[1]["choices"][0]
    choices = [event["choices"][0] for event in server.events(path, body)]
    return next(choice for choice in choices if choice["logprobs"])


@pytest.mark.parametrize("streams", [False, True])
def test_bytes_of_a_part_of_a_character(shared_server, tokens, streams):
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "logprobs": True}
    body |= biased(tokens) | {"top_logprobs": 4}
    (entry,) = choice_of(shared_server, CHAT, body, streams)["logprobs"]["content"]
    assert entry["bytes"] == EMOJI[:1] and entry["token"] == r"bytes:\xf0"
    assert [each["bytes"] for each in entry["top_logprobs"]] == [[byte] for byte in EMOJI]
    assert len({each["token"] for each in entry["top_logprobs"]}) == 4


@pytest.mark.parametrize("streams", [False, True])
def test_completions_keep_every_candidate(shared_server, tokens, streams):
    body = {"prompt": "The", "max_tokens": 1, "logprobs": 4, **biased(tokens)}
    logprobs = choice_of(shared_server, COMPLETIONS, body, streams)["logprobs"]
    assert list(logprobs["top_logprobs"][0]) == [rf"bytes:\x{byte:02x}" for byte in EMOJI]
    assert logprobs["tokens"] == [r"bytes:\xf0"]


def test_offsets_are_those_of_the_text(shared_server, tokens):
    prompt = "It was \N{GRINNING FACE}"
    body = {"model": "notes", "prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 4}
    choice = choice_of(shared_server, COMPLETIONS, body | {"temperature": 0}, False)
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[0] == len(prompt)
    for offset, token in zip(offsets, choice["logprobs"]["tokens"], strict=True):
        assert choice["text"][offset:].startswith(token)


def test_candidates_of_one_text_stay_apart(shared_server, tokens, monkeypatch):
    monkeypatch.setattr(answers, "token_bytes", lambda *_: b"a")
    fields = {"prompt": "The", "max_tokens": 1, "logprobs": 4}
    body = biased(tokens) | fields
    choice = shared_server.json("POST", COMPLETIONS, body)[1]["choices"][0]
    names = ["a", *(f"token_id:{token}" for token in tokens[1:])]
    assert list(choice["logprobs"]["top_logprobs"][0]) == names
