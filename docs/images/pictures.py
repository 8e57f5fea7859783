"""Make the pictures of the documentation that show a terminal or a page, from real runs.

    pip install playwright pillow    # and Chromium or Chrome
    python docs/images/pictures.py WORK --model SmolLM2-135M-Instruct.Q4_1.gguf --banking banking77

WORK is a folder for data and packs; packs that are there are used again. README.md, beside this
file, says what each picture shows.
"""

import argparse
import io
import json
import os
import pty
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parents[1])]

import terminal  # noqa: E402
from playwright.sync_api import Browser, Page, sync_playwright  # noqa: E402

from benchmarks.plan_table import QWEN3_8B  # noqa: E402

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
COLUMNS = 96  # of the terminal
SCHEMES = ("light", "dark")
SCALE = 1.6  # pixels of a picture for each of the page
COLOURS = 64  # of a picture
MODEL = "SmolLM2-135M.gguf"  # in the folder of the work
PLANNED = "mlx-community/Qwen3-8B-4bit"
SERVED = ("short", "reminders")
QUESTION = "To do on Thursday: send the invoice, at 2:30 pm."
INTENTS = (
    "cancel transfer",
    "card arrival",
    "card delivery estimate",
    "card swallowed",
    "change pin",
    "declined transfer",
    "failed transfer",
    "lost or stolen card",
    "passcode forgotten",
    "pending transfer",
    "pin blocked",
    "request refund",
)
# Options of `packs train` for the pack of this name; "reminders" is the run of the quick start.
RUNS = {
    "reminders": "--steps-per-report 5 --steps-per-eval 25",
    "short": "--iters 40",
}


def packs(*args: str) -> list[str]:
    """Return a command line of `packs`, of this environment."""
    return [sys.executable, "-m", "mlx_packs.cli.main", *args]


# Data and packs


def write_data(work: Path, banking: Path) -> None:
    """Write the messages of `INTENTS` as chats to tickets/."""
    import gzip

    for split in ("train", "valid", "test"):
        with gzip.open(banking / f"{split}.jsonl.gz", "rt", encoding="utf-8") as lines:
            chats = [json.loads(line) for line in lines]
        chats = [chat for chat in chats if chat["messages"][-1]["content"] in INTENTS]
        (work / "tickets").mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(chat) + "\n" for chat in chats)
        (work / "tickets" / f"{split}.jsonl").write_text(text, "utf-8")


