"""Runs, Run and New run in a browser: Chromium or Chrome of this machine, driven by Playwright."""

import json
import re
import time

import pytest

from mlx_packs.files import exclusive_writer
from mlx_packs.training.run_page import write_report
from tests.helpers.run_folders import losses, make_run
from tests.helpers.serving import until
from tests.helpers.variants import nightly_except
from tests.studio.conftest import Signed

pytestmark = pytest.mark.interop

HOSTILE = "<img src=x onerror=\"document.title='broken'\"><b>bold</b>"
RESULT = {"ppl_before": 9.5, "ppl_after": 2.25}
ERROR = {"reason": "diverged", "exit_code": 2, "flag": "learning_rate", "error": HOSTILE}


def add(folder, *lines: dict, **status: object) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    (folder / "status.json").write_text(json.dumps({"updated": time.time(), **status}))


def sample(batch: int, answer: str) -> dict:
    return {"batch": batch, "prompt": HOSTILE, "expected": HOSTILE, "answer": answer}


def test_signing_in_leaves_no_token_in_the_page(opened, expect):
    page = opened()
    expect(page.get_by_role("heading", name="No runs yet")).to_be_visible()
    assert page.evaluate("[document.cookie, location.search]") == ["", ""]
    page.reload()
    assert page.get_by_role("navigation").get_by_role("link").all_text_contents() == [
        "Runs",
        "New run",
        "Use",
        "Export",
    ]


def test_a_run_is_followed_to_its_result(home, opened, expect):
    running = {"phase": "Training", "batches": 40, "seconds_left": 300.0}
    page = opened()
    folder = make_run(home, metrics=losses(10, 20), samples=[sample(0, "one")])
    with exclusive_writer(folder):
        add(folder, batch=20, **running)
        page.get_by_role("link", name="tickets").click()  # it appears by itself
        expect(page.locator("#progress")).to_have_text("Batch 20 of 40, 5 minutes left")
        expect(page.locator("#status")).to_have_text("Run tickets: training, 50 %")

        chart = page.get_by_role("group", name="Loss")
        reading = page.locator(".plot").first.locator(".u-value")
        chart.focus()
        page.keyboard.press("ArrowLeft")
        expect(reading).to_have_text(["20", "1.05", "–"])

        add(folder, *losses(30), {"batch": 30, "valid_loss": 1.5}, batch=30, **running)
        with (folder / "samples.jsonl").open("a") as file:
            file.write(json.dumps(sample(30, HOSTILE)) + "\n")
        expect(page.locator("#progress")).to_contain_text("Batch 30 of 40")
        expect(page.locator(".now")).to_have_text(HOSTILE)
        expect(chart).to_be_focused()
        page.keyboard.press("ArrowRight")
        expect(reading).to_have_text(["30", "1.033", "1.5"])

        write_report(folder, RESULT)
    expect(page.locator("header .state")).to_have_text("finished")
    expect(page.get_by_role("row", name="Perplexity")).to_contain_text("9.50")
    assert page.locator("img, main b").count() == 0 and page.title() == "tickets · packs studio"


def test_a_server_that_is_gone_is_said(browser, home, expect):
    make_run(home, metrics=losses(10))
    with Signed(home) as studio:
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{studio.port}{studio.link}")
        page.get_by_role("link", name="tickets").click()
        expect(page.get_by_role("group", name="Loss")).to_be_visible()
    expect(page.locator("#status")).to_have_text(
        "packs studio does not answer. Runs go on without it."
    )
    assert page.locator(".box canvas").first.is_visible()
    page.close()


