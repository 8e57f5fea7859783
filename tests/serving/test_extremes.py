"""Settings at the edge of what is allowed: samplers and JSON still have numbers."""

import pytest

from mlx_packs.runtime import mx
from mlx_packs.serving.request import sampler_of

SCORES = mx.log(mx.array([[0.1, 0.2, 0.4, 0.3]]))
LEAST = 5e-324


@pytest.mark.parametrize("temperature", [0, LEAST, 1e-40, 1e-7])
def test_a_temperature_of_almost_nothing_takes_the_likeliest(temperature):
    assert sampler_of(temperature, 1.0, 0, 0.0, 1) is None


@pytest.mark.parametrize(
    ("top_p", "top_k", "min_p"),
    [(LEAST, 0, 0.0), (1e-40, 0, 0.0), (1.0, 1, 0.0), (1.0, 0, 1 - 1e-9), (LEAST, 1, 1 - 1e-9)],
)
def test_filters_leave_the_likeliest(top_p, top_k, min_p):
    sampler = sampler_of(2.0, top_p, top_k, min_p, 1)
    assert {sampler(SCORES).item() for _ in range(20)} == {2}


@pytest.mark.parametrize(
    "options",
    [
        {"response_format": {"type": "json_object"}},
        {"repetition_penalty": 1e-40},
        {"logit_bias": {"5": 100, "6": -100}},
        {"temperature": 1, "top_p": LEAST},
    ],
    ids=str,
)
def test_logprobs_of_tokens_that_cannot_be_are_numbers(shared_server, options):
    """Answers and events are read as strict JSON."""
    more = {"logprobs": True, "top_logprobs": 20, "max_tokens": 4, "temperature": 0, **options}
    answer = shared_server.chat("notes", "The list", **more)
    for entry in answer["choices"][0]["logprobs"]["content"]:
        assert all(-9999 <= top["logprob"] <= 1e-3 for top in [entry, *entry["top_logprobs"]])
    messages = [{"role": "user", "content": "The list"}]
    body = {"model": "notes", "messages": messages, **more}
    assert list(shared_server.events("/v1/chat/completions", body))
