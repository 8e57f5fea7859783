"""The page at `/` in a browser: Chromium or Chrome of this machine, driven by Playwright."""

import base64
import io
import json
import re

import numpy as np
import pytest

from mlx_packs import Pack, load_base
from mlx_packs.learning.folder import LearningFolder
from mlx_packs.serving.embedding import EmbeddingWorker
from mlx_packs.serving.generation import TextWorker
from tests.helpers.packs import random_pack
from tests.helpers.serving import Running
from tests.serving.conftest import LIMITS, serving

pytestmark = pytest.mark.interop

HOSTILE = '<img src=x onerror="document.title=\'broken\'"><b>bold</b> & "quoted"'
LONG = {"temperature": "2", "max_tokens": "1900", "seed": "1"}  # ends long after a test


@pytest.fixture
def opened(new_page):
    """Open the page of a server."""

    def go(server, **options: object):
        page = new_page(**options)
        page.goto(server.url)
        return page

    return go


@pytest.fixture
def encoder_server(encoder, tmp_path):
    base = load_base(encoder)
    for seed, name in enumerate(("notes", "law")):
        random_pack(base, seed, 4, ("query", "value"), size=0.3).save(tmp_path / name)
    with serving(EmbeddingWorker(base, 8, 64), tmp_path) as running:
        yield running


@pytest.fixture
def image_server(tmp_path, monkeypatch):
    from tests.helpers.vision_bases import write_vision_base

    monkeypatch.setenv("MLX_PACKS_CACHE", str(tmp_path / "cache"))
    base = load_base(write_vision_base("smolvlm", tmp_path / "base"))
    with serving(TextWorker(base, LIMITS)) as running:
        yield running


def ask(page, expect, text: str, columns: int = 2) -> None:
    page.get_by_label("Message to all columns").fill(text)
    page.get_by_label("Message to all columns").press("Enter")
    expect(page.locator("#finished p")).to_have_count(columns)
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


def options(page, **values: str) -> None:
    for name, value in values.items():
        page.locator(f"#{name}").fill(value)


def wait_until_idle(server, page) -> None:
    """Wait until the server computes nothing, long before it would have ended by itself."""
    for _ in range(100):
        if server.worker.counts == (0, 0):
            return
        page.wait_for_timeout(20)
    pytest.fail(f"the server still computes: {server.worker.counts}")


def column(page, number: int):
    return page.get_by_role("group", name=f"Column {number}", exact=True)


def texts(page, selector: str) -> list[str]:
    return [locator.text_content() for locator in page.locator(selector).all()]


def test_base_and_pack_answer_side_by_side(server, opened, expect):
    page = opened(server)
    expect(page.locator(".column")).to_have_count(2)
    first = server.worker.registry.names[1]
    assert [m.input_value() for m in page.locator(".model").all()] == ["base", first]

    expect(page.get_by_label("Images")).to_be_hidden()  # of a base without a tower
    options(page, max_tokens="12", system="You answer briefly.")
    ask(page, expect, "Name a colour.")
    expect(page.locator("#learns")).to_be_hidden()
    expect(page.get_by_role("group", name="Feedback")).to_have_count(0)

    messages = [
        {"role": "system", "content": "You answer briefly."},
        {"role": "user", "content": "Name a colour."},
    ]
    answers = [server.chat(name, "", messages=messages) for name in ("base", first)]

    assert texts(page, ".answer") == [a["choices"][0]["message"]["content"] for a in answers]
    assert texts(page, ".tokens") == [str(a["usage"]["completion_tokens"]) for a in answers]
    for text in texts(page, ".speed") + texts(page, "dd.first"):
        assert re.fullmatch(r"\d+(\.\d| ms)", text)

    assert texts(page, ".who") == ["base", first]
    for name, text in zip(("base", first), texts(page, ".answer"), strict=True):
        assert [line for line in texts(page, "#finished p") if line.startswith(f"{name}: {text}")]


