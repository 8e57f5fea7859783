"""The routes of `packs studio`: pages made from run folders, for one browser of this machine."""

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qsl, urlencode

import anyio.to_thread
from jinja2 import Template
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
_REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"


def _template(name: str) -> Template:
    return environment(_HERE / "templates").get_template(f"{name}.jinja")


def _page(name: str, code: int = 200, **content: Any) -> Response:
    return HTMLResponse(_template(f"{name}.html").render(**content), code)


def _error_page(code: int, message: str) -> Response:
    return _page("error", code, message=message)


def _failed(_: Request, error: Exception) -> Response:
    """Return the page of an error, with status and message as `packs serve` answers it."""
    response = error_response(error)
    message = parse_json(bytes(response.body).decode())["error"]["message"]
    return _error_page(response.status_code, message)


def _see(path: str) -> Response:
    return RedirectResponse(path, 303)


async def _form_of(request: Request) -> dict[str, str]:
    body = await read_body(request, "application/x-www-form-urlencoded")
    try:
        return dict(parse_qsl(body.decode(), max_num_fields=_MOST_FIELDS))
    except ValueError:
        raise HTTPException(400, "The form cannot be read.") from None


class Studio:
    """Answers requests from the folders below a home; it keeps nothing but its child processes.

    Handlers of changes have the form that was sent as ``request.state.form``.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._children: dict[str, Child] = {}
        self._starting = Lock()
        self._limiter = anyio.CapacityLimiter(_READERS)

    def answering(self, handler: Callable[..., Response]) -> Callable[..., Awaitable[Response]]:
        """Return a handler that runs in a thread, with the names in the path; errors are pages."""

        async def answered(request: Request) -> Response:
            try:
                if request.method == "POST":
                    request.state.form = await _form_of(request)
                answer = partial(handler, request, **request.path_params)
                return await anyio.to_thread.run_sync(answer, limiter=self._limiter)
            except Exception as error:
                return _failed(request, error)

        return answered

    def runs(self, request: Request) -> Response:
        runs, older = runs_of(self._home)
        if OF_RUN in request.query_params:  # the page asks again as soon as a run begins
            for run in runs:
                if run.state == "training" and run.status.process == os.getppid():
                    return _see(f"/runs/{run.name}")
        return _page("runs", runs=runs, older=older, home=str(self._home))

    def states(self, _: Request) -> Response:
        return JSONResponse({run.name: [run.state, run.progress] for run in runs_of(self._home)[0]})

    def run(self, request: Request, name: str) -> Response:
        is_stopping = "stopping" in request.query_params
        return _page("run", is_stopping=is_stopping, **run_page(self._home, name))

    def lines(self, request: Request, name: str) -> Response:
        start = request.query_params.get("from", "0")
        if not (start.isascii() and start.isdecimal() and len(start) < 20):
            raise HTTPException(400, "from: must be a number of bytes.")
        file = request.query_params.get("file", "")
        return JSONResponse(live(self._home, name, file, int(start)))

    def report(self, _: Request, name: str) -> Response:
        html = report_page(self._home, name)
        return HTMLResponse(html, headers={CONTENT_POLICY: _REPORT_POLICY})

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
        chosen = outcome.form
        if pack := request.query_params.get("pack"):
            chosen = {"pack": pack, f"pack:{pack}": "on", "learn": "on"}
        is_served = not pack or f"pack:{pack}" in outcome.form
        if screen == "use" and outcome.state == "done" and is_served:
            html = page(_template("answers.html").render(address=outcome.report["address"]))
            policy = policy_with(html, POLICY[CONTENT_POLICY])
            return HTMLResponse(html, headers={CONTENT_POLICY: policy})
        return _page(screen, outcome=outcome, chosen=chosen, **facts_of(self._home))

    def state(self, screen: str, _: Request) -> Response:
        outcome = self.outcome(screen)
        return JSONResponse([outcome.state, outcome.text])

    def start_command(self, screen: str, request: Request) -> Response:
        form = request.state.form
        command = COMMANDS[screen](form)
        with self._starting:
            if self.outcome(screen).state == "working":
                raise PackError(f"{command[0]}: runs already. Wait for it, or stop it.", "busy")
            self.end_command(screen, request)
            self._children[screen] = Child(self._home, *command, form=form)
        return _see(f"/{screen}")

    def end_command(self, screen: str, request: Request) -> Response:
        if child := self._children.pop(screen, None):
            child.stop()
        values = new_run.values_of(request.state.form)  # of a planned run, whose page stops it too
        return _see(f"/new?{urlencode(values)}" if values else f"/{screen}")

    async def pass_on(self, request: Request) -> Response:
        server = self.outcome("use")
        if server.state != "done":
            return error_response(PackError("No model answers. Start it on the screen Use."))
        token = server.report["token"] or os.environ["MLX_PACKS_API_KEY"]
        return await pass_on(request, server.report["address"], token)

    def new(self, request: Request) -> Response:
        values = new_run.values_of(request.query_params)
        if values != dict(request.query_params):
            return _see(f"/new?{urlencode(values)}")
        return self._form(values)

    def start(self, request: Request) -> Response:
        values = new_run.values_of(request.state.form)
        name = new_run.NewRun(self._home, values).name
        try:
            jobs.queue(self._home, name, new_run.settings_of(values))
        except PackError as error:
            return self._form(values, error)
        return _see(f"/runs/{name}")

    def _form(self, values: dict[str, str], fault: PackError | None = None) -> Response:
        form = new_run.NewRun(self._home, values, fault)
        parts = _template("new.html").generate(form=form, chat=self.outcome("use"))
        return StreamingResponse(parts, 400 if fault else 200, media_type="text/html")

    async def upload(self, request: Request) -> Response:
        try:
            return JSONResponse({"data": await new_run.save_upload(self._home, request)})
        except Exception as error:
            return error_response(error)

    def start_example(self, _: Request) -> Response:
        name = jobs.free_name(self._home, "example")
        jobs.queue(self._home, name, {"sample_every": "50"})  # of the bundled model and data
        return _see(f"/runs/{name}")

    def stop(self, _: Request, name: str) -> Response:
        was_training = jobs.stop(self._home, name)
        return _see(f"/runs/{name}?stopping" if was_training else "/")

    def resume(self, request: Request, name: str) -> Response:
        jobs.resume(self._home, name, request.state.form.get("iters", ""))
        return _see(f"/runs/{name}")

    def delete(self, request: Request, name: str) -> Response:
        form = request.state.form
        jobs.delete(self._home, name, form.get("name", ""), "pack" in form)
        return _see("/")

    def style(self, _: Request) -> Response:
        return Response(_template("studio.css").render(), media_type="text/css")


def make_app(home: Path, login: Login) -> Starlette:
    """Return the application over a home, for the browser that uses a login."""
    studio = Studio(home)

    def log_in(request: Request) -> Response:
        text = "This link was used already, or is of an earlier start. Start packs studio again."
        return login.answer(request) or _error_page(403, text)

    handlers = {
        "GET /": studio.runs,
        "GET /states": studio.states,
        "GET /runs/{name}": studio.run,
        "GET /runs/{name}/lines": studio.lines,
        "GET /runs/{name}/report": studio.report,
        "POST /runs/{name}/stop": studio.stop,
        "POST /runs/{name}/resume": studio.resume,
        "POST /runs/{name}/delete": studio.delete,
        "GET /new": studio.new,
        "POST /new": studio.start,
        "POST /example": studio.start_example,
        "GET /studio.css": studio.style,
    }
    for screen in COMMANDS:
        handlers[f"GET /{screen}"] = partial(studio.screen, screen)
        handlers[f"GET /{screen}/state"] = partial(studio.state, screen)
        handlers[f"POST /{screen}"] = partial(studio.start_command, screen)
        handlers[f"POST /{screen}/stop"] = partial(studio.end_command, screen)
    routes: list[BaseRoute] = [
        Route(path, studio.answering(handler), methods=[method])
        for (method, path), handler in ((key.split(), each) for key, each in handlers.items())
    ]
    routes += [Route(path, studio.pass_on, methods=[method]) for path, method in ASKED.items()]
    routes += [Route("/upload", studio.upload, methods=["POST"]), Route(LOGIN, log_in)]
    routes += [Mount("/static", StaticFiles(directory=_HERE / "static"))]
    pages = {HTTPException: _failed}
    app = Starlette(routes=routes, exception_handlers=pages, lifespan=studio.lifespan)
    app.add_middleware(AccessGuard, settings=ServerSettings(), computing=())
    app.add_middleware(Access, login=login, error_page=_error_page)
    return app