@pytest.mark.parametrize(
    ("width", "scheme"),
    nightly_except([(360, "dark"), (1280, "light")], (360, "dark"), often_is=()),
)
def test_every_screen_is_accessible(home, opened, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = opened(viewport={"width": width, "height": 800}, color_scheme=scheme)

    def check() -> None:
        page.wait_for_load_state("networkidle")
        assert page.evaluate("document.scrollingElement.scrollWidth <= innerWidth"), page.url
        result = axe.run(page)
        assert result.violations_count == 0, result.generate_report()

    home_url = page.url.rstrip("/")
    check()  # the empty home
    lines = [*losses(*range(1, 90)), {"batch": 80, "valid_loss": 1.2, "grad_norm": 1e-7}]
    long = "averylongword" * 40
    make_run(home, "done", lines, [sample(0, long), sample(9, long)], report=RESULT)
    make_run(home, "failed", lines, ended={**ERROR, "error": f"/{long}: gone"}, checkpoint=50)
    (make_run(home, "waits", begun=False) / "waiting.json").write_text('{"settings": {}}')
    make_run(home, "begun", begun=False, phase="Reading the model")
    (make_run(home, "damaged") / "config.json").write_text("{")
    bad = write(home, "bad.jsonl", *rows(20), "{", long)
    form = f"/new?model=tiny&data={bad}"
    forms = ("/new", form, form + "&on_bad_row=skip", "/new?model=tiny&data=tiny&rank=x")
    for path in (
        *forms,
        "/",
        "/runs/done",
        "/runs/failed",
        "/runs/begun",
        "/runs/waits",
        "/runs/damaged",
    ):
        page.goto(home_url + path)
        check()
    page.goto(page.url.replace("damaged", "done"))
    page.locator("summary").first.click()
    check()


def write(home, name: str, *lines: str) -> str:
    """Write a file of examples to data/; return its name in the form."""
    file = home / "data" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(line + "\n" for line in lines))
    return f"data/{name}"


def rows(count: int) -> list[str]:
    texts = [{"prompt": f"Say {n}", "completion": f"{n} it is"} for n in range(count)]
    return [json.dumps(text) for text in texts]


@pytest.mark.nightly(seconds=120)
def test_the_example_is_started_stopped_resumed_and_done(home, opened, expect):
    page = opened()
    page.get_by_role("button", name="Try the example").click()
    expect(page.get_by_role("group", name="Loss")).to_be_visible()
    page.get_by_role("button", name="Stop and keep progress").click()
    state = page.locator("header .state")
    expect(state).to_have_text("stopped")
    batch = int(page.get_by_text("The last checkpoint is batch").text_content().split()[-1][:-1])

    page.get_by_role("button", name="Resume").click()
    expect(state).to_have_text("training")
    url, tabs = page.url, page.context
    page.close()  # which changes nothing for the run
    page = tabs.new_page()
    page.goto(url)
    expect(page.locator("#progress")).to_contain_text("Batch")
    assert int(page.locator("#progress").text_content().split()[1]) >= batch
    expect(page.locator("header .state")).to_have_text("finished", timeout=400_000)
    expect(page.get_by_role("heading", name="Held-out results")).to_be_visible()


def test_a_file_with_bad_rows_is_uploaded_and_trained_on(home, opened, expect, tmp_path):
    file = tmp_path / "My rows.jsonl"
    lines = rows(50)
    lines[6:6] = ["{", '{"prompt": "alone"}', json.dumps({"prompt": 3, "completion": HOSTILE})]
    file.write_text("\n".join(lines) + "\n")

    page = opened()
    page.get_by_role("link", name="New run").click()
    page.get_by_label("Add a file to data/").set_input_files(file)
    bad = page.locator(".bad li")
    expect(bad).to_have_count(3)
    assert sorted(re.findall(r"line (\d+):", " ".join(bad.all_text_contents()))) == ["7", "8", "9"]
    expect(page.locator("mark").first).to_contain_text("it is")
    expect(page.get_by_role("button", name="Start training")).to_be_disabled()
    expect(page.locator("#blocked")).to_contain_text("3 rows cannot be used")

    page.get_by_role("button", name="Leave out 3 bad rows").click()
    page.get_by_text("More settings").click()
    page.get_by_label("iters").fill("20")
    page.get_by_label("Name").fill("mine")
    page.get_by_role("button", name="Start training").click()
    expect(page.get_by_role("heading", name="mine")).to_be_visible()
    expect(page.locator("header .state")).to_have_text("finished", timeout=120_000)
    expect(page.get_by_role("row", name="Perplexity")).to_be_visible()


