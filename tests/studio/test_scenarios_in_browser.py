"""Whole ways of a person through the studio, which runs as a process of its own."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlx_packs import Pack
from tests.helpers.browser import watched_pages
from tests.helpers.studio import studio

pytestmark = pytest.mark.interop

SECONDS = 400  # of a run, on a machine that does other work, too
# Notes each address that Python asks for, and lets only those of this machine through.
OFFLINE = """
import os, sys
FAMILIES = {"socket.connect": 1, "socket.getaddrinfo": 0, "socket.gethostbyname": 0}
def audit(event, arguments):
    if event not in FAMILIES:
        return
    host = arguments[FAMILIES[event]]
    host = host[0] if isinstance(host, tuple) else host
    with open(os.environ["ASKED"], "a") as file:
        file.write(f"{host}\\n")
    if host not in (None, "localhost", "127.0.0.1", "::1"):
        raise OSError(f"{host}: no network")
sys.addaudithook(audit)
"""


@pytest.fixture
def signed_in(browser):
    """Open the page of a studio in a browser of its own, by the link that it printed."""
    with watched_pages(browser) as new_page:

        def go(running, **options: object):
            page = new_page(**options)
            page.goto(running.link)
            page.wait_for_url(f"http://127.0.0.1:{running.port}/")
            return page

        yield go


def rows(count: int) -> list[str]:
    return [json.dumps({"prompt": f"Say {n}", "completion": f"{n} it is"}) for n in range(count)]


def upload(page, tmp_path, name: str, *lines: str) -> None:
    (tmp_path / name).write_text("".join(line + "\n" for line in lines))
    page.get_by_role("link", name="New run").click()
    page.get_by_label("Add a file to data/").set_input_files(tmp_path / name)


def fill(page, **settings: object) -> None:
    """Fill in settings, and the name of the run."""
    if not page.get_by_label("iters").is_visible():
        page.get_by_text("More settings").click()
    for name, value in settings.items():
        page.locator(f"input[name={name}]").fill(str(value))


def end_state(page, expect, state: str = "finished") -> None:
    expect(page.locator("header .state")).to_have_text(state, timeout=1000 * SECONDS)


def test_the_page_is_usable_soon(home, signed_in, expect):
    start = time.monotonic()
    with studio(home, signs_in=False) as running:
        answered = time.monotonic() - start
        page = signed_in(running)
        expect(page.get_by_role("button", name="Try the example")).to_be_enabled()
        usable = time.monotonic() - start
        stat = Path(f"/proc/{running.process.pid}/stat").read_text().split()
        cpu = sum(map(int, stat[13:15])) / os.sysconf("SC_CLK_TCK")
        print(f"listens after {answered:.2f} s, usable after {usable:.2f} s, {cpu:.2f} s of CPU")
        assert usable < 20 and cpu < 4  # a busy machine; a benchmark has the figure


def test_from_the_empty_page_to_an_answer_and_an_export_without_a_network(
    home, signed_in, expect, tmp_path
):
    """Scenarios 1, 15 and 17; the example runs after one click, to its result."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(OFFLINE)
    asked = tmp_path / "asked"
    asked.touch()
    paths = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "ASKED": str(asked)}
    with studio(home, environment, signs_in=False) as running:
        page = signed_in(running)
        requests = []
        page.on("request", lambda request: requests.append(request.url))
        page.get_by_role("button", name="Try the example").click()
        end_state(page, expect)
        expect(page.get_by_role("heading", name="Held-out results")).to_be_visible()
        print("clicks from the empty page to the result: 1")

        page.get_by_role("link", name="Export").last.click()
        page.get_by_label("Program").select_option(label="PEFT")
        page.get_by_label("New folder").fill("for-peft")
        page.get_by_role("button", name="Export").click()
        expect(page.get_by_text("Checked: ")).to_contain_text("largest difference")

        page.get_by_role("link", name="Use").click()
        page.get_by_label("Pack example").check()
        page.get_by_role("button", name="Start answering").click()
        page.get_by_label("Message to all columns").fill("Remind me to call the bank")
        page.get_by_role("button", name="Send").click()
        expect(page.locator("dd.speed").nth(1)).not_to_have_text("–")
        columns = page.locator(".answer").all_text_contents()
        page.get_by_role("link", name="Use").click()
        page.get_by_role("button", name="Stop answering").click()
        expect(page.get_by_role("button", name="Start answering")).to_be_visible()

    command = [sys.executable, "-m", "mlx_packs", "import", "for-peft", "--out", "again"]
    subprocess.run([*command, "--model", "tiny"], cwd=home, env=environment, check=True)
    packs = [Pack.open(home / name).load_tensors() for name in ("packs/example", "again")]
    assert all((packs[1][name] == tensor).all() for name, tensor in packs[0].items())
    assert columns[0] != columns[1]

    hosts = set(asked.read_text().split())
    print(f"{len(requests)} requests of the page; its processes asked for {hosts or 'no address'}")
    assert hosts <= {"127.0.0.1", "localhost", "None"} and requests
    assert {re.sub(r":\d+/.*", "", url) for url in requests} == {"http://127.0.0.1"}


