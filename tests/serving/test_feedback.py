"""`/v1/feedback`: which rows rated answers become, what is rejected, and versions that are swapped."""

import errno
import json
import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlx_packs.config.data import DataConfig
from mlx_packs.data.encoding import EncodingOptions
from mlx_packs.data.preferences import RATED, encode_preferences
from mlx_packs.data.row_format import Row
from mlx_packs.learning.folder import LearningFolder
from mlx_packs.packs.pack import Pack
from mlx_packs.reading import parse_json
from mlx_packs.serving import app, feedback
from tests.helpers.packs import random_pack
from tests.helpers.serving import Running, until

QUESTION = "Where is the door?"
PROMPT = [{"role": "user", "content": QUESTION}]
BODY = {"model": "notes", "messages": PROMPT, "temperature": 0}


@pytest.fixture(scope="module")
def whole(small_tiny, shelf, tmp_path_factory):
    """A folder for the pack notes, which the server of this module writes."""
    path = tmp_path_factory.mktemp("learned") / "d"
    return LearningFolder.begin(path, "notes", small_tiny, Pack.open(shelf / "notes"))


@pytest.fixture(scope="module")
def server(shared_server, whole):
    with Running(shared_server.worker, learning=whole) as running:
        yield running


@pytest.fixture
def folder(whole):
    """The folder of the server, without rows of other tests."""
    for file in whole.path.glob("*.jsonl"):
        file.unlink()
    return whole


def content(answer: dict) -> str:
    return answer["choices"][0]["message"]["content"]


