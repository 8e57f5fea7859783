"""The routes of `packs studio`: pages made from run folders, for one browser of this machine."""

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial, wraps
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qsl, urlencode

import anyio
import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from ..errors import PackError
from ..reading import parse_json
from ..report.page import environment
from ..serving.http import AccessGuard, ServerSettings, error_response, read_body
from ..serving.page import ASKED, page, pass_on, policy_with
from . import jobs, new_run
from .access import CONTENT_POLICY, LOGIN, OF_RUN, POLICY, Access, Login
from .commands import Child, Outcome
from .runs import live, report_page, run_page, runs_of
from .use import COMMANDS, facts_of

_HERE = Path(__file__).parent
_MOST_FIELDS = 100  # of a form
_READERS = 4  # requests that read at once
_FORM = "application/x-www-form-urlencoded"
_EXAMPLE = {"sample_every": "50"}  # the bundled model and data are the defaults
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


async def _form_of(request: Request) -> dict[str, str]:
    body = await read_body(request, _FORM)
    try:
        return dict(parse_qsl(body.decode(), max_num_fields=_MOST_FIELDS))
    except ValueError:
        raise HTTPException(400, "The form cannot be read.") from None


def _to_run(name: str, query: str = "") -> Response:
    return RedirectResponse(f"/runs/{name}{query}", 303)


