"""Images of chat completions: answers equal those of the base alone, and what is rejected."""

import base64
import gc
import io
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import numpy as np
import pytest

from mlx_packs.config.sampling import Sampling
from mlx_packs.inference.chat import question
from mlx_packs.inference.generate import chat_prompt, complete, responses
from mlx_packs.packs.base import load_base
from mlx_packs.serving.generation import TextWorker
from mlx_packs.serving.prompts import MOST_IMAGES
from mlx_packs.serving.request import Limits
from tests.helpers.serving import Running, until
from tests.helpers.vision_bases import write_vision_base
from tests.serving.conftest import serving
from tests.serving.test_bad_requests import rejected

pytestmark = pytest.mark.interop

CHAT = "/v1/chat/completions"
LIMITS = Limits(batch_size=8, waiting=64, kv_bytes=256 << 20, prefill_chunk=16, context=4096)
TOKENS = 12


@pytest.fixture(scope="module", params=["qwen3_vl", "smolvlm"])
def folder(request, tmp_path_factory):
    """A base whose positions of images have three axes, and one whose have not."""
    return write_vision_base(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def base(folder):
    return load_base(folder)


@pytest.fixture(scope="module")
def server(folder):
    with serving(TextWorker(load_base(folder), LIMITS)) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLX_PACKS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def png(number: int, size: tuple[int, int] = (56, 84)) -> str:
    from PIL import Image

    pixels = np.random.default_rng(number).integers(0, 255, (*size, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def asks(text: str, *urls: str) -> dict:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def answered(server, messages: list[dict], **options) -> tuple[list, dict]:
    body = {"model": "base", "messages": messages, "temperature": 0, "max_tokens": TOKENS}
    status, answer = server.json("POST", CHAT, body | {"logprobs": True} | options)
    assert status == 200, answer
    (choice,) = answer["choices"]
    return [each["logprob"] for each in choice["logprobs"]["content"]], answer["usage"]


def alone(base, *messages: dict, **sampling):
    """What `answered` returns, of the base; a small model says the same of most images."""
    settings = Sampling(max_tokens=TOKENS, temperature=0.0, **sampling)
    steps = responses(base, chat_prompt(base, messages), settings)
    last = {each.generation_tokens: each.logprobs[each.token].item() for each in steps}
    return pytest.approx(list(last.values()), abs=1e-5)


def test_an_answer_is_that_of_the_base(server, base):
    answers = []
    for number in range(3):
        answer, usage = answered(server, [asks("What is it?", png(number))])
        messages = [question("What is it?", [png(number)])]
        assert answer == alone(base, *messages)
        assert usage["prompt_tokens"] == len(chat_prompt(base, messages))
        assert all(answer != pytest.approx(other, abs=1e-4) for other in answers)
        answers.append(answer)


def test_a_batch_of_images_and_texts_equals_each_alone(server, base):
    requests = [
        [asks("What is it?", png(0))],
        [asks("Which of these two?", png(1, (28, 56)), png(2, (84, 84)))],
        [{"role": "user", "content": "Only a text, which is longer than some parts of a prompt."}],
        [asks("And this?", png(3, (112, 56)))],
        [{"role": "user", "content": "Hi"}],
    ]
    with ThreadPoolExecutor(len(requests)) as threads:
        for _ in range(2):  # the second time from the cache of prompts
            answers = list(threads.map(lambda messages: answered(server, messages)[0], requests))
            for answer, messages in zip(answers, requests, strict=True):
                assert answer == alone(base, *map(as_question, messages))


def as_question(message: dict) -> dict:
    """A message of a request as Python has it; its images come before its text."""
    if isinstance(message["content"], str):
        return message
    *images, text = message["content"]
    return question(text["text"], [image["image_url"]["url"] for image in images])


def test_a_conversation_goes_on(server, base):
    first = asks("What is it?", png(0))
    answered(server, [first])
    answer = complete(base, chat_prompt(base, [as_question(first)]), TOKENS, temperature=0.0)
    turns = [first, {"role": "assistant", "content": answer}]
    answered(server, [{"role": "user", "content": "A text between"}])

    for follow_up in ({"role": "user", "content": "Sure?"}, asks("And this?", png(1))):
        second, usage = answered(server, [*turns, follow_up])
        assert second == alone(base, *map(as_question, [*turns, follow_up]))
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert (cached > 0) != base.tokenizer._images.is_read_at_once


def test_penalties_do_not_see_images(server, base):
    asked = [asks("What is it?", png(0))]
    answer, _ = answered(server, asked, repetition_penalty=1.5)
    messages = [question("What is it?", [png(0)])]
    assert answer == alone(base, *messages, repetition_penalty=1.5)
    answered(server, asked, presence_penalty=1.5, frequency_penalty=1.5)


def test_answers_in_json_follow_images(server):
    body = {"model": "base", "messages": [asks("What is it?", png(0))], "max_tokens": 60}
    status, answer = server.json("POST", CHAT, body | {"response_format": {"type": "json_object"}})
    assert status == 200
    assert answer["choices"][0]["message"]["content"].startswith("{")


@pytest.mark.parametrize(
    "url",
    [
        "/etc/passwd",
        "file:///etc/passwd",
        "http://127.0.0.1:9/a.png",
        "ftp://example.com/a.png",
        "",
        "data:image/png;base64,$$$",
        "data:image/png;base64,AAAA",
        "data:image/png,AAAA",
        png(0)[:200],
        "data:image/svg+xml;base64," + base64.b64encode(b"<svg/>").decode(),
    ],
    ids=lambda url: url[:30],
)
def test_what_is_no_image_is_one_line(server, url):
    body = {"model": "base", "messages": [asks("a", png(1)), asks("What?", png(0), url)]}
    error = rejected(server, CHAT, body)
    assert error["param"] == "messages.1.content.1"
    assert error["message"].startswith("messages.1.content.1: ")
    assert "\n" not in error["message"] and len(error["message"]) < 300


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {}}],
        [{"type": "image_url", "image_url": {"url": png(0), "detail": "low"}}],
        [{"type": "image_url", "image_url": png(0)}],
        [{"type": "input_image", "image_url": png(0)}],
        [{"type": "text", "text": "a", "image_url": {"url": png(0)}}],
        [{"type": "image_url", "image_url": {"url": png(0)}}, {"type": "text", "text": "\ufffc"}],
        [{"type": "image_url", "image_url": {"url": png(0)}}] * (MOST_IMAGES + 1),
    ],
)
def test_wrong_parts(server, content):
    body = {"model": "base", "messages": [{"role": "user", "content": content}]}
    assert rejected(server, CHAT, body)["param"].startswith("messages")