def write_headers(folder: Path, config: dict[str, Any]) -> None:
    """Write a 4-bit checkpoint whose weights are a hole in the file: `packs plan` reads headers."""
    from mlx_packs.memory.read import describe

    config = config | {"quantization": {"group_size": 64, "bits": 4}}
    header, end = {}, 0

    for name, tensor in describe(str(folder), config).tensors.items():
        *outer, width = tensor["shape"]
        parts = {name: tensor}
        if len(tensor["shape"]) == 2:
            parts = {
                name: {"dtype": "U32", "shape": [*outer, width // 8]},
                name.replace(".weight", ".scales"): {
                    "dtype": "BF16",
                    "shape": [*outer, width // 64],
                },
                name.replace(".weight", ".biases"): {
                    "dtype": "BF16",
                    "shape": [*outer, width // 64],
                },
            }
        for part, facts in parts.items():
            count = 1
            for size in facts["shape"]:
                count *= size
            start, end = end, end + count * {"U32": 4, "BF16": 2}[facts["dtype"]]
            header[part] = facts | {"data_offsets": [start, end]}

    text = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def train(work: Path) -> None:
    """Train the packs that are not there."""
    for name, options in RUNS.items():
        if not (work / "packs" / name / "pack.json").exists():
            out = ["--out", f"packs/{name}"]
            subprocess.run(packs("train", *options.split(), *out), cwd=work, check=True)


# Terminal


def output(work: Path, args: list[str]) -> str:
    """Return what a command prints on a terminal of `COLUMNS`."""
    reader, writer = pty.openpty()
    environment = os.environ | {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    with subprocess.Popen(
        packs(*args), cwd=work, env=environment, stdout=writer, stderr=subprocess.PIPE
    ) as process:
        os.close(writer)
        parts = []
        while chunk := _read(reader):
            parts.append(chunk)
        errors = process.stderr.read().decode() if process.stderr else ""
    os.close(reader)

    if process.returncode:
        raise SystemExit(f"packs {' '.join(args)}: {errors}")
    return b"".join(parts).decode().replace("\r\n", "\n")


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # Linux reports the end of a terminal as an error
        return b""


def save_terminal(work: Path, name: str, command: str) -> None:
    """Write NAME.svg: a command and its output."""
    printed = output(work, command.split())
    svg = terminal.picture(f"packs {command}", printed, COLUMNS)
    (FOLDER / f"{name}.svg").write_text(svg, "utf-8")


def data(work: Path) -> None:
    """`packs data`: lengths, repeated tokens, and which tokens are trained on."""
    save_terminal(work, "data", f"data tickets --model {MODEL}")


def plan(work: Path) -> None:
    """`packs plan` for an 8B model on a Mac with 16 GB."""
    write_headers(work / PLANNED, QWEN3_8B)
    save_terminal(work, "plan", f"plan --model {PLANNED} --memory 16GB --device gpu -v")


def leaderboard(work: Path) -> None:
    """`packs eval-batch` of two packs."""
    compared = "packs/reminders packs/short"
    save_terminal(work, "leaderboard", f"eval-batch {compared} --batch-size 1,8")


# Pages


def save_page(page: Page, name: str, **options: Any) -> None:
    """Write NAME.png with few colours."""
    from PIL import Image

    shot = Image.open(io.BytesIO(page.screenshot(**options))).convert("RGB")
    few = shot.quantize(COLOURS, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    few.save(FOLDER / f"{name}.png", optimize=True)


@contextmanager
def pages(browser: Browser, width: int, height: int) -> Iterator[Iterator[tuple[str, Page]]]:
    """Yield a page for each scheme, and close them."""
    contexts = [
        browser.new_context(
            color_scheme=scheme,
            device_scale_factor=SCALE,
            viewport={"width": width, "height": height},
        )
        for scheme in SCHEMES
    ]
    yield ((scheme, each.new_page()) for scheme, each in zip(SCHEMES, contexts, strict=True))
    for each in contexts:
        each.close()


def report_of(work: Path, name: str) -> str:
    """Return the address of the page of a run, which is written anew."""
    file = work / f"{name}.html"
    subprocess.run(packs("report", f"packs/{name}", "--out", file.name), cwd=work, check=True)
    return file.as_uri()


def report(work: Path, browser: Browser) -> None:
    """The top of the report page of the quick start."""
    with pages(browser, 1000, 1500) as opened:
        for scheme, page in opened:
            page.goto(report_of(work, "reminders"))
            samples = page.locator("section", has=page.get_by_role("heading", name="Samples"))
            box = samples.bounding_box()
            clip = {"x": 0, "y": 0, "width": 1000, "height": box["y"] if box else 1500}
            save_page(page, f"report-{scheme}", clip=clip, full_page=True)


@contextmanager
def server(work: Path) -> Iterator[str]:
    """Serve the packs of reminders; yield the address."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    names = [f"packs/{name}" for name in SERVED]
    process = subprocess.Popen(packs("serve", *names, "--port", str(port)), cwd=work)
    address = f"http://127.0.0.1:{port}"
    try:
        while process.poll() is None:
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait()


def serving(work: Path, browser: Browser) -> None:
    """The base and two packs, answering the same message."""
    with server(work) as address, pages(browser, 1000, 900) as opened:
        for scheme, page in opened:
            page.goto(address)
            for _ in SERVED[1:]:  # the page starts with two columns
                page.get_by_role("button", name="Add column").click()
            for number, name in enumerate(("base", *SERVED)):
                page.locator(".model").nth(number).select_option(name)
            page.locator("#max_tokens").fill("48")
            page.get_by_label("Message to all columns").fill(QUESTION)
            page.get_by_role("button", name="Send").click()
            page.locator("#finished p").nth(len(SERVED)).wait_for(state="attached", timeout=300_000)
            page.mouse.move(0, 0)
            save_page(page, f"serving-{scheme}", full_page=True)


# `packs train` of runs that end early: one is stopped after some batches, one diverges.
ENDED = {"stopped": "--save-every 20", "too-fast": "--learning-rate 1e9 --iters 40"}


def end_runs(work: Path) -> None:
    """Train one run that is stopped after some batches, and one that diverges."""
    for name in (*ENDED, "evening", "night"):
        shutil.rmtree(work / "packs" / f"{name}-run", ignore_errors=True)
    for name, options in ENDED.items():
        command = packs("train", *options.split(), "--data", "data/reminders", "--quiet")
        command += ["--out", f"packs/{name}"]
        with subprocess.Popen(command, cwd=work) as run:
            if name == "stopped":
                while run.poll() is None and not list(work.glob("packs/stopped-run/step-*")):
                    time.sleep(0.1)
                run.terminate()


@contextmanager
def studio_page(work: Path, browser: Browser) -> Iterator[Page]:
    """Yield the first page of `packs studio` in the folder of the work."""
    command = packs("studio", "--no-browser", "--port", "0")
    with subprocess.Popen(command, cwd=work, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            process.stdout.readline()
            page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme="light")
            page.set_default_timeout(600_000)
            page.goto(process.stdout.readline().split()[1])
            page.wait_for_url("**/")
            yield page
        finally:
            process.terminate()


def studio(work: Path, browser: Browser) -> None:
    """Runs in several states, the form of a new run, and a run with its curve and answers."""
    examples = work / "data" / "reminders"
    if not examples.exists():
        command = packs("data", "tiny", "--out", str(examples), "--samples", "0")
        subprocess.run(command, check=True, capture_output=True)
    end_runs(work)

    with studio_page(work, browser) as page:
        address = page.url
        form = f"{address}new?model=tiny&data=data/reminders&sample_every=20&name="
        page.goto(f"{form}evening")
        ends = page.get_by_role("heading", name="Examples"), page.get_by_text("More settings")
        top, bottom = ((each.bounding_box() or {"y": 0})["y"] for each in ends)
        clip = {"x": 0, "y": top - 30, "width": 1280, "height": bottom - top + 20}
        _save(page, work, "studio-new", clip=clip, full_page=True)
        page.get_by_role("button", name="Start training").click()
        page.get_by_text("after batch 80").wait_for()
        _save(page, work, "studio-run")

        page.goto(f"{form}night")
        page.get_by_role("button", name="Start after").click()
        page.goto(address)
        _save(page, work, "studio-runs", full_page=True)
        for name in ("night", "evening"):
            page.goto(f"{address}runs/{name}")
            page.get_by_role("button", name=re.compile("Remove|Stop")).click()
            page.wait_for_load_state()


def _save(page: Page, work: Path, name: str, **options: Any) -> None:
    """Save a page with ~/models for the folder of the work."""
    replace = """home => { for (const node of document.querySelectorAll(".sub, code"))
        node.textContent = node.textContent.replaceAll(home, "~/models"); }"""
    page.evaluate(replace, str(work))
    save_page(page, name, **options)


TERMINALS = (data, plan, leaderboard)
PAGES = (report, serving, studio)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("work", type=Path, help="a folder for data and packs")
    parser.add_argument("--model", type=Path, required=True, help="the GGUF of SmolLM2")
    parser.add_argument("--banking", type=Path, required=True, help="a folder with banking77")
    names = [draw.__name__ for draw in (*TERMINALS, *PAGES)]
    parser.add_argument("--only", choices=names, nargs="+", default=names, help="pictures to make")
    args = parser.parse_args()

    work = args.work.resolve()
    write_data(work, args.banking)
    if not (work / MODEL).exists():
        (work / MODEL).symlink_to(args.model.resolve())
    train(work)

    for show in TERMINALS:
        if show.__name__ in args.only:
            show(work)

    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program)
        for show in PAGES:
            if show.__name__ in args.only:
                show(work, browser)
        browser.close()


if __name__ == "__main__":
    main()
