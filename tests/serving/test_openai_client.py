"""Clients that others wrote: OpenAI's own, and `llm` (https://llm.datasette.io)."""

import json
from typing import Literal

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict, Field

from mlx_packs import load_base
from mlx_packs.serving.embedding import EmbeddingWorker
from tests.helpers.serving import Running
from tests.serving.conftest import serving

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("default")]
MESSAGES = [{"role": "user", "content": "The list of"}]
GREEDY = {"temperature": 0, "max_tokens": 12}

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


class Answer(BaseModel):
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


def test_chat_whole_and_streamed(client):
    whole = client.chat.completions.create(model="notes", messages=MESSAGES, n=2, **GREEDY)
    text = whole.choices[1].message.content
    assert text and whole.usage.completion_tokens == 24

    again = [*MESSAGES, whole.choices[0].message, {"role": "user", "content": "More"}]
    assert client.chat.completions.create(model="law", messages=again, **GREEDY).choices

    usage = {"stream_options": {"include_usage": True}, **GREEDY}
    chunks = client.chat.completions.create(model="notes", messages=MESSAGES, stream=True, **usage)
    chunks = list(chunks)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage.completion_tokens == 12

    stop = {"stop": text[6:9], **GREEDY}
    with client.chat.completions.stream(model="notes", messages=MESSAGES, **stop) as stream:
        stream.until_done()
        assert stream.get_final_completion().choices[0].message.content == text[:6]


def test_answers_of_a_class(client):
    parsed = client.chat.completions.parse(
        model="notes", messages=MESSAGES, response_format=Answer, temperature=1, seed=5
    )
    assert isinstance(parsed.choices[0].message.parsed, Answer)


def test_answers_and_their_dumps_can_be_sent_back(client):
    fields = {"model": "notes", "temperature": 0}
    text = client.chat.completions.create(messages=MESSAGES, max_tokens=8, **fields)
    form = {"response_format": Answer, "max_tokens": 64}
    parsed = client.chat.completions.parse(messages=MESSAGES, **form, **fields)
    call = text.choices[0].message.model_validate({"role": "assistant", "tool_calls": [CALL]})

    for message in (text.choices[0].message, parsed.choices[0].message, call):
        results = [
            {"role": "tool", "tool_call_id": each.id, "content": "5"}
            for each in message.tool_calls or ()
        ]
        for sent in (message, message.model_dump(), message.model_dump(exclude_unset=True)):
            again = [*MESSAGES, sent, *results, {"role": "user", "content": "More"}]
            reply = client.chat.completions.create(messages=again, max_tokens=4, **fields)
            assert reply.choices[0].message.content


def test_errors_have_their_class(client, shared_server):
    import openai

    def create(**fields):
        client.chat.completions.create(**{"model": "notes", "messages": MESSAGES, **fields})

    with pytest.raises(openai.NotFoundError) as caught:
        create(model="other")
    assert caught.value.param == "model" and "notes" in caught.value.body["message"]
    with pytest.raises(openai.NotFoundError):
        create(model="other", stream=True)
    with pytest.raises(openai.BadRequestError) as caught:
        create(temperature=3)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model="base", input="a")
    with pytest.raises(openai.ConflictError):
        client.delete("/packs/base", cast_to=object)


def test_keys(shared_server):
    import openai

    with Running(shared_server.worker, api_key="secret") as server:
        with client_of(server, api_key="wrong") as wrong, pytest.raises(openai.AuthenticationError):
            wrong.models.list()
        with client_of(server, api_key="secret") as right:
            assert right.models.list()


def test_embeddings(encoder):
    worker = EmbeddingWorker(load_base(encoder), 8, 64)
    given = {"model": "base", "input": ["a car", "a house"]}
    with serving(worker) as server, client_of(server) as client:
        vectors = [
            [e.embedding for e in client.embeddings.create(**given, **form).data]
            for form in ({}, {"encoding_format": "float"})  # it asks for base64
        ]

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