def test_a_shape_that_the_processor_rejects_is_one_line(server, base):
    body = {"model": "base", "messages": [asks("What?", png(0, (1, 3000)))], "max_tokens": 2}
    if base.tokenizer._images.is_read_at_once:
        error = rejected(server, CHAT, body)
        assert error["param"] == "messages.0.content.0" and "3,000 x 1" in error["message"]
    else:
        assert server.json("POST", CHAT, body)[0] == 200


def test_placeholders_in_texts_are_counted(server, base):
    placeholder = base.tokenizer._images.family.placeholder
    body = {"model": "base", "messages": [asks(f"What is {placeholder}?", png(0))]}
    assert placeholder in rejected(server, CHAT, body)["message"]
    answered(server, [{"role": "user", "content": placeholder}])  # is a token as others are


def test_details_of_a_part_and_parts_of_an_answer(server):
    detailed = asks("What?", png(0))
    for detail in ("auto", "high"):
        detailed["content"][0]["image_url"]["detail"] = detail
        answered(server, [detailed])
    messages = [detailed, {**detailed, "role": "assistant"}, asks("And?")]
    assert rejected(server, CHAT, {"model": "base", "messages": messages})


def test_tokens_below_zero_are_rejected(server):
    answered(server, [asks("What is it?", png(0))])
    for token in (-1, -1 - (1 << 24)):
        body = {"model": "base", "prompt": [token, 5], "max_tokens": 2}
        rejected(server, "/v1/completions", body)


