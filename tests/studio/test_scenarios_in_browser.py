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
from mlx_packs.files import exclusive_writer
from mlx_packs.training.status import read_status
from tests.helpers.run_folders import make_run
from tests.helpers.serving import until
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


def test_the_page_opens_with_the_example(home, signed_in, expect):
    start = time.monotonic()
    with studio(home, signs_in=False) as running:
        answered = time.monotonic() - start
        page = signed_in(running)
        expect(page.get_by_role("button", name="Try the example")).to_be_enabled()
        usable = time.monotonic() - start
        stat = Path(f"/proc/{running.process.pid}/stat").read_text().split()
        cpu = sum(map(int, stat[13:15])) / os.sysconf("SC_CLK_TCK")
        print(f"listens after {answered:.2f} s, usable after {usable:.2f} s, {cpu:.2f} s of CPU")


@pytest.mark.nightly(seconds=20)
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
        expect(page.locator("#blocked")).to_contain_text("bad.jsonl: too few rows can be used.")
        print("why it cannot start:", page.locator("#blocked").text_content())


def states(home) -> list[str]:
    return [read_status(folder).state for folder in sorted((home / "packs").glob("*-run"))]


@pytest.mark.nightly(seconds=20)
def test_tabs_and_studios_start_one_run_at_a_time(home, signed_in, expect, tmp_path):
    """Two tabs of one studio and one of another press Start at once."""
    (home / "data").mkdir()
    (home / "data" / "small.jsonl").write_text("\n".join(rows(40)))
    form = "new?model=tiny&data=data/small.jsonl&iters=60&batch_size=1&rank=2&preset=Quick+look"
    with studio(home, signs_in=False) as first, studio(home, signs_in=False) as second:
        pages = [signed_in(first), signed_in(second)]
        pages.append(pages[0].context.new_page())
        for page, running in zip(pages, (first, second, first), strict=True):
            page.goto(f"http://127.0.0.1:{running.port}/{form}")
            expect(page.get_by_role("button", name="Start training")).to_be_enabled()
        for page in pages:
            page.evaluate("setTimeout(() => document.querySelector('.start').click())")
        until(lambda: len(states(home)) == 3, 60)

        most = 0
        end = time.monotonic() + SECONDS
        while set(states(home)) != {"finished"} and time.monotonic() < end:
            most = max(most, states(home).count("training"))
            time.sleep(0.1)
    print(f"runs that trained at the same time: {most}; states {states(home)}")
    assert most == 1 and states(home) == ["finished"] * 3
    for file in (home / "packs").glob("*-run/metrics.jsonl"):
        batches = [json.loads(line)["batch"] for line in file.read_text().splitlines()]
        assert batches == sorted(batches) and batches[0] <= 10


@pytest.mark.nightly(seconds=20)
def test_a_rate_that_is_far_too_high_fails_and_is_tried_again(home, signed_in, expect, tmp_path):
    with studio(home, signs_in=False) as running:
        page = signed_in(running)
        upload(page, tmp_path, "mine.jsonl", *rows(40))
        fill(page, iters=30, learning_rate="1e9", name="mine")
        page.get_by_role("button", name="Start training").click()
        end_state(page, expect, "failed")

        message = page.locator("section.failed p.text").text_content()
        print("the message:", message)
        page.get_by_role("link", name="Change --learning-rate and try again").click()
        field = page.get_by_label("learning rate", exact=True)
        expect(field).to_be_visible()
        expect(field).to_have_value("1e+09")

        fill(page, learning_rate="1e-4", name="again")
        page.get_by_role("button", name="Start training").click()
        end_state(page, expect)


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
        # else a slow browser may open the dialog itself, before it is told not to
        page.on("filechooser", lambda _: None)
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
        expect(page.locator("#status")).to_contain_text("has more than 2 GB")
        print("the line:", page.locator("#status").text_content())
    assert not (home / "data").exists()


@pytest.mark.nightly(seconds=180)
def test_an_open_run_costs_the_browser_little(home, browser, opened, expect):
    """The end of an hour of 10,000 batches: nearly all lines are there, the others come in time.

    Each batch is reported, ten times as many as by default.
    """
    status = {"phase": "Training", "batches": 10_000, "updated": time.time()}
    line = {"grad_norm": 0.123456789, "learning_rate": 1.23456789e-5, "tokens_per_s": 345.678}
    lines = [{"batch": n, "loss": 1 + 1 / n, **line} for n in range(1, 10_001)]
    folder = make_run(home, metrics=lines[:9500], batch=9500, **status)
    page = opened()
    sizes = []
    page.on("requestfinished", lambda request: sizes.append(request.sizes()["responseBodySize"]))
    devtools = browser.new_browser_cdp_session()

    def renderer() -> dict:
        processes = devtools.send("SystemInfo.getProcessInfo")["processInfo"]
        of_pages = [each for each in processes if each["type"] == "renderer"]
        return max(of_pages, key=lambda each: memory_mb(each["id"], "RssAnon"))

    with exclusive_writer(folder), (folder / "metrics.jsonl").open("a") as file:
        page.goto(f"{page.url}runs/tickets")
        expect(page.get_by_role("group", name="Loss")).to_be_visible()
        page.wait_for_timeout(5000)
        before = renderer()
        start = time.monotonic()
        memory = memory_mb(before["id"], "RssAnon")
        for each in lines[9500:]:
            file.write(json.dumps(each) + "\n")
            file.flush()
            page.wait_for_timeout(
                1000 * max(0, start + 0.36 * (each["batch"] - 9500) - time.monotonic())
            )
        seconds = time.monotonic() - start
        after = renderer()
    share = (after["cpuTime"] - before["cpuTime"]) / seconds
    now = memory_mb(after["id"], "RssAnon")
    print(
        f"in {seconds:.0f} s: {100 * share:.1f} % of a core, {memory:.0f} to {now:.0f} MB (with "
        f"shared libraries {memory_mb(after['id'], 'VmRSS'):.0f}), largest of {len(sizes)} answers "
        f"{max(sizes) / 1e3:.0f} kB"
    )
    assert max(sizes) <= 200_000 and now < 150 and before["id"] == after["id"]


def memory_mb(process: int, name: str) -> float:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1e3