def test_a_conversation_goes_on_until_it_is_cleared(server, opened, expect):
    page = opened(server)
    bodies = []

    def keep(request):
        if request.post_data:
            bodies.append(request.post_data_json)

    page.on("request", keep)
    options(page, max_tokens="4")
    for text in ("one", "two"):
        ask(page, expect, text)

    answer = texts(page, ".column:first-child .answer")[0]
    base = [body for body in bodies if body["model"] == "base"]
    assert [m["content"] for m in base[1]["messages"]] == ["one", answer, "two"]
    assert base[0]["stream_options"] == {"include_usage": True}
    assert (base[0]["temperature"], base[0]["max_tokens"], "seed" in base[0]) == (0, 4, False)

    page.get_by_role("button", name="Clear").click()
    assert page.locator(".turn").count() == 0 and set(texts(page, "dd")) == {"–"}
    ask(page, expect, "three")
    assert [m["content"] for m in bodies[-1]["messages"]] == ["three"]


def test_columns_are_added_and_removed(server, opened, expect):
    page = opened(server)
    add = page.get_by_role("button", name="Add column")
    add.click()
    expect(column(page, 3).get_by_label("Model")).to_be_focused()
    add.click()
    assert add.is_disabled()

    column(page, 3).get_by_label("Model").select_option("law")
    options(page, max_tokens="8")
    ask(page, expect, "Hello.", 4)

    expected = server.chat("law", "Hello.", max_tokens=8)
    shown = column(page, 3).locator(".answer").text_content()
    assert shown == expected["choices"][0]["message"]["content"]

    page.get_by_role("button", name="Remove column 1").click()
    assert texts(page, ".who")[0] != "base" and add.is_enabled()
    for _ in range(2):
        page.get_by_role("button", name="Remove column 1").click()
    expect(page.get_by_role("button", name="Remove column")).to_have_count(0)


def test_images_are_attached_removed_and_sent(image_server, opened, expect):
    from PIL import Image

    page = opened(image_server)
    bodies = []
    page.on("request", lambda request: request.post_data and bodies.append(request.post_data_json))
    files = []
    for name, color in (("a.png", "red"), ("b.png", "blue")):
        file = io.BytesIO()
        Image.new("RGB", (56, 84), color).save(file, "PNG")
        files.append({"name": name, "mimeType": "image/png", "buffer": file.getvalue()})

    page.get_by_label("Images").set_input_files(files)
    page.get_by_role("button", name="Remove image 1").click()
    expect(page.get_by_role("button", name="Remove image")).to_have_count(1)
    options(page, max_tokens="4")
    ask(page, expect, "Which color?", 1)

    url = "data:image/png;base64," + base64.b64encode(files[1]["buffer"]).decode()
    image = {"type": "image_url", "image_url": {"url": url}}
    question = [image, {"type": "text", "text": "Which color?"}]
    assert bodies[0]["messages"] == [{"role": "user", "content": question}]
    expect(page.locator(".turn img")).to_have_count(1)
    expect(page.get_by_role("button", name="Remove image")).to_have_count(0)
    expect(page.locator(".error:visible")).to_have_count(0)

    ask(page, expect, "Sure?", 1)
    assert bodies[1]["messages"][0]["content"] == question
    assert bodies[1]["messages"][-1]["content"] == "Sure?"


def test_keyboard_alone(server, opened, expect):
    page = opened(server)
    expect(page.locator(".column")).to_have_count(2)

    order = []
    while not order or order[-1] != "seed":
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"

    each = ["model", "remove", "log"]
    fields = ["message", "send", "system", "temperature", "max_tokens", "seed"]
    assert order == ["add", "clear", *each, *each, *fields]

    options(page, **LONG)
    for _ in range(5):
        page.keyboard.press("Shift+Tab")
    page.keyboard.type("first")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("second")
    page.keyboard.press("Enter")
    assert texts(page, ".question") == ["first\nsecond"] * 2

    expect(page.locator(".column:first-child .tokens")).not_to_have_text("–")
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Stop")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator(".end")).to_have_text(["Stopped.", "Stopped."])
    expect(page.locator("#message")).to_be_focused()
    wait_until_idle(server, page)

    page.get_by_label("Message to all columns").fill("Go on.")  # and by the buttons
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".answer.open")).to_have_count(2)
    page.get_by_role("button", name="Remove column 2").click()
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    expect(page.locator("#finished p")).to_have_count(1)
    wait_until_idle(server, page)