def test_a_base_without_images_names_the_families(shared_server):
    error = rejected(shared_server, CHAT, {"model": "notes", "messages": [asks("a", png(0))]})
    assert error["code"] == "unsupported" and "qwen3_vl" in error["message"]


def test_urls_are_fetched_if_allowed(server, tmp_path):
    (tmp_path / "a.png").write_bytes(base64.b64decode(png(0).partition(",")[2]))
    files = ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    )
    Thread(target=files.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{files.server_port}"
    try:
        with Running(server.worker, allow_urls=True) as open_server:
            answer, _ = answered(open_server, [asks("What is it?", f"{address}/a.png")])
            expected, _ = answered(server, [asks("What is it?", png(0))])
            assert answer == pytest.approx(expected, abs=1e-5)
            for url in (f"{address}/b.png", str(tmp_path / "a.png"), f"file://{tmp_path}/a.png"):
                rejected(open_server, CHAT, {"model": "base", "messages": [asks("a", url)]})
    finally:
        files.shutdown()
        files.server_close()


def test_large_images_are_made_smaller(server, base):
    large = png(0, (280, 280))
    with Running(server.worker, max_pixels=28 * 56) as narrow:
        _, usage = answered(narrow, [asks("What?", large)])
    with Running(server.worker, max_pixels=0) as wide:
        _, most = answered(wide, [asks("What?", large)])
    assert usage["prompt_tokens"] <= most["prompt_tokens"]
    if base.tokenizer._images.is_read_at_once:  # images have as many tokens as they have pixels
        assert usage["prompt_tokens"] < most["prompt_tokens"]


def test_images_leave_memory_and_nothing_is_on_disk(server, tmp_path, monkeypatch):
    from mlx_packs.vision.images import _TABLE

    monkeypatch.setenv("MLX_PACKS_CACHE", str(tmp_path / "cache"))
    images = server.worker.base.tokenizer._images
    with Running(server.worker) as running:
        images.keep_in_memory(most_bytes=1)
        expected = answered(running, [asks("What?", png(0))])[0]
        gc.collect()
        gc.disable()  # which may come late where there are few objects, however large
        try:
            for number in range(5, 9):
                answered(running, [asks("What?", png(number))])
            until(lambda: len([i for i in _TABLE.all() if i.owner is images]) == 1)
        finally:
            gc.enable()
        again, _ = answered(running, [asks("What?", png(0))])
        assert again == pytest.approx(expected, abs=1e-5)
    assert not list(tmp_path.glob("cache/**/*.safetensors"))


def test_an_image_that_waits_does_not_leave(server, base):
    """Requests keep their images until they have ended, whatever else is read meanwhile."""
    images = server.worker.base.tokenizer._images
    images.keep_in_memory(most_bytes=1)
    requests = [[asks("What?", png(number), png(number + 1))] for number in range(12)]
    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(lambda messages: answered(server, messages)[0], requests))
    images.keep_in_memory()
    for answer, messages in zip(answers, requests, strict=True):
        assert answer == alone(base, *map(as_question, messages))


def test_a_server_without_mlx_vlm_says_so(server, monkeypatch):
    server.worker.base.tokenizer._images.keep_in_memory()  # without a tower
    monkeypatch.setitem(sys.modules, "mlx_vlm.utils", None)
    error = rejected(server, CHAT, {"model": "base", "messages": [asks("What?", png(99))]})
    assert error["code"] == "dependency" and "[vision]'" in error["message"]