def test_examples_that_are_all_bad_cannot_be_started(home, signed_in, expect, tmp_path):
    with studio(home, signs_in=False) as running:
        page = signed_in(running)
        upload(page, tmp_path, "bad.jsonl", *['{"prompt": "alone"}', "{", "[]"] * 4)
        expect(page.get_by_role("button", name="Start training")).to_be_disabled()
        expect(page.locator("#blocked")).to_contain_text("bad.jsonl:1")
        print("why it cannot start:", page.locator("#blocked").text_content())


def tab_to(page, target) -> int:
    """Press Tab until an element has the focus; return how often."""
    for count in range(1, 200):
        page.keyboard.press("Tab")
        if target.evaluate("node => node === document.activeElement"):
            return count
    raise AssertionError(f"{target} is not reached by Tab")


def test_rows_of_a_file_are_trained_on_by_keyboard_alone(home, signed_in, expect, tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(rows(50)) + "\n")
    with studio(home, signs_in=False) as running:
        page = signed_in(running)
        pressed = tab_to(page, page.get_by_role("link", name="New run"))
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="New run")).to_be_visible()
        pressed += tab_to(page, page.get_by_label("Add a file to data/"))
        with page.expect_file_chooser() as chooser:
            page.keyboard.press("Enter")
        chooser.value.set_files(tmp_path / "rows.jsonl")
        expect(page.locator("mark").first).to_be_visible()
        expect(page.get_by_role("button", name="Start training")).to_be_enabled()

        pressed += tab_to(page, page.locator("summary", has_text="More settings"))
        page.keyboard.press("Enter")
        pressed += tab_to(page, page.get_by_label("iters"))
        page.keyboard.type("4")
        pressed += tab_to(page, page.get_by_label("Name", exact=True))
        page.keyboard.type("mine")
        pressed += tab_to(page, page.get_by_role("button", name="Start training"))
        page.keyboard.press("Space")
        expect(page.get_by_role("heading", name="mine")).to_be_visible()
        end_state(page, expect)
        print(f"Tab was pressed {pressed} times")


def test_an_upload_that_is_too_large_is_one_line(home, signed_in, expect, tmp_path):
    with (tmp_path / "large.csv").open("wb") as large:
        large.truncate(3 << 30)
    with studio(home, signs_in=False) as running:
        page = signed_in(running)
        page.get_by_role("link", name="New run").click()
        page.get_by_label("Add a file to data/").set_input_files(tmp_path / "large.csv")
        expect(page.locator("#status")).to_contain_text("2,147,483,648 bytes")
        print("the line:", page.locator("#status").text_content())
    assert not (home / "data").exists()
