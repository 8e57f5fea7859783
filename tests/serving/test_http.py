"""What an OpenAI client asks and gets, over HTTP."""

import json

import pytest

from mlx_packs.runtime import mx
from mlx_packs.serving.request import sampler_of
from tests.helpers.serving import Running
from tests.serving.conftest import NAMES

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = "The list of"


def text(answer: dict) -> str:
    (choice,) = answer["choices"]
    return choice["message"]["content"]


def chat_body(**options) -> dict:
    messages = [{"role": "user", "content": TEXT}]
    return {"model": "notes", "messages": messages, "temperature": 0, "max_tokens": 8, **options}


def completion_body(prompt: object = TEXT, **options) -> dict:
    return {"model": "notes", "prompt": prompt, "temperature": 0, "max_tokens": 8, **options}


def complete(server: Running, prompt: object = TEXT, **options) -> list[dict]:
    status, answer = server.json("POST", COMPLETIONS, completion_body(prompt, **options))
    assert status == 200, answer
    return answer["choices"]


def test_models_are_the_base_and_its_packs(shared_server):
    status, answer = shared_server.json("GET", "/v1/models")
    assert status == 200 and answer["object"] == "list"
    assert {model["id"] for model in answer["data"]} == {"base", *NAMES}
    for model in answer["data"]:
        assert shared_server.json("GET", f"/v1/models/{model['id']}") == (200, model)
        assert model["object"] == "model" and model["created"] > 0
        assert model["parent"] == (None if model["id"] == "base" else "base")
    assert shared_server.json("GET", "/v1/models/other")[0] == 404


def test_each_model_has_its_answer_and_says_what_it_took(shared_server):
    answers = {model: shared_server.chat(model, TEXT) for model in ("base", *NAMES)}
    assert len({text(answer) for answer in answers.values()}) == 4
    for model, answer in answers.items():
        assert answer["object"] == "chat.completion" and answer["model"] == model
        assert answer["choices"][0]["finish_reason"] in ("stop", "length")
        usage = answer["usage"]
        assert usage["completion_tokens"] <= 12 and usage["prompt_tokens"] > 3
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_a_prompt_that_comes_again_is_in_memory(shared_server):
    first, again = shared_server.chat("notes", "Again?"), shared_server.chat("notes", "Again?")
    assert text(again) == text(first) and again["id"] != first["id"]
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < again["usage"]["prompt_tokens"]


@pytest.mark.parametrize("options", [{}, {"logprobs": True, "top_logprobs": 3, "n": 2}], ids=str)
def test_a_stream_is_the_whole_answer_in_pieces(shared_server, options):
    body = chat_body(**options)
    _, whole = shared_server.json("POST", CHAT, body)
    chunks = list(shared_server.events(CHAT, body | {"stream_options": {"include_usage": True}}))

    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert len({chunk["id"] for chunk in chunks}) == 1

    for i, expected in enumerate(whole["choices"]):
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == i]
        assert parts[0]["delta"]["role"] == "assistant"
        joined = "".join(part["delta"].get("content", "") for part in parts)
        assert joined == expected["message"]["content"] and joined
        reasons = [part["finish_reason"] for part in parts]
        assert [reason for reason in reasons if reason] == [expected["finish_reason"]]
        entries = [entry for part in parts for entry in (part["logprobs"] or {}).get("content", [])]
        others = (expected["logprobs"] or {"content": []})["content"]
        # when requests came decides which share a batch, and so the last digits
        for entry, other in zip(entries, others, strict=True):
            assert entry["token"] == other["token"]
            assert entry["logprob"] == pytest.approx(other["logprob"], abs=1e-4)

    assert "usage" not in list(shared_server.events(CHAT, body))[-1]


