"""The routes of `packs studio`: pages made from run folders, for one browser of this machine."""

from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from ..reading import parse_json
from ..report.page import environment
from ..serving.http import AccessGuard, ServerSettings, error_response
from .access import LOGIN, Access, Login
from .runs import live, report_page, run_page, runs_of

_HERE = Path(__file__).parent
_READERS = 4  # requests that read at once
_REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"


def _rendered(template: str, **content: Any) -> str:
    return environment(_HERE / "templates").get_template(template).render(**content)


def _error_page(code: int, message: str) -> Response:
    return HTMLResponse(_rendered("error.html.jinja", message=message), code)


def _failed(error: Exception) -> Response:
    """Return the page of an error, with status and message as `packs serve` answers it."""
    response = error_response(error)
    message = parse_json(bytes(response.body).decode())["error"]["message"]
    return _error_page(response.status_code, message)


class Studio:
    """Answers requests from the folders below a home; it keeps nothing of them."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def runs(self, _: Request) -> Response:
        runs, older = runs_of(self._home)
        page = _rendered("runs.html.jinja", runs=runs, older=older, home=str(self._home))
        return HTMLResponse(page)

    def states(self, _: Request) -> Response:
        return JSONResponse({run.name: [run.state, run.progress] for run in runs_of(self._home)[0]})

    def run(self, request: Request) -> Response:
        content = run_page(self._home, request.path_params["name"])
        return HTMLResponse(_rendered("run.html.jinja", **content))

    def lines(self, request: Request) -> Response:
        start = request.query_params.get("from", "0")
        if not (start.isascii() and start.isdecimal() and len(start) < 20):
            raise HTTPException(400, "from: must be a number of bytes.")
        file = request.query_params.get("file", "")
        return JSONResponse(live(self._home, request.path_params["name"], file, int(start)))

    def report(self, request: Request) -> Response:
        page = report_page(self._home, request.path_params["name"])
        return HTMLResponse(page, headers={"Content-Security-Policy": _REPORT_POLICY})

    def style(self, _: Request) -> Response:
        return Response(_rendered("studio.css.jinja"), media_type="text/css")


def make_app(home: Path, login: Login) -> Starlette:
    """Return the application over a home, for the browser that uses a login."""
    studio = Studio(home)
    limit = anyio.CapacityLimiter(_READERS)

    def answering(handler: Callable[[Request], Response]) -> Callable[..., Awaitable[Response]]:
        """Return a handler that runs in a thread, and shows its errors as pages."""

        @wraps(handler)
        async def answered(request: Request) -> Response:
            try:
                return await anyio.to_thread.run_sync(handler, request, limiter=limit)
            except Exception as error:
                return _failed(error)

        return answered

    async def log_in(request: Request) -> Response:
        text = "This link was used already, or is of an earlier start. Start packs studio again."
        return login.answer(request) or _error_page(403, text)

    async def on_error(_: Request, error: Exception) -> Response:
        return _failed(error)

    handlers = {
        "/": studio.runs,
        "/states": studio.states,
        "/runs/{name}": studio.run,
        "/runs/{name}/lines": studio.lines,
        "/runs/{name}/report": studio.report,
        "/studio.css": studio.style,
    }
    routes: list[BaseRoute] = [Route(path, answering(each)) for path, each in handlers.items()]
    routes += [Route(LOGIN, log_in), Mount("/static", StaticFiles(directory=_HERE / "static"))]
    app = Starlette(routes=routes, exception_handlers={HTTPException: on_error})
    app.add_middleware(AccessGuard, settings=ServerSettings(), computing=())
    app.add_middleware(Access, login=login, error_page=_error_page)
    return app
