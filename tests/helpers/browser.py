"""Chromium or Chrome of this machine, driven by Playwright."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
WAIT_MS = 90_000  # two busy cores took over 30 s for a click


@contextmanager
def launched() -> Iterator:
    """Yield a browser; skip the test without Playwright or a browser."""
    sync_api = pytest.importorskip("playwright.sync_api")
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip(f"none of {', '.join(PROGRAMS)} is installed")
    sync_api.expect.set_options(timeout=WAIT_MS)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program)
        yield browser
        browser.close()


@contextmanager
def watched_pages(browser) -> Iterator[Callable]:
    """Yield a function that opens a page with a context of its own.

    No script of a page may fail or break its policy, and no request may leave this machine.
    """
    contexts, faults = [], []

    def note(message) -> None:
        if "Content Security Policy" in message.text:
            faults.append(message.text)

    def ask(request) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "file:", "data:")):
            faults.append(request.url)

    def new_page(**options: object):
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", note)
        page.on("request", ask)
        return page

    yield new_page
    for context in contexts:
        context.close()
    assert faults == []