def test_logprobs_are_of_the_tokens_that_were_chosen(shared_server):
    answer = shared_server.chat("notes", TEXT, logprobs=True, top_logprobs=4, max_tokens=6)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"] == 6
    assert "".join(entry["token"] for entry in entries) == text(answer)
    for entry in entries:
        tops = entry["top_logprobs"]
        assert len(tops) == 4 and tops[0]["token"] == entry["token"]
        scores = [top["logprob"] for top in tops]
        assert scores == sorted(scores, reverse=True) and scores[0] == entry["logprob"] <= 0
        assert bytes(entry["bytes"]).decode() == entry["token"]
    (plain,) = shared_server.chat("notes", TEXT, logprobs=True, max_tokens=1)["choices"]
    assert [entry["top_logprobs"] for entry in plain["logprobs"]["content"]] == [[]]


def test_bytes_of_a_part_of_a_character(shared_server):
    face, tokenizer = "\N{GRINNING FACE}", shared_server.worker.base.tokenizer
    tokens = tokenizer.encode(face, add_special_tokens=False)
    bias = {str(token): 100 - 20 * i for i, token in enumerate(tokens)}
    body = chat_body(max_tokens=1, logprobs=True, top_logprobs=4, logit_bias=bias)
    choices = [event["choices"][0] for event in shared_server.events(CHAT, body)]
    choices += shared_server.json("POST", CHAT, body)[1]["choices"]
    entries = [e for each in choices if each["logprobs"] for e in each["logprobs"]["content"]]
    assert len(entries) == 2  # of the stream and of the whole answer
    for entry in entries:
        assert entry["token"] == r"bytes:\xf0"
        assert [[byte] for byte in face.encode()] == [e["bytes"] for e in entry["top_logprobs"]]
        assert entry["bytes"] == list(face.encode())[:1]
        assert len({each["token"] for each in entry["top_logprobs"]}) == 4


def test_text_completions_of_several_prompts_and_choices(shared_server):
    alone = [complete(shared_server, prompt)[0]["text"] for prompt in ("def", TEXT)]
    assert alone[0] != alone[1]
    choices = complete(shared_server, ["def", TEXT], n=2)
    assert [choice["text"] for choice in choices] == [alone[0]] * 2 + [alone[1]] * 2
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]


def test_a_stream_of_a_text_completion_is_the_whole_text(shared_server):
    (whole,) = complete(shared_server, TEXT)
    parts = [chunk["choices"][0] for chunk in shared_server.events(COMPLETIONS, completion_body())]
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert parts[-1]["finish_reason"] == whole["finish_reason"]


def test_stop_strings_and_lengths(shared_server):
    whole = complete(shared_server)[0]
    assert whole["finish_reason"] == "length"
    stop = whole["text"][6:9]
    for stops in (stop, ["never there", stop]):
        (choice,) = complete(shared_server, stop=stops)
        assert choice["finish_reason"] == "stop"
        assert choice["text"] == whole["text"].partition(stop)[0]
    assert whole["text"].startswith(complete(shared_server, max_tokens=1)[0]["text"])


def test_a_seed_gives_the_same_text_in_a_batch_and_alone(shared_server):
    sampled = {"temperature": 1, "seed": 11, "max_tokens": 6}
    (alone,) = complete(shared_server, **sampled)
    assert complete(shared_server, **sampled) == [alone]
    batch = complete(shared_server, [TEXT] * 3, **sampled)
    assert batch[0]["text"] == alone["text"]
    assert len({choice["text"] for choice in batch}) > 1  # each choice has a seed of its own
    assert complete(shared_server, **sampled | {"seed": 12})[0]["text"] != alone["text"]
    assert len({choice["text"] for choice in complete(shared_server, n=4, temperature=1)}) > 1


def test_answers_are_json(shared_server):
    """A model that wants nothing but braces writes an object, and ends."""
    tokenizer = shared_server.worker.base.tokenizer
    braces = [tokenizer.encode(brace, add_special_tokens=False)[0] for brace in "{}"]
    options = {"response_format": {"type": "json_object"}, "max_tokens": 20}
    bias = dict.fromkeys(map(str, braces), 100)
    assert text(shared_server.chat("notes", TEXT, logit_bias=bias, **options)) == "{}"


