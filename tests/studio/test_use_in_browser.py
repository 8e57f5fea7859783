"""Use, Ratings and Export in a browser, with real commands on the bundled model."""

import json

import pytest

from mlx_packs.learning.folder import LearningFolder
from tests.helpers.packs import random_pack
from tests.helpers.variants import nightly_except

pytestmark = pytest.mark.interop

PROMPT = "Remind me to call the bank"


@pytest.fixture
def packed(home, shared_tiny):
    random_pack(shared_tiny, 3, 4, ("q_proj", "down_proj"), size=0.3).save(home / "packs/tickets")
    return home


def start_answering(page, expect) -> None:
    page.get_by_role("link", name="Use").click()
    page.get_by_label("Pack tickets").check()
    page.get_by_label("Let me rate").check()
    page.get_by_role("button", name="Start answering").click()
    expect(page.get_by_role("heading", name="Compare packs")).to_be_visible()
    expect(page.locator(".column")).to_have_count(2)


def test_base_and_pack_answer_as_packs_generate_does(packed, opened, expect, run, monkeypatch):
    page = opened()
    start_answering(page, expect)
    page.get_by_label("Message to all columns").fill(PROMPT)
    page.get_by_label("Max tokens").fill("24")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("dd.speed").nth(1)).not_to_have_text("–")
    expect(page.locator("#stop")).to_be_disabled()

    monkeypatch.chdir(packed)
    command = ["generate", "--prompt", PROMPT, "--temperature", "0", "--max-tokens", "24", "--json"]
    for column, options in enumerate([(), ("--pack", "packs/tickets")]):
        code, out, err = run(*command, *options)
        assert code == 0, err
        assert page.locator(".answer").nth(column).text_content() == json.loads(out)["text"]

    page.get_by_role("button", name="Bad").click()
    expect(page.locator(".kept").nth(1)).to_have_text("Kept.")
    page.get_by_role("link", name="Ratings").click()
    expect(page.get_by_text("1 rated, 0 corrected")).to_be_visible()
    expect(page.get_by_role("button", name="Train on ratings")).to_be_disabled()
    page.get_by_role("link", name="Use").click()
    page.get_by_role("button", name="Stop answering").click()
    expect(page.get_by_role("button", name="Start answering")).to_be_visible()


@pytest.mark.nightly(seconds=20)
def test_the_chat_model_is_stopped_where_a_run_is_planned(packed, opened, expect):
    page = opened()
    start_answering(page, expect)
    form = "/new?model=tiny&data=tiny&rank=4"
    page.goto(page.url.replace("/use", form))
    expect(page.get_by_text("Stop the chat model first: it holds")).to_contain_text("MB")
    page.get_by_role("button", name="Stop the chat model").click()
    expect(page.get_by_role("button", name="Start training")).to_be_enabled()
    assert form in page.url and page.get_by_text("chat model").count() == 0
    page.get_by_role("link", name="Use").click()
    expect(page.get_by_role("button", name="Start answering")).to_be_visible()


def test_a_pack_is_exported_and_the_check_is_shown(packed, opened, expect):
    page = opened()
    page.get_by_role("link", name="Export").click()
    page.get_by_label("Program").select_option(label="PEFT")
    page.get_by_label("New folder").fill("for-peft")
    page.get_by_role("button", name="Export").click()
    expect(page.get_by_text("Checked: ")).to_contain_text("largest difference")
    expect(page.locator("#command")).to_have_text(
        "packs export packs/tickets --to=peft --out=for-peft"
    )
    assert (packed / "for-peft" / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("width", "scheme"),
    nightly_except([(360, "dark"), (1280, "light")], (360, "dark"), often_is=()),
)
def test_every_screen_is_accessible(home, shared_tiny, opened, expect, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = opened(viewport={"width": width, "height": 800}, color_scheme=scheme)
    url = page.url

    def check(path: str = "") -> None:
        if path:
            page.goto(url + path)
        page.wait_for_load_state("networkidle")
        assert page.evaluate("document.scrollingElement.scrollWidth <= innerWidth"), page.url
        result = axe.run(page)
        assert result.violations_count == 0, result.generate_report()

    for path in ("use", "ratings", "export"):  # of an empty home
        check(path)

    pack = random_pack(shared_tiny, 3, 4, ("q_proj",), size=0.3).save(home / "packs/tickets")
    LearningFolder.begin(home / "learned" / "tickets", "tickets", shared_tiny, pack)
    (home / "learned" / ("averylongname" * 5)).mkdir()
    check("ratings")
    for outcome in ("Checked: ", "already exists"):
        page.goto(url + "export")
        page.get_by_label("Program").select_option(label="PEFT")
        page.get_by_role("button", name="Export").click()
        expect(page.get_by_text(outcome)).to_be_visible()
        check()

    page.goto(url)
    start_answering(page, expect)
    check()
    page.get_by_role("button", name="Stop answering").click()
    check()
