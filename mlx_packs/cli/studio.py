"""`packs studio`: the page that shows runs, in the browser of this machine."""

import os
import socket
import sys
import tempfile
import threading
import webbrowser
from pathlib import Path

import click

from ..errors import PackError
from ..terminal import echo
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
def studio(home: str, port: int, no_browser: bool) -> None:
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
        _run(folder, listening, not no_browser)


def _run(folder: Path, listening: socket.socket, opens: bool) -> None:
    import uvicorn

    from ..serving.running import config_of, run_until_signalled
    from ..studio.access import Login, page_that_opens
    from ..studio.app import make_app
    from ..studio.jobs import keep_starting

    login = Login()
    address = f"http://{_HOST}:{listening.getsockname()[1]}"
    echo(f"studio    {folder}")
    echo(f"at        {login.link(address)} · for one browser; Ctrl-C ends it, and no run")

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
        run_until_signalled(server, listening)
