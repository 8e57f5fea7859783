"""The page to try the models of a server: alone, or below the header of a program that shows it."""

from pathlib import Path

_FILE = Path(__file__).with_name("page.html")
_NO_HEADER = "<!-- A program that shows this page puts its header here. -->"


def page(header: str = _NO_HEADER) -> str:
    """Return the page; ``header`` is HTML of a program that passes its requests to a server.

    An element of it with the identity ``api`` has the address of that server as its value.
    """
    return _FILE.read_text(encoding="utf-8").replace(_NO_HEADER, header, 1)
