"""`packs studio`: the page that shows runs, in the browser of this machine."""

import os
import socket
import subprocess
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from ..errors import PackError
from ..terminal import echo, pass_on
from .options import SectionedCommand
from .serve import check_installed, listen

_HOST = "127.0.0.1"


@click.command(cls=SectionedCommand)
@click.option(
    "--home",
    default=".",
    metavar="DIR",
    help="Folder whose packs/ has the runs, as packs train writes them without --out.",
)
@click.option(
    "--port",
    default=8090,
    type=click.IntRange(0, 65535),
    help="Port to listen on; 0 chooses one that is free.",
)
@click.option("--no-browser", is_flag=True, help="Print the link, and open no browser.")
@click.option("--of-run", is_flag=True, hidden=True)  # of the process that started it: `run_shown`
def studio(home: str, port: int, no_browser: bool, of_run: bool) -> None:
    """Start runs from the browser, and follow the runs of a folder.

    A form checks the examples, plans memory and time, and starts the run. The page follows runs
    while they train: loss curves, time left, answers to validation prompts, results and errors. It
    stops and resumes them; they are processes of their own and do not end with it. It compares the
    answers of base model and packs, trains on their ratings, and exports packs. Only the browser
    that opens the link can see it.
    """
    check_installed("studio")
    folder = Path(home).expanduser().absolute()
    if not folder.is_dir():
        raise PackError(f"--home {home}: no such folder.", "not-found", "home")

    with listen(_HOST, port) as listening:
        _run(folder, listening, not no_browser, of_run)


def _run(folder: Path, listening: socket.socket, opens: bool, of_run: bool) -> None:
    import uvicorn

    from ..serving.running import config_of, run_until_signalled
    from ..studio.access import OF_RUN, Login, page_that_opens
    from ..studio.app import make_app
    from ..studio.jobs import keep_starting

    login = Login(f"/?{OF_RUN}" if of_run else "/")
    address = f"http://{_HOST}:{listening.getsockname()[1]}"
    end = "ends with this command" if of_run else "Ctrl-C ends it, and no run"
    echo(f"studio    {folder}")
    echo(f"at        {login.link(address)} · for one browser; {end}")

    threading.Thread(target=keep_starting, args=[folder], daemon=True).start()
    options = {"log_level": "warning", "timeout_graceful_shutdown": 1, "server_header": False}
    server = uvicorn.Server(config_of(make_app(folder, login), **options))
    # Without windows a browser would run in this terminal.
    has_windows = sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ)
    # A file that only this user can read: arguments of a browser can be read by all.
    with tempfile.NamedTemporaryFile("w", prefix="packs-studio-", suffix=".html") as file:
        if opens and has_windows:
            file.write(page_that_opens(login.link(address)))
            file.flush()
            webbrowser.open_new_tab(Path(file.name).as_uri())
        with suppress(KeyboardInterrupt):  # which is how a page ends, and no error
            run_until_signalled(server, listening)


@contextmanager
def run_shown(out: str | None) -> Iterator[None]:
    """Show the page of the run that this process trains meanwhile, by a studio of its own.

    In a terminal the page stays until Ctrl-C, if the run succeeds; it never outlives this process.
    """
    from ..studio import commands
    from ..studio.access import RUNS

    check_installed("--open")
    runs = Path(out or f"{RUNS}/name").expanduser().absolute().parent
    if runs.name != RUNS:
        text = f"the page has the runs of a folder called {RUNS}. Choose --out {RUNS}/NAME."
        raise PackError(f"--open: {text}", "conflict", "open")

    command = [sys.executable, "-m", commands.__name__, "studio", "--of-run"]
    command += ["--port=0", f"--home={runs.parent}"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
    with subprocess.Popen(command, **pipes) as page:  # which ends when its input is closed
        for _ in range(2):
            pass_on(page.stdout.readline())
        yield
        if sys.stdin.isatty():
            echo("page      stays until Ctrl-C", err=True)
            with suppress(KeyboardInterrupt):
                page.wait()