@pytest.mark.parametrize(
    ("width", "scheme"), [(320, "dark"), (390, "light"), (1280, "light"), (1280, "dark")]
)
def test_every_width_and_scheme_is_accessible(server, opened, expect, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    viewport = {"width": width, "height": 800}
    page = opened(server, viewport=viewport, color_scheme=scheme)

    for _ in range(2):
        page.get_by_role("button", name="Add column").click()
    options(page, max_tokens="8")
    ask(page, expect, "supercalifragilistic" * 30, 4)

    assert page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")
    lefts = {round(box["x"]) for box in (c.bounding_box() for c in page.locator(".column").all())}
    assert len(lefts) == (4 if width == 1280 else 1)

    for part in page.locator(".log").all():
        assert part.evaluate("node => node.scrollWidth <= node.clientWidth")
        assert part.evaluate("node => node.scrollHeight > node.clientHeight")
        bottom = "node => node.getBoundingClientRect().bottom"
        end = part.locator(".turn").last.evaluate(bottom)
        assert 0 < part.evaluate(bottom) - end < 30  # it follows to its end

    result = axe.run(page)
    assert result.violations_count == 0, result.generate_report()


def test_texts_stay_texts(server, opened, expect):
    page = opened(server)
    chunk = {"choices": [{"index": 0, "delta": {"content": HOSTILE, "reasoning_content": HOSTILE}}]}
    events = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    page.route(
        "**/v1/chat/completions", lambda r: r.fulfill(content_type="text/event-stream", body=events)
    )

    packs = server.json("GET", "/v1/packs")[1]
    packs["data"][0]["source"] = packs["base"] = HOSTILE
    page.route("**/v1/packs", lambda r: r.fulfill(json=packs))
    page.reload()
    ask(page, expect, HOSTILE)

    page.unroute("**/v1/chat/completions")
    page.route(
        "**/v1/chat/completions",
        lambda r: r.fulfill(status=400, json={"error": {"message": HOSTILE}}),
    )
    ask(page, expect, "Hello.")

    assert texts(page, ".question")[0] == texts(page, ".answer")[0] == HOSTILE
    assert texts(page, ".reasoning .text")[0] == texts(page, ".error:visible")[0] == HOSTILE
    assert HOSTILE in texts(page, "#packs td") and HOSTILE in page.locator("header").text_content()
    assert page.locator("img, b").count() == 0 and page.title().startswith("Compare packs")


def test_key_is_asked_for_and_kept_in_this_tab_only(generator, shelf, opened, expect):
    with Running(generator, shelf, api_key="secret") as server:
        page = opened(server)
        page.locator("#key").fill("not one word")
        expect(page.locator("#key:invalid")).to_be_visible()

        for key in ("wrong", "secret"):
            expect(page.locator("#notice")).to_contain_text("The API key is missing or wrong.")
            assert page.locator("#chat").is_hidden()
            page.locator("#key").fill(key)
            with page.expect_response("**/v1/packs"):
                page.get_by_role("button", name="Connect").click()

        expect(page.locator("#chat")).to_be_visible()
        assert page.locator("#access").is_hidden() and page.locator("#notice").is_hidden()
        options(page, max_tokens="4")
        ask(page, expect, "Hello.")
        page.reload()
        expect(page.locator("#chat")).to_be_visible()

        stored = "JSON.stringify([sessionStorage, localStorage, document.cookie, location.href])"
        assert json.loads(page.evaluate(stored)) == [
            {"mlx-packs-key": "secret"},
            {},
            "",
            f"{server.url}/",
        ]


def test_the_token_of_the_address_is_sent_and_leaves_it(generator, shelf, opened, expect):
    with Running(generator, shelf, token="tml-secret") as server:
        page = opened(server)
        expect(page.locator("#chat")).to_be_visible()
        page.goto(f"{server.url}/#token=tml-secret")
        page.wait_for_function("location.hash === ''")
        assert page.evaluate("sessionStorage.getItem('mlx-packs-key')") == "tml-secret"
        sent = "call('v1/feedback', {id: 'a'}).catch((error) => error.message)"
        assert "--learn" in page.evaluate(sent)  # it was let in
        page.evaluate("sessionStorage.clear()")
        assert "token" in page.evaluate(sent) and page.locator("#access").is_visible()


def test_packs_are_listed_and_followed(server, opened, expect):
    page = opened(server)
    facts = {pack["name"]: pack for pack in server.json("GET", "/v1/packs")[1]["data"]}
    expect(page.locator("#packs tbody tr")).to_have_count(3)

    chosen = page.locator(".model").nth(1).input_value()
    row = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name=chosen))
    cells = [chosen, f"{facts[chosen]['parameters']:,}", str(facts[chosen]["ranks"][0])]
    assert set(cells) <= set(texts(page, f"#packs tr:has(th:text-is('{chosen}')) > *"))

    assert server.json("DELETE", f"/v1/packs/{chosen}")[0] == 200
    expect(row).to_have_count(0)
    select = page.locator(".model").nth(1)
    assert select.input_value() == chosen
    assert f"{chosen} (not served)" in select.locator("option").all_text_contents()

    ask(page, expect, "Hello.")
    assert column(page, 2).locator(".error").text_content().startswith(f"model '{chosen}': is not")