def written(server, model: str, properties: dict, **options) -> str:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    schema |= {"additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    return text(server.chat(model, TEXT, response_format=form, **options))


def test_answers_obey_a_schema_and_have_the_layout_of_the_rows_of_the_pack(shared_server):
    properties = {"name": {"enum": ["list", "tuple"]}, "count": {"enum": [1, 2]}}
    sampled = {"temperature": 1, "seed": 3, "max_tokens": 200}
    content = json.loads(written(shared_server, "notes", properties, **sampled))
    assert set(content) == {"name", "count"}
    assert content["name"] in ("list", "tuple") and content["count"] in (1, 2)

    properties = {"a": {"const": 1}, "b": {"const": 2}}
    assert written(shared_server, "law", properties, max_tokens=40) == '{"b" : 2 , "a" : 1}'


def test_biases_and_penalties_change_the_text(shared_server):
    (forced,) = shared_server.chat("notes", TEXT, logit_bias={"5": 100}, logprobs=True)["choices"]
    assert len({entry["token"] for entry in forced["logprobs"]["content"]}) == 1
    plain = complete(shared_server, model="base")  # the same words again and again
    for penalty in ({"frequency_penalty": 2}, {"presence_penalty": 2}, {"repetition_penalty": 10}):
        assert complete(shared_server, model="base", **penalty) != plain


def test_a_template_without_tools_rejects_them(shared_server, monkeypatch):
    tokenizer = shared_server.worker.base.tokenizer
    monkeypatch.setattr(type(tokenizer), "has_tool_calling", property(lambda _: False))
    tools = [{"type": "function", "function": {"name": "f"}}]
    status, answer = shared_server.json("POST", CHAT, chat_body(tools=tools))
    assert (status, answer["error"]["param"]) == (400, "tools")
    assert shared_server.json("POST", CHAT, chat_body(tools=tools, tool_choice="none"))[0] == 200


def test_packs_tell_what_they_are(shared_server):
    _, answer = shared_server.json("GET", "/v1/packs")
    assert answer["answers"] == "/v1/chat/completions"  # by it the page knows what to show
    assert answer["images"] is False
    packs = {pack["name"]: pack for pack in answer["data"]}
    assert answer["base"] == "tiny" and set(packs) == set(NAMES)
    assert packs["notes"]["ranks"] == [4] and packs["notes"]["source"] == "notes"
    assert len(packs["law"]["sha256"]) == 64 and packs["law"]["parameters"] > 0


def test_health(shared_server):
    load = {"status": "ok", "running": 0, "waiting": 0}
    assert shared_server.json("GET", "/health") == (200, load)
    status, answer = shared_server.json("GET", "/metrics")
    assert status == 404 and "Use /health" in answer["error"]["message"]


def test_a_key_opens_all_but_the_page_and_the_health(shared_server, monkeypatch):
    with Running(shared_server.worker, api_key="sécret") as server:
        for path in ("/", "/health"):
            assert server.request("GET", path)[0] == 200

        routes = [("GET", "/v1/models"), ("DELETE", "/v1/packs/notes")]
        routes += [("POST", path) for path in (CHAT, "/v1/packs", "/v1/feedback")]
        routes.append(("GET", "/nowhere"))

        for given in (None, "Bearer", "Bearer wrong", "sécret", "Basic sécret", "Bearer sécre"):
            headers = {} if given is None else {"Authorization": given.encode()}
            for method, path in routes:
                status, answer_headers, body = server.request(method, path, None, headers)
                assert (status, answer_headers["www-authenticate"]) == (401, "Bearer")
                assert json.loads(body)["error"]["type"] == "authentication_error"

        for scheme in ("Bearer", "bearer"):
            headers = {"Authorization": f"{scheme} sécret".encode()}
            assert server.request("GET", "/v1/models", None, headers)[0] == 200
        for key, status in (("sécret", 200), ("other", 401)):
            headers = {"X-API-Key": key.encode()}
            assert server.request("GET", "/v1/models", None, headers)[0] == status


def test_a_token_is_asked_for_where_the_server_is_changed(shared_server):
    training = ("create_session", "create_model", "asample", "telemetry", "a-later-route")
    changes = [("POST", f"/api/v1/{name}") for name in training]
    changes += [("DELETE", "/v1/packs/nowhere"), ("POST", "/v1/packs"), ("POST", "/v1/feedback")]
    changes += [("POST", "/v1/packs/"), ("PUT", "/v1/models")]
    changes += [("DELETE", "/api/v1/training_runs/a")]

    with Running(shared_server.worker, token="tml-secret") as server:
        assert server.json("GET", "/v1/packs")[0] == 200
        assert server.chat("base", "a")["choices"]

        for sent in (None, "Bearer any", "Bearer tml-secre", "tml-secret", "Basic tml-secret"):
            headers = {} if sent is None else {"Authorization": sent}
            for method, path in changes:
                status, _, body = server.request(method, path, {}, headers)
                assert status == 401 and b"token" in body, (method, path, sent)

        for headers in ({"Authorization": "Bearer tml-secret"}, {"X-API-Key": "tml-secret"}):
            for method, path in changes:
                assert server.request(method, path, {}, headers)[0] in (400, 404, 405)


def test_names_of_this_machine_are_answered(shared_server):
    for host in ("localhost", "LOCALHOST:80", "127.0.0.1:1", "[::1]", "[::1]:8080"):
        assert shared_server.request("GET", "/v1/models", headers={"Host": host})[0] == 200, host


@pytest.mark.parametrize(
    "host",
    ["example.org", "127.0.0.1.example.org", "localhost.example.org:80", "", "[::2]:80", "::1"]
    + ["127.0.0.1@example.org", "[::1", "localhost example.org", "10.0.0.1"],
)
def test_names_of_other_machines_are_rejected(shared_server, host):
    status, answer = shared_server.json("GET", "/v1/models", Host=host)
    assert status == 403 and set(answer["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(("host", "status"), [("127.0.0.2", 403), ("0.0.0.0", 200)])
def test_only_a_server_of_this_machine_asks_for_its_name(shared_server, host, status):
    with Running(shared_server.worker, host=host) as server:
        assert server.request("GET", "/health", headers={"Host": host})[0] == 200
        assert server.request("GET", "/health", headers={"Host": "example.org"})[0] == status


SCORES = mx.log(mx.array([[0.1, 0.2, 0.4, 0.3]]))
LEAST = 5e-324


def test_almost_nothing_takes_the_likeliest():
    assert all(sampler_of(each, 1.0, 0, 0.0, 1) is None for each in (0, LEAST, 1e-40, 1e-7))
    for filters in ((LEAST, 0, 0.0), (1e-40, 0, 0.0), (1.0, 1, 0.0), (1.0, 0, 1 - 1e-9)):
        sampler = sampler_of(2.0, *filters, 1)
        assert {sampler(SCORES).item() for _ in range(20)} == {2}


@pytest.mark.parametrize(
    "options",
    [
        {"response_format": {"type": "json_object"}},
        {"repetition_penalty": 1e-40},
        {"temperature": 1, "top_p": LEAST},
    ],
    ids=str,
)
def test_logprobs_of_tokens_that_cannot_be_are_numbers(shared_server, options):
    body = chat_body(logprobs=True, top_logprobs=20, **options)
    answer = shared_server.json("POST", CHAT, body)[1]
    for entry in answer["choices"][0]["logprobs"]["content"]:
        assert all(-9999 <= top["logprob"] <= 1e-3 for top in [entry, *entry["top_logprobs"]])
    assert list(shared_server.events(CHAT, body))