def ended(server, model: str = "notes", **options) -> dict:
    text = content(server.chat(model, QUESTION))
    return server.chat(model, QUESTION, stop=text[len(text) // 2 :], **options)


def rate(server, answer: dict, **said) -> tuple[int, dict]:
    return server.json("POST", "/v1/feedback", {"id": answer["id"], **said})


def rejected(server, answer: dict, **said) -> tuple[int, str]:
    status, body = rate(server, answer, **said)
    return status, body["error"]["message"]


def rows_in(folder: LearningFolder) -> dict[str, list[dict]]:
    files = sorted(folder.path.glob("*.jsonl"))
    return {f.name: [parse_json(line) for line in f.read_text().splitlines()] for f in files}


def test_ratings_and_corrections_become_rows(server, folder):
    answer = ended(server)
    said = [{"role": "assistant", "content": content(answer)}]
    status, result = rate(server, answer, rating="up")
    assert (status, result["kept"], result["replaces"]) == (200, ["chat.jsonl", "kto.jsonl"], False)

    rows = rows_in(folder)
    (rated,) = rows["kto.jsonl"]
    about = {"model": "notes", "version": 0, "pack": folder.pack}
    assert {name: rated[name] for name in about} == about
    assert (rated["prompt"], rated["completion"], rated["label"]) == (PROMPT, said, True)
    assert rows["chat.jsonl"][0]["completion"] == said
    assert rated["id"] == rows["chat.jsonl"][0]["id"] != answer["id"]
    assert stat.S_IMODE(os.stat(folder.path / "kto.jsonl").st_mode) == 0o600

    other = ended(server)  # a second feedback replaces the first, whatever was written meanwhile
    assert rate(server, other, rating="down")[0] == 200
    assert rate(server, answer, correction="Under the mat.")[1]["replaces"]
    rows = rows_in(folder)
    good = [{"role": "assistant", "content": "Under the mat."}]
    assert [row["label"] for row in rows["kto.jsonl"]] == [False]
    assert [(row["chosen"], row["rejected"]) for row in rows["dpo.jsonl"]] == [(good, said)]
    assert [row["completion"] for row in rows["chat.jsonl"]] == [good]


def test_streams_and_each_choice_can_be_rated(server, folder):
    text = content(server.chat("notes", QUESTION))
    body = {**BODY, "max_tokens": 12, "n": 2}
    events = list(server.events("/v1/chat/completions", {**body, "stop": text[len(text) // 2 :]}))
    for index in range(2):
        assert rate(server, events[0], index=index, rating="down")[0] == 200
    assert rejected(server, events[0], index=2, rating="down")[0] == 404
    assert len(rows_in(folder)["kto.jsonl"]) == 2


def test_an_answer_keeps_tools_and_variables_of_its_request(server, folder):
    tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
    options = {"tools": [tool], "chat_template_kwargs": {"enable_thinking": False}}
    answer = server.chat("notes", QUESTION, **options)
    assert rate(server, answer, rating="down")[0] == 200
    (row,) = rows_in(folder)["kto.jsonl"]
    assert row["tools"][0]["function"]["name"] == "find"
    assert row["chat_template_kwargs"] == {"enable_thinking": False}

    tokenizer = server.worker.base.tokenizer  # in training they are part of the prompt
    rows = [Row("kto.jsonl:1", row)]
    examples = encode_preferences(rows, tokenizer, DataConfig(), EncodingOptions(), RATED)
    example = examples.items[0]
    used = answer["usage"]["prompt_tokens"]
    assert "find" in tokenizer.decode(example.tokens[:used].tolist())
    assert not example.target[:used].any() and example.target[used:].all()


def test_what_cannot_be_kept_is_rejected_and_nothing_is_written(server, folder, monkeypatch):
    answer = ended(server)
    assert rejected(server, {"id": "chatcmpl-0"}, rating="up")[0] == 404
    cut, other = server.chat("notes", QUESTION), ended(server, "base")
    for of, said, code, named in (
        (answer, {"rating": "good"}, 400, "must be 'up' or 'down'"),
        (answer, {}, 400, "is required"),
        (answer, {"rating": "up", "correction": "Yes."}, 400, "Send one of them"),
        (answer, {"correction": " \n"}, 400, "is empty"),
        (answer, {"correction": "a" * 100_001}, 400, "100000"),
        (answer, {"correction": content(answer) + " "}, 400, "the answer itself"),
        (cut, {"rating": "up"}, 409, "cut off at max_tokens"),
        (other, {"rating": "up"}, 404, "other models"),
    ):
        status, message = rejected(server, of, **said)
        assert status == code and named in message, said

    for value in ("NaN", "[" * 120 + "]" * 120):  # `packs learn` could not read the row
        body = json.dumps({**BODY, "max_tokens": 2})
        body = f'{body[:-1]}, "chat_template_kwargs": {{"unused": {value}}}}}'.encode()
        _, _, text = server.request("POST", "/v1/chat/completions", body)
        status, message = rejected(server, parse_json(text.decode()), rating="down")
        assert status == 409 and "cannot be read again" in message
    assert rows_in(folder) == {}

    monkeypatch.setattr(feedback, "_ANSWERS", 2)
    ended(server)
    assert rejected(server, answer, rating="up")[0] == 404


def test_remembered_answers_are_bounded_in_bytes(server, folder, monkeypatch):
    monkeypatch.setattr(feedback, "_BYTES", 700)
    long = [server.chat("notes", "字" * 100, max_tokens=2) for _ in range(3)]
    sizes = [each.size for each in server.learning._choices.values()]
    assert 350 < sum(sizes) == server.learning._bytes <= 700 and len(sizes) == 1

    assert rejected(server, long[1], rating="down")[0] == 404
    assert rate(server, long[2], rating="down")[0] == 200
    (row,) = rows_in(folder)["kto.jsonl"]
    assert row["prompt"] == [{"role": "user", "content": "字" * 100}]


def test_a_full_disk_leaves_the_rows_as_they_were(server, folder, monkeypatch):
    first = ended(server)
    assert rate(server, first, rating="up")[0] == 200
    before = {file.name: file.read_bytes() for file in folder.path.glob("*.jsonl")}
    write = Path.write_bytes
    calls = []

    def full(file: Path, content: bytes) -> int:
        calls.append(file)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, content)

    answer = ended(server)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        status, message = rejected(server, answer, rating="up")
    assert status == 507 and "No space left" in message and str(folder.path) not in message
    assert {file.name: file.read_bytes() for file in folder.path.glob("*.jsonl")} == before
    assert rate(server, answer, rating="up")[0] == 200


def test_only_packs_learn_changes_what_the_name_serves(generator, shelf, folder, tmp_path):
    own = shutil.copytree(shelf, tmp_path / "shelf")
    with Running(generator, own, learning=folder) as server:
        assert server.json("DELETE", "/v1/packs/notes")[0] == 409
        status, body = server.json("POST", "/v1/packs", {"source": "law", "name": "notes"})
        assert status == 409 and "packs learn --use" in body["error"]["message"]

        shutil.rmtree(own / "notes")  # the watched folder changes it neither
        server.library.scan()
        shutil.copytree(own / "law", own / "notes")
        server.library.scan()
        assert rate(server, ended(server), rating="down")[0] == 200


def test_a_server_without_learn_keeps_nothing(shared_server):
    answer = shared_server.chat("notes", QUESTION)
    status, message = rejected(shared_server, answer, rating="up")
    assert status == 400 and "--learn" in message
    assert shared_server.json("GET", "/v1/packs")[1]["learns"] is None


@pytest.fixture
def base_folder(small_tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(app, "_WATCH_SECONDS", 0.02)
    return LearningFolder.begin(tmp_path / "base", "learned", small_tiny, None)


def test_versions_are_swapped_and_put_back_while_requests_run(generator, small_tiny, base_folder):
    random_pack(small_tiny, 7, 4, size=0.3).save(base_folder.candidate / "pack")
    (base_folder.candidate / "figures.json").write_text("{}")
    number = base_folder.add_version()  # as `packs learn` does with a candidate that won
    slots = generator.registry.slots

    with Running(generator, learning=base_folder) as server, ThreadPoolExecutor(1) as pool:

        def ask(model: str = "learned") -> dict:
            return server.chat(model, QUESTION, max_tokens=20)

        before = ask()
        assert content(before) == content(ask("base"))
        answer = pool.submit(ask)
        until(lambda: generator.counts[0] == 1)
        base_folder.serve(number)
        until(lambda: server.learning.version == number)
        assert content(answer.result()) == content(before)  # with the version it began with

        after = ask()
        assert content(after) != content(before)
        assert rate(server, after, rating="down")[0] == 200
        assert rows_in(base_folder)["kto.jsonl"][0]["version"] == number
        assert slots.nbytes > 0

        base_folder.serve(0)
        until(lambda: server.learning.version == 0)
        assert content(ask()) == content(before)
        assert slots.nbytes == 0


def test_a_version_that_cannot_be_opened_leaves_the_served_one(generator, base_folder, caplog):
    with Running(generator, learning=base_folder) as server:
        (base_folder.path / "current").write_text("7\n")
        until(lambda: "has no version 7" in caplog.text)
        assert server.learning.version == 0
        server.chat("learned", QUESTION)
    assert caplog.text.count("has no version 7") == 1
