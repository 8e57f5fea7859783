"""Log-probabilities of tokens that are parts of characters: true bytes, every candidate its own."""

import pytest

from tests.serving.test_bad_requests import CHAT, COMPLETIONS

EMOJI = list("\N{GRINNING FACE}".encode())


def biased(server, tokens: list[int], apart: bool = False) -> dict:
    """Fields that make the answer be ``tokens``, or the first of them with the others behind."""
    bias = {str(token): 100 - 20 * i * apart for i, token in enumerate(tokens)}
    return {"model": "notes", "temperature": 0, "logit_bias": bias}


@pytest.fixture
def tokens(shared_server) -> list[int]:
    tokenizer = shared_server.worker.base.tokenizer
    return tokenizer.encode("\N{GRINNING FACE}", add_special_tokens=False)


@pytest.mark.parametrize("streams", [False, True])
def test_bytes_of_a_part_of_a_character(shared_server, tokens, streams):
    body = biased(shared_server, tokens, apart=True) | {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 1,
        "logprobs": True,
        "top_logprobs": 4,
    }
    if streams:
        choices = [event["choices"][0] for event in shared_server.events(CHAT, body)]
        choice = next(choice for choice in choices if choice["logprobs"])
    else:
        choice = shared_server.json("POST", CHAT, body)[1]["choices"][0]
    (entry,) = choice["logprobs"]["content"]
    assert entry["bytes"] == EMOJI[:1] and entry["token"] == r"bytes:\xf0"
    assert [each["bytes"] for each in entry["top_logprobs"]] == [[byte] for byte in EMOJI]
    assert len({each["token"] for each in entry["top_logprobs"]}) == 4


@pytest.mark.parametrize("streams", [False, True])
def test_completions_keep_every_candidate(shared_server, tokens, streams):
    body = biased(shared_server, tokens, apart=True) | {
        "prompt": "The",
        "max_tokens": 1,
        "logprobs": 4,
    }
    if streams:
        choices = [event["choices"][0] for event in shared_server.events(COMPLETIONS, body)]
        choice = next(choice for choice in choices if choice["logprobs"])
    else:
        choice = shared_server.json("POST", COMPLETIONS, body)[1]["choices"][0]
    logprobs = choice["logprobs"]
    assert list(logprobs["top_logprobs"][0]) == [rf"bytes:\x{byte:02x}" for byte in EMOJI]
    assert logprobs["tokens"] == [r"bytes:\xf0"]


def test_offsets_are_those_of_the_text(shared_server):
    tokenizer = shared_server.worker.base.tokenizer
    body = {"model": "notes", "prompt": "It was \N{GRINNING FACE}", "echo": True, "logprobs": 0}
    emoji = tokenizer.encode("\N{GRINNING FACE}", add_special_tokens=False)
    for i, bias in enumerate(({str(emoji[0]): 100}, {})):
        fields = {"max_tokens": 4, "temperature": 0, "logit_bias": bias}
        choice = shared_server.json("POST", COMPLETIONS, body | fields)[1]["choices"][0]
        offsets = choice["logprobs"]["text_offset"]
        assert offsets[0] == len("It was \N{GRINNING FACE}")
        if i:
            parts = [choice["text"][offset:] for offset in offsets]
            for part, token in zip(parts, choice["logprobs"]["tokens"], strict=True):
                assert part.startswith(token)


def test_candidates_of_one_text_stay_apart(shared_server, tokens, monkeypatch):
    from mlx_packs.serving import answers

    monkeypatch.setattr(answers, "token_bytes", lambda *_: b"a")
    fields = {"prompt": "The", "max_tokens": 1, "logprobs": 4}
    body = biased(shared_server, tokens, apart=True) | fields
    choice = shared_server.json("POST", COMPLETIONS, body)[1]["choices"][0]
    names = ["a", *(f"token_id:{token}" for token in tokens[1:])]
    assert list(choice["logprobs"]["top_logprobs"][0]) == names
