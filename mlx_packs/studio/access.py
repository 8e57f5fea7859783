"""Who may read the pages: one login, its cookie, requests of our own pages, names in the home."""

import hmac
import html
import re
import secrets
from collections.abc import Callable
from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import PackError, file_errors
from ..training.run_folder import run_folder

RUNS = "packs"  # the folder of the home where packs and their runs are
DATA = "data"  # the folder of the home where examples are
LOGIN = "/login"
OF_RUN = "of-run"  # asks the first page for the run of the process that started the studio
CONTENT_POLICY = "Content-Security-Policy"
POLICY = {
    CONTENT_POLICY: "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_READ = ("GET", "HEAD")
_COOKIE_S = 7 * 24 * 3600  # a browser that was closed comes back; with the server it is void


class Login:
    """A link that lets one browser in, once, and the cookie that this browser gets."""

    def __init__(self, start: str = "/") -> None:
        self._start = start  # the page that opens first
        self._token = secrets.token_urlsafe(32)
        # Cookies are shared by the ports of a host: each start has a name of its own.
        self._name = f"packs-{secrets.token_hex(4)}"
        self._value = secrets.token_urlsafe(32)

    def link(self, address: str) -> str:
        return f"{address}{LOGIN}?token={self._token}"

    def answer(self, request: Request) -> Response | None:
        """Return the page that sets the cookie and opens the studio; None for a wrong token.

        It is a page, since browsers send no strict cookie along a redirect from elsewhere.
        """
        page = HTMLResponse(page_that_opens(self._start))
        if self.knows(request):
            return page
        if not self._token or not _is_same(request.query_params.get("token", ""), self._token):
            return None
        self._token = ""
        page.set_cookie(self._name, self._value, _COOKIE_S, httponly=True, samesite="strict")
        return page

    def knows(self, request: Request) -> bool:
        return _is_same(request.cookies.get(self._name, ""), self._value)


def _is_same(sent: str, secret: str) -> bool:
    return hmac.compare_digest(sent.encode("utf-8", "replace"), secret.encode())


def page_that_opens(address: str) -> str:
    """Return a page that opens an address at once."""
    url = html.escape(address)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>packs studio</title>'
        f'<meta http-equiv="refresh" content="0; url={url}">'
        f'<a href="{url}">Open packs studio</a></html>\n'
    )


class Access:
    """Lets a request through if it has the cookie and is of our own pages; the login needs neither.

    Every answer gets the headers of `POLICY` that it does not have.
    """

    def __init__(
        self, app: ASGIApp, login: Login, error_page: Callable[[int, str], Response]
    ) -> None:
        self._app = app
        self._login = login
        self._error_page = error_page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in POLICY.items():
                    headers.setdefault(name, value)
            await send(message)

        rejection = None
        if scope["type"] == "http" and scope["path"] != LOGIN:
            rejection = self._rejection(Request(scope))
        await (rejection or self._app)(scope, receive, send_with_policy)

    def _rejection(self, request: Request) -> Response | None:
        """Return the answer to a browser that is not signed in, or to a page of another origin.

        Browsers add both headers, and pages cannot change them; changes must have an origin. Other
        ports of this machine are other origins, too, though they share its cookies.
        """
        if not self._login.knows(request):
            text = "This browser is not signed in. Open the link that packs studio printed."
            return self._error_page(401, text)
        ours = f"http://{request.headers.get('host', '')}"
        origin = request.headers.get("origin", ours if request.method in _READ else "")
        site = request.headers.get("sec-fetch-site", "none")
        if origin != ours or site not in ("none", "same-origin"):
            return self._error_page(403, "This request is not of a page of packs studio.")
        return None


def folder_of_run(home: Path, name: str) -> Path:
    """Return the folder of a run in the home; a PackError if there is none, or it has links.

    A link could lead out of the home, or to what is no file of a run.
    """
    check_name(name)
    folder = run_folder(home / RUNS / name)
    if not folder.is_dir():
        raise PackError(f"{name}: there is no such run in {RUNS}/.", "not-found")
    with file_errors(folder.name):
        links = [path.name for path in (folder, *folder.iterdir()) if path.is_symlink()]
    if links:
        text = f"{links[0]} is a link, which is not followed. Put the original in its place."
        raise PackError(f"{folder.name}: {text}", "unreadable")
    return folder


def check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        text = "a name has up to 64 letters, digits, dots, hyphens and underscores"
        raise PackError(f"'{name:.80}': is no name of a run ({text}).", "not-found", "out")
    return name


def check_data(home: Path, data: str) -> None:
    """Check that examples are the bundled ones, or a file or folder below data/ of the home."""
    folder = (home / DATA).resolve()
    path = (home / data).resolve()
    if data != "tiny" and not (path.exists() and path.is_relative_to(folder) and path != folder):
        fault = f"there is no such file or folder in {DATA}/."
        raise PackError(f"{data:.80}: {fault}", "not-found", "data")
