"""Log-probabilities of tokens that are parts of characters have their true bytes."""

import pytest

from tests.serving.test_bad_requests import CHAT

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