def test_an_upload_is_cancelled(home, opened, expect, tmp_path):
    file = tmp_path / "large.csv"
    with file.open("wb") as large:
        large.truncate(200 << 20)
    page = opened()
    page.get_by_role("link", name="New run").click()
    # as slow as a network, or it is done before the button is pressed
    devtools = page.context.new_cdp_session(page)
    devtools.send("Network.enable")
    slow = {"offline": False, "latency": 0, "downloadThroughput": -1, "uploadThroughput": 5_000_000}
    devtools.send("Network.emulateNetworkConditions", slow)
    page.get_by_label("Add a file to data/").set_input_files(file)
    page.get_by_role("button", name="Cancel upload").click()
    expect(page.locator("#status")).to_have_text("The upload was cancelled.")
    until(lambda: not (home / "data").exists() or not list((home / "data").iterdir()))


@pytest.mark.nightly
def test_a_run_that_does_not_fit_is_offered_a_change(home, opened, expect):
    page = opened()
    page.goto(page.url + "new?model=tiny&data=tiny&batch_size=40000&preset=Quick+look")
    start = page.get_by_role("button", name="Start training")
    expect(start).to_be_disabled()
    expect(page.locator("#blocked")).to_contain_text("does not fit")
    page.get_by_role("button", name="Use batch size").click()
    expect(start).to_be_enabled()
    expect(page.locator("#blocked")).to_be_empty()


@pytest.mark.nightly
def test_a_run_that_diverged_is_tried_again(home, opened, expect):
    ended = {**ERROR, "error": "batch 9: nan"}
    make_run(home, "failed", losses(*range(1, 9)), ended=ended)
    page = opened()
    page.goto(page.url + "runs/failed")
    page.get_by_role("link", name="Change --learning-rate and try again").click()
    field = page.get_by_label("learning rate")
    expect(field).to_be_visible()
    field.fill("1e-4")
    page.get_by_role("button", name="Update the plan").click()
    expect(page.locator("#command")).to_contain_text("--learning-rate=1e-4")


def test_a_run_is_deleted_by_its_name(home, opened, expect):
    make_run(home, "old", losses(10), report=RESULT)
    page = opened()
    page.get_by_role("link", name="old").click()
    page.get_by_text("Delete run").first.click()

    name = page.get_by_label("type its name")
    name.fill("new")
    page.get_by_role("button", name="Delete run").click()
    expect(page.get_by_text("another name was typed")).to_be_visible()

    page.go_back()
    page.get_by_text("Delete run").first.click()
    name.fill("old")
    page.get_by_role("button", name="Delete run").click()
    expect(page.get_by_role("button", name="Try the example")).to_be_visible()
    page.get_by_role("button", name="New run").click()
    expect(page.get_by_role("button", name="Check")).to_be_visible()


def test_a_table_is_dropped_and_its_columns_chosen(home, opened, expect):
    page = opened()
    page.get_by_role("link", name="New run").click()
    text = "question,answer\n" + "".join(f"Say {n},{n} it is\n" for n in range(40))
    files = page.evaluate_handle(
        "text => { const data = new DataTransfer();"
        " data.items.add(new File([text], 'table.csv')); return data }",
        text,
    )

    page.dispatch_event("#upload", "drop", {"dataTransfer": files})
    page.get_by_label("Column with the prompt").select_option("question")
    page.get_by_label("Column with the completion").select_option("answer")
    page.get_by_role("button", name="Check again").click()

    expect(page.locator("mark").first).to_contain_text("it is")
    expect(page.get_by_role("button", name="Start training")).to_be_enabled()
    page.get_by_role("button", name="Choose other columns").click()
    expect(page.get_by_label("Column with the prompt")).to_have_value("")
