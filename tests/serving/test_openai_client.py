"""Clients that others wrote: OpenAI's own, and `llm` (https://llm.datasette.io)."""

import json
from typing import Literal

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict, Field

from mlx_packs import load_base
from mlx_packs.serving.embedding import Embedder
from mlx_packs.serving.generation import Generator
from mlx_packs.serving.request import Limits, Request
from tests.helpers.serving import Running, until
from tests.serving.conftest import NAMES

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("default")]
MESSAGES = [{"role": "user", "content": "The list of"}]
GREEDY = {"temperature": 0, "max_tokens": 12}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

STRICT = {
    "type": "function",
    "function": {
        "name": "f",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


class Answer(BaseModel):
    """What an answer has to be."""

    model_config = ConfigDict(extra="forbid")  # else a weak model never ends it
    name: Literal["list", "tuple"]
    count: int = Field(ge=0, le=99)


def client_of(server: Running, **options):
    import openai

    options = {"api_key": "none", "max_retries": 0, **options}
    return openai.OpenAI(base_url=f"{server.url}/v1", **options)


@pytest.fixture
def client(shared_server):
    with client_of(shared_server) as client:
        yield client


def test_models(client):
    assert {model.id for model in client.models.list()} == {"base", *NAMES}
    assert client.models.retrieve("notes").owned_by == "mlx-packs"


def test_chat_whole_and_streamed(client):
    whole = client.chat.completions.create(model="notes", messages=MESSAGES, n=2, **GREEDY)
    text = whole.choices[1].message.content
    assert text and whole.usage.completion_tokens == 24
    again = [*MESSAGES, whole.choices[0].message, {"role": "user", "content": "More"}]
    assert client.chat.completions.create(model="law", messages=again, **GREEDY).choices
    chunks = list(
        client.chat.completions.create(
            model="notes",
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage.completion_tokens == 12
    stop = {"stop": text[6:9], **GREEDY}
    with client.chat.completions.stream(model="notes", messages=MESSAGES, **stop) as stream:
        stream.until_done()
        assert stream.get_final_completion().choices[0].message.content == text[:6]


def test_logprobs(client):
    answer = client.chat.completions.create(
        model="notes", messages=MESSAGES, logprobs=True, top_logprobs=2, **GREEDY
    )
    for entry in answer.choices[0].logprobs.content:
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0


def test_text_completions(client):
    whole = client.completions.create(model="notes", prompt=["def", "a"], logprobs=1, **GREEDY)
    chunks = client.completions.create(model="notes", prompt=["def", "a"], stream=True, **GREEDY)
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


def test_answers_of_a_class(client):
    parsed = client.chat.completions.parse(
        model="notes", messages=MESSAGES, response_format=Answer, temperature=1, seed=5
    )
    assert isinstance(parsed.choices[0].message.parsed, Answer)


def test_tools(client):
    answer = client.chat.completions.create(
        model="notes", messages=MESSAGES, tools=[TOOL], **GREEDY
    )
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls


def test_answers_and_their_dumps_can_be_sent_back(client):
    fields = {"model": "notes", "temperature": 0}
    text = client.chat.completions.create(messages=MESSAGES, max_tokens=8, **fields)
    tools = {"tools": [STRICT], "tool_choice": "required", "parallel_tool_calls": False}
    call = client.chat.completions.create(messages=MESSAGES, max_tokens=64, **tools, **fields)
    form = {"response_format": Answer, "max_tokens": 64}
    parsed = client.chat.completions.parse(messages=MESSAGES, **form, **fields)
    called = client.chat.completions.parse(messages=MESSAGES, max_tokens=64, **tools, **fields)
    assert called.choices[0].message.tool_calls[0].function.parsed_arguments

    for answer in (text, call, parsed, called):
        message = answer.choices[0].message
        results = [
            {"role": "tool", "tool_call_id": each.id, "content": "5"}
            for each in message.tool_calls or ()
        ]
        for sent in (message, message.model_dump(), message.model_dump(exclude_unset=True)):
            again = [*MESSAGES, sent, *results, {"role": "user", "content": "More"}]
            reply = client.chat.completions.create(messages=again, max_tokens=4, **fields)
            assert reply.choices[0].message.content


def test_null_fields_of_a_client(client):
    answer = client.chat.completions.create(
        model="notes",
        messages=MESSAGES,
        tools=[STRICT],
        tool_choice=None,
        parallel_tool_calls=None,
        stop=None,
        n=None,
        stream=None,
        top_p=None,
        logprobs=None,
        reasoning_effort=None,
        **GREEDY,
    )
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls


def test_errors_have_their_class(client, shared_server, shared_tiny, monkeypatch):
    import openai

    def create(client=client, **fields):
        fields = {"model": "notes", "messages": MESSAGES, **fields}
        return client.chat.completions.create(**fields)

    with pytest.raises(openai.NotFoundError) as caught:
        create(model="other")
    assert caught.value.param == "model" and "notes" in caught.value.body["message"]
    with pytest.raises(openai.NotFoundError):
        create(model="other", stream=True)
    with pytest.raises(openai.BadRequestError) as caught:
        create(temperature=3)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError):
        create(extra_body={"grammar": "x"})
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model="base", input="a")
    with monkeypatch.context() as patch:
        tokenizer = type(shared_server.worker.base.tokenizer)
        patch.setattr(tokenizer, "has_tool_calling", property(lambda _: False))
        with pytest.raises(openai.BadRequestError, match="tools"):
            create(tools=[TOOL])
    with Running(shared_server.worker, api_key="secret") as server:
        with client_of(server, api_key="wrong") as wrong, pytest.raises(openai.AuthenticationError):
            wrong.models.list()
        with client_of(server, api_key="secret") as right:
            assert right.models.list()
    with pytest.raises(openai.ConflictError):
        client.delete("/packs/base", cast_to=object)
    worker = Generator(shared_tiny, Limits(1, 1, 64 << 20, 64, 2048))
    worker.start()
    try:
        with Running(worker) as narrow, client_of(narrow) as busy:
            long = {"model": "base", "max_tokens": 1900, "logit_bias": {"5": 100}}
            with create(busy, **long, stream=True):
                until(lambda: worker.counts == (1, 0))
                waiting = Request("base", [5], 5, lambda _: None)
                worker.submit(waiting)
                with pytest.raises(openai.RateLimitError) as caught:
                    create(busy, **long)
                worker.cancel(waiting)
                assert int(caught.value.response.headers["retry-after"]) >= 1
            until(lambda: worker.counts == (0, 0))
        with Running(worker, request_seconds=0.3) as hasty, client_of(hasty) as late:
            with pytest.raises(openai.InternalServerError):
                create(late, **long)
    finally:
        worker.close(0.0)


def test_embeddings(encoder):
    worker = Embedder(load_base(encoder), 8, 64)
    worker.start()
    try:
        with Running(worker) as server, client_of(server) as client:
            vectors = [
                [e.embedding for e in client.embeddings.create(**fields).data]
                for fields in (
                    {"model": "base", "input": ["a car", "a house"]},  # base64, as it asks for
                    {"model": "base", "input": ["a car", "a house"], "encoding_format": "float"},
                )
            ]
    finally:
        worker.close(0.0)
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-6)
    assert len(vectors[0]) == 2 and len(vectors[0][0]) == worker.base.model.dims


@pytest.mark.parametrize("streams", [True, False])
def test_llm(shared_server, streams):
    from llm.default_plugins.openai_models import Chat, Completion

    settings = {"key": "none", "api_base": f"{shared_server.url}/v1", "supports_schema": True}
    expected = shared_server.chat("notes", "The list of")["choices"][0]["message"]["content"]
    model = Chat("mine", model_name="notes", **settings)
    response = model.prompt("The list of", stream=streams, **GREEDY)
    assert response.text() == expected and response.usage().output == 12
    schema = Answer.model_json_schema()
    answer = model.prompt("The list of", stream=streams, schema=schema, temperature=0)
    assert Answer.model_validate(json.loads(answer.text()))
    texts = Completion("mine", model_name="law", default_max_tokens=8, **settings)
    assert texts.prompt("def", stream=streams, temperature=0).text()
