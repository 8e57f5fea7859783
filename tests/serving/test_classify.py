"""Labels over HTTP: those of `Base.classify`, beside texts of other packs."""

import pytest

from mlx_packs import LoRAConfig, train_pack
from mlx_packs.serving.generation import TextWorker
from tests.helpers.bases import first_blocks
from tests.helpers.packs import random_pack
from tests.helpers.rows import labelled, labelled_chat, splits_of
from tests.helpers.variants import slow_except
from tests.serving.conftest import LIMITS, serving

TEXTS = ["the red car number 3 is here", "blue", "a green car " * 9]
PATH = "/v1/classify"
SETTINGS = {"task": "classify", "iters": 1, "val_batches": 0, "learning_rate": 1e-2}
SETTINGS |= {"max_seq_length": 64, "matmul_path": "dense"}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Classifiers of texts and of chats, and a pack that writes texts, on two blocks."""
    folder = tmp_path_factory.mktemp("classifiers")
    base = first_blocks(2)
    lora = LoRAConfig(rank=2)
    for name, make in (("texts", labelled), ("chats", labelled_chat)):
        train_pack(base, splits_of(make), lora, SETTINGS, folder / name, progress=False)
    random_pack(base, 0, 4, (), size=0.2).save(folder / "notes")
    return folder


@pytest.fixture(scope="module")
def server(shelf):
    with serving(TextWorker(first_blocks(2), LIMITS), shelf) as running:
        yield running


@pytest.mark.parametrize("model", slow_except(["texts", "chats"], "chats"))
def test_labels_are_those_of_the_base_with_the_pack(server, shelf, model):
    expected = first_blocks(2).classify(TEXTS, shelf / model)
    text = {"model": "notes", "prompt": "a", "temperature": 0, "max_tokens": 8}
    before = server.json("POST", "/v1/completions", text)
    status, answer = server.json("POST", PATH, {"model": model, "input": TEXTS})
    after = server.json("POST", "/v1/completions", text)

    assert status == 200 and [entry["index"] for entry in answer["data"]] == [0, 1, 2]
    for entry, prediction in zip(answer["data"], expected, strict=True):
        assert entry["label"] == prediction.label
        for label, probability in entry["probabilities"].items():
            assert probability == pytest.approx(prediction.probabilities[label], abs=2e-4)
    assert before[0] == after[0] == 200
    assert before[1]["choices"][0]["text"] == after[1]["choices"][0]["text"]

    chat = [{"role": "user", "content": TEXTS[0]}]
    status, answer = server.json("POST", PATH, {"model": model, "input": chat, "top": 1})
    assert status == (200 if model == "chats" else 400)  # the other one was trained on texts
    if model == "chats":
        assert len(answer["data"][0]["probabilities"]) == 1


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"model": "other"}, 404),
        ({"model": "base"}, 400),
        ({"model": "notes"}, 400),
        ({"input": []}, 400),
        ({"top": 0}, 400),
    ],
    ids=str,
)
def test_a_bad_request_is_an_error(server, fields, status):
    body = {"model": "texts", "input": "a", **fields}
    actual, answer = server.json("POST", PATH, body)
    assert actual == status and answer["error"]["message"]


def test_a_classifier_with_a_head_of_its_own_writes_no_text(server):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    status, answer = server.json("POST", "/v1/chat/completions", {"model": "texts", **body})
    assert status == 400 and "classifier" in answer["error"]["message"]
    assert server.json("POST", "/v1/chat/completions", {"model": "notes", **body})[0] == 200