def test_a_server_that_is_gone_is_named(server, opened, expect):
    page = opened(server)
    expect(page.locator(".column")).to_have_count(2)
    page.context.set_offline(True)
    ask(page, expect, "Hello.")
    assert texts(page, ".end") == ["The server does not answer."] * 2
    expect(page.locator("#notice")).to_have_text("The server does not answer.")
    page.context.set_offline(False)
    expect(page.locator("#notice")).to_be_hidden()


def test_an_encoder_compares_two_texts(encoder_server, opened, expect):
    page = opened(encoder_server, viewport={"width": 390, "height": 800})
    expect(page.locator("#embed")).to_contain_text("computes embeddings")
    assert page.locator("#chat").is_hidden() and page.locator(".column").count() == 0

    pair = ["how do i fix a car", "steps to repair the vehicle"]
    page.get_by_label("First text").fill(pair[0])
    page.get_by_label("Second text").fill(pair[1])
    page.get_by_label("Second text").press("Enter")

    rows = page.locator("#similarities tbody tr")
    expect(rows).to_have_count(3)
    for line in rows.all():
        model, similarity = (cell.text_content() for cell in line.locator("> *").all())
        body = {"model": model, "input": pair}
        data = encoder_server.json("POST", "/v1/embeddings", body)[1]["data"]
        a, b = (np.array(item["embedding"]) for item in data)
        expected = a @ b / np.sqrt((a @ a) * (b @ b))
        assert float(similarity) == pytest.approx(expected, abs=1e-4)

    assert page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")


def test_answers_of_the_pack_that_learns_are_rated_and_corrected(
    generator, shelf, small_tiny, tmp_path, opened, expect
):
    folder = LearningFolder.begin(tmp_path / "d", "notes", small_tiny, Pack.open(shelf / "notes"))

    def rows(name: str) -> list[dict]:
        file = folder.path / f"{name}.jsonl"
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]

    with Running(generator, shelf, learning=folder) as server:
        page = opened(server)
        expect(page.locator("#learns")).to_contain_text("Answers of notes can be rated")
        page.locator(".model").nth(1).select_option("notes")
        options(page, max_tokens="12")
        ask(page, expect, "Name a number.")
        expect(page.get_by_role("group", name="Feedback")).to_have_count(1)  # not of the base
        expect(page.get_by_role("button", name="Good")).to_be_disabled()  # it was cut off

        page.get_by_role("button", name="Bad").click()
        expect(page.get_by_role("button", name="Bad")).to_have_attribute("aria-pressed", "true")
        expect(page.locator(".kept").nth(1)).to_have_text("Kept.")
        assert [row["label"] for row in rows("kto")] == [False]

        page.get_by_role("button", name="Write a better answer").click()
        correction = page.get_by_role("textbox", name="The answer should have been")
        assert correction.input_value() == texts(page, ".answer")[1]
        page.get_by_role("button", name="Keep correction").click()
        expect(page.locator(".kept").nth(1)).to_contain_text("is the answer itself")
        correction.fill("Green.")
        page.get_by_role("button", name="Keep correction").click()
        expect(page.locator(".kept").nth(1)).to_have_text("Kept.")
        expect(correction).to_be_hidden()
        assert [row["chosen"][0]["content"] for row in rows("dpo")] == ["Green."]
        assert [row["label"] for row in rows("kto")] == [False]  # the rating stays