class Studio:
    """Answers requests from the folders below a home; it keeps nothing but its child processes.

    Handlers of changes have the form that was sent as ``request.state.form``.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._children: dict[str, Child] = {}
        self._starting = Lock()

    def runs(self, request: Request) -> Response:
        runs, older = runs_of(self._home)
        if OF_RUN in request.query_params:  # the page asks again as soon as a run begins
            for run in runs:
                if run.state == "training" and run.status.process == os.getppid():
                    return _to_run(run.name)
        page = _rendered("runs.html.jinja", runs=runs, older=older, home=str(self._home))
        return HTMLResponse(page)

    def states(self, _: Request) -> Response:
        return JSONResponse({run.name: [run.state, run.progress] for run in runs_of(self._home)[0]})

    def run(self, request: Request) -> Response:
        content = run_page(self._home, request.path_params["name"])
        content["is_stopping"] = "stopping" in request.query_params
        return HTMLResponse(_rendered("run.html.jinja", **content))

    def lines(self, request: Request) -> Response:
        start = request.query_params.get("from", "0")
        if not (start.isascii() and start.isdecimal() and len(start) < 20):
            raise HTTPException(400, "from: must be a number of bytes.")
        file = request.query_params.get("file", "")
        return JSONResponse(live(self._home, request.path_params["name"], file, int(start)))

    def report(self, request: Request) -> Response:
        page = report_page(self._home, request.path_params["name"])
        return HTMLResponse(page, headers={CONTENT_POLICY: _REPORT_POLICY})

    # Screens that start a command

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """End the children with the studio, in order."""
        yield
        for child in self._children.values():
            child.stop()

    def outcome(self, screen: str) -> Outcome:
        child = self._children.get(screen)
        return child.outcome if child else Outcome()

    def screen(self, screen: str, request: Request) -> Response:
        outcome = self.outcome(screen)
        if screen == "use" and outcome.state == "done":
            html = page(_rendered("answers.html.jinja", address=outcome.report["address"]))
            policy = policy_with(html, POLICY[CONTENT_POLICY])
            return HTMLResponse(html, headers={CONTENT_POLICY: policy})

        chosen = request.query_params.get("pack", "")
        facts = facts_of(self._home)
        return HTMLResponse(
            _rendered(f"{screen}.html.jinja", outcome=outcome, chosen=chosen, **facts)
        )

    def state(self, screen: str, _: Request) -> Response:
        outcome = self.outcome(screen)
        return JSONResponse([outcome.state, outcome.text])

    def start_command(self, screen: str, request: Request) -> Response:
        command = COMMANDS[screen](request.state.form)
        with self._starting:
            if self.outcome(screen).state == "working":
                raise PackError(f"{command[0]}: runs already. Wait for it, or stop it.", "busy")
            self.end_command(screen, request)
            self._children[screen] = Child(self._home, *command)
        return RedirectResponse(f"/{screen}", 303)

    def end_command(self, screen: str, request: Request) -> Response:
        if child := self._children.pop(screen, None):
            child.stop()
        values = new_run.values_of(request.state.form)  # of a planned run, whose page stops it too
        return RedirectResponse(f"/new?{urlencode(values)}" if values else f"/{screen}", 303)

    async def pass_on(self, request: Request) -> Response:
        server = self.outcome("use")
        if server.state != "done":
            return error_response(PackError("No model answers. Start it on the screen Use."))
        token = server.report["token"] or os.environ["MLX_PACKS_API_KEY"]
        return await pass_on(request, server.report["address"], token)

    def new(self, request: Request) -> Response:
        values = new_run.values_of(request.query_params)
        if values != dict(request.query_params):
            return RedirectResponse(f"/new?{urlencode(values)}", 303)
        return self._form(values)

    def start(self, request: Request) -> Response:
        values = new_run.values_of(request.state.form)
        try:
            return _to_run(new_run.start(self._home, values))
        except PackError as error:
            return self._form(values, error)

    def _form(self, values: dict[str, str], fault: PackError | None = None) -> Response:
        template = environment(_HERE / "templates").get_template("new.html.jinja")
        form = new_run.NewRun(self._home, values, fault)
        page = template.generate(form=form, chat=self.outcome("use"))
        return StreamingResponse(page, 400 if fault else 200, media_type="text/html")

    async def upload(self, request: Request) -> Response:
        try:
            size = request.headers.get("content-length", "")
            name = request.query_params.get("name", "")
            parts = request.stream()
            data = await new_run.save_upload(self._home, name, int(size or 0), parts)
            return JSONResponse({"data": data})
        except Exception as error:
            return error_response(error)

    def start_example(self, _: Request) -> Response:
        name = jobs.free_name(self._home, "example")
        jobs.queue(self._home, name, _EXAMPLE)
        return _to_run(name)

    def stop(self, request: Request) -> Response:
        name = request.path_params["name"]
        was_training = jobs.stop(self._home, name)
        return _to_run(name, "?stopping") if was_training else RedirectResponse("/", 303)

    def resume(self, request: Request) -> Response:
        name = request.path_params["name"]
        jobs.resume(self._home, name, request.state.form.get("iters", ""))
        return _to_run(name)

    def delete(self, request: Request) -> Response:
        form = request.state.form
        name = request.path_params["name"]
        jobs.delete(self._home, name, form.get("name", ""), "pack" in form)
        return RedirectResponse("/", 303)

    def style(self, _: Request) -> Response:
        return Response(_rendered("studio.css.jinja"), media_type="text/css")


def make_app(home: Path, login: Login) -> Starlette:
    """Return the application over a home, for the browser that uses a login."""
    studio = Studio(home)
    limit = anyio.CapacityLimiter(_READERS)

    def answering(handler: Callable[[Request], Response]) -> Callable[..., Awaitable[Response]]:
        """Return a handler that runs in a thread, with the form that was sent.

        Its errors are pages.
        """

        @wraps(handler)
        async def answered(request: Request) -> Response:
            try:
                if request.method == "POST":
                    request.state.form = await _form_of(request)
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
        "/new": studio.new,
        "/studio.css": studio.style,
    }
    changes = {
        "/new": studio.start,
        "/example": studio.start_example,
        "/runs/{name}/stop": studio.stop,
        "/runs/{name}/resume": studio.resume,
        "/runs/{name}/delete": studio.delete,
    }
    for screen in COMMANDS:
        handlers[f"/{screen}"] = partial(studio.screen, screen)
        handlers[f"/{screen}/state"] = partial(studio.state, screen)
        changes[f"/{screen}"] = partial(studio.start_command, screen)
        changes[f"/{screen}/stop"] = partial(studio.end_command, screen)
    routes: list[BaseRoute] = [Route(path, answering(each)) for path, each in handlers.items()]
    routes += [Route(path, answering(each), methods=["POST"]) for path, each in changes.items()]
    routes += [Route(path, studio.pass_on, methods=[method]) for path, method in ASKED.items()]
    routes += [Route("/upload", studio.upload, methods=["POST"])]
    routes += [Route(LOGIN, log_in), Mount("/static", StaticFiles(directory=_HERE / "static"))]
    app = Starlette(
        routes=routes, exception_handlers={HTTPException: on_error}, lifespan=studio.lifespan
    )
    app.add_middleware(AccessGuard, settings=ServerSettings(), computing=())
    app.add_middleware(Access, login=login, error_page=_error_page)
    return app
