"""The HTTP interface: OpenAI's, packs beside it, health, load and a page to try them."""

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import anyio
import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from ..adapters.spec import ranks_of
from ..bases.tokenizer import tokens_of, with_template
from ..bases.turns import images_of
from ..errors import PackError
from ..objectives.reader import rerank_prompt
from ..packs.compatibility import text_limit
from ..packs.manifest import chat_template_of, json_layout_of, specs_of, template_kwargs_of
from ..packs.scored import Prediction, input_row
from ..sandbox.process import deadline as sandbox_deadline
from .answers import ChatAnswer, CompletionAnswer, Texts, embedding_answer, rerank_answer, sse
from .embedding import EmbeddingWorker, Reranker
from .feedback import Learning, rejected
from .fields import answering, field_error, not_found
from .generation import TextWorker
from .http import (
    AccessGuard,
    EventStream,
    Handler,
    ServerSettings,
    error_response,
    failure,
    no_route,
    unless_gone,
)
from .library import Library, follow
from .page import page
from .prompts import RequestPrompts, read_images
from .protocol import ChatBody, ClassifyBody, CompletionBody, EmbeddingBody, PackBody, RerankBody
from .registry import Served
from .request import MakeRequest

if TYPE_CHECKING:
    from .train.service import TrainingService

T = TypeVar("T")
W = TypeVar("W", TextWorker, EmbeddingWorker, Reranker)
log = logging.getLogger("mlx_packs.serving")


class Server:
    def __init__(
        self,
        worker: TextWorker | EmbeddingWorker,
        library: Library,
        settings: ServerSettings,
        training: "TrainingService | None" = None,
        learning: Learning | None = None,
    ) -> None:
        self.worker = worker
        self.library = library
        self.settings = settings
        self.training = training
        self.learning = learning
        self._tokenizing = anyio.CapacityLimiter(1)  # tokenizers are not made for several threads
        self._decoding = anyio.CapacityLimiter(2)  # an image takes up to 600 MB meanwhile
        if isinstance(worker, TextWorker):
            limit = settings.max_tokens
            self._prompts = RequestPrompts(worker.base, limit, worker.limits.context)
            if (images := images_of(worker.base.tokenizer)) is not None:
                images.limit(settings.max_pixels, settings.allow_urls)
                images.keep_in_memory()

    # Texts

    async def chat(self, request: Request, body: ChatBody) -> Response:
        generator = self._worker(TextWorker)
        generator.registry.check_model(body.model)  # at once, however many requests wait
        deadline = self._deadline()

        images: list[Any] = []
        if any(message.images for message in body.messages):
            read = functools.partial(
                read_images, generator, body, self.settings.allow_urls, deadline
            )
            images = await self._until(deadline, request, self._in_thread(read, self._decoding))

        recorded = generator.registry.recorded(body.model)
        variables = {**template_kwargs_of(recorded), **self.settings.template_kwargs}
        layout = json_layout_of(recorded)

        def prepare() -> tuple[Any, list[int], MakeRequest]:
            tokenizer = with_template(generator.base.tokenizer, chat_template_of(recorded))
            prompt = self._prompts.of_chat(body, variables, images, layout, tokenizer)
            maker = self._prompts.chat_maker(body, prompt, deadline, images, layout, tokenizer)
            return tokenizer, prompt, maker

        tokenizer, prompt, maker = await self._until(deadline, request, self._in_thread(prepare))
        texts = _texts(generator, body.n, maker)

        def answer() -> ChatAnswer:
            tools = body.usable_tools
            return ChatAnswer(texts, body.model, len(prompt), tokenizer, tools)

        def ended(answer: ChatAnswer) -> None:
            if self.learning is not None:
                own = body.chat_template_kwargs or {}
                self.learning.remember(answer, body, {**variables, **own})

        return await self._answer(request, texts, answer, body, ended)

    async def complete(self, request: Request, body: CompletionBody) -> Response:
        generator = self._worker(TextWorker, "/v1/completions")
        generator.registry.check_model(body.model)
        deadline = self._deadline()
        work = self._in_thread(lambda: self._prompts.of_texts(body))
        prompts = await self._until(deadline, request, work)
        each = [prompt for prompt in prompts for _ in range(body.n)]
        maker = self._prompts.text_maker(body, each, deadline)
        texts = _texts(generator, len(each), maker)

        def answer() -> CompletionAnswer:
            tokens = sum(map(len, prompts))
            return CompletionAnswer(texts, body.model, tokens, generator.base.tokenizer, ())

        return await self._answer(request, texts, answer, body)

    async def _answer(
        self,
        request: Request,
        texts: Texts,
        make: Callable[[], ChatAnswer],
        body: Any,
        ended: Callable[[ChatAnswer], None] = lambda _: None,
    ) -> Response:
        """Return texts whole or as a stream; they end when the client goes.

        ``ended`` is called with an answer that is complete.
        """
        try:
            await unless_gone(request, texts.start())
            answer = make()
            if body.stream:
                events = self._events(answer, body.wants_usage, ended)
                return EventStream(events, self.settings.request_seconds + 60, texts.cancel)
            whole = await unless_gone(request, answer.whole())
            ended(answer)
        except BaseException:
            texts.cancel()
            raise
        return JSONResponse(whole)

    async def _events(
        self, answer: ChatAnswer, wants_usage: bool, ended: Callable[[ChatAnswer], None]
    ) -> AsyncIterator[str]:
        try:
            async for chunk in answer.stream(wants_usage):
                yield sse(chunk)
            ended(answer)
        except Exception as error:
            body = bytes(error_response(error).body).decode()
            yield sse(body)
        else:
            yield sse("[DONE]")

    # Embeddings

    async def embed(self, request: Request, body: EmbeddingBody) -> Response:
        worker = self._worker(EmbeddingWorker)
        worker.registry.check_model(body.model)
        texts = body.input
        embedder = worker.base.embedder
        recorded = worker.registry.recorded(body.model)
        if body.dimensions not in (None, embedder.vectors.dims):
            raise field_error("dimensions", f"this base has {embedder.vectors.dims}.")

        if body.prompt_name is not None:
            prompt = recorded.get("objective", {}).get(f"{body.prompt_name}_prompt")
            if prompt is None:
                prompt = worker.base.prompt(body.prompt_name)
            texts = [prompt + text for text in texts]

        longest = min(embedder.vectors.longest, text_limit(recorded, worker.base.config))

        def tokenize(part: list[str]) -> list[np.ndarray]:
            return tokens_of(embedder.tokenizer, part, longest)

        work = self._computed(worker, body.model, _parts(texts), tokenize)
        vectors, tokens = await self._until(self._deadline(), request, work)
        return JSONResponse(embedding_answer(body.model, vectors, tokens, body.encoding_format))

    async def rerank(self, request: Request, body: RerankBody) -> Response:
        worker = self._worker(Reranker)
        worker.registry.check_model(body.model)
        if not body.query.strip():
            raise field_error("query", "is empty.")

        work = self._ranked(worker, body)
        scores, tokens = await self._until(self._deadline(), request, work)
        return JSONResponse(rerank_answer(body, scores, tokens))

    async def _ranked(self, worker: Reranker, body: RerankBody) -> tuple[np.ndarray, int]:
        recorded = worker.registry.recorded(body.model)
        instruction = body.instruction or recorded.get("objective", {}).get("instruction")
        limit = text_limit(recorded, worker.base.config)
        make = functools.partial(rerank_prompt, worker.base, body.query, instruction, limit)
        prompt = await self._in_thread(make)

        def tokenize(part: list[str]) -> list[np.ndarray]:
            return [prompt.tokens(body.query, document)[0] for document in part]

        parts = _parts(body.documents, len(body.query))
        return await self._computed(worker, body.model, parts, tokenize)

    async def _computed(
        self,
        worker: EmbeddingWorker,
        model: str,
        parts: Iterable[list[str]],
        tokenize: Callable[[list[str]], list[np.ndarray]],
    ) -> tuple[np.ndarray, int]:
        """Return what a worker computes of texts, and their tokens.

        They are tokenized part by part: between two, others have their turn.
        """
        rows: list[np.ndarray] = []
        for part in parts:
            rows += await self._in_thread(functools.partial(tokenize, part))

        future = worker.submit(model, rows)
        try:
            return await asyncio.wrap_future(future), sum(map(len, rows))
        finally:
            future.cancel()

    def _worker(self, kind: type[W], route: str = "") -> W:
        if self.worker.route != kind.route:
            raise PackError(
                f"{route or kind.route}: this server answers only {self.worker.route}.",
                "unsupported",
            )
        return cast(W, self.worker)

    # Labels

    async def classify(self, request: Request, body: ClassifyBody) -> Response:
        generator = self._worker(TextWorker, "/v1/classify")
        registry = generator.registry
        deadline = self._deadline()
        entry = await generator.result_of(lambda: registry.lease(body.model, classifies=True))

        try:
            work = self._predictions(generator, entry, body.input)
            predictions = await self._until(deadline, request, work)
        finally:
            generator.post(lambda: registry.release(entry))

        data = [{"index": i, **each.to_json(body.top)} for i, each in enumerate(predictions)]
        return JSONResponse({"object": "list", "model": body.model, "data": data})

    async def _predictions(
        self, generator: TextWorker, entry: Served, inputs: Sequence[Any]
    ) -> list[Prediction]:
        """Label texts or chats batch by batch, between the steps of other requests."""
        classifier = entry.classifier
        names = classifier.names
        rows = [input_row(f"input[{i}]", each, names) for i, each in enumerate(inputs)]
        predictions = []

        for part in _parts(rows):
            texts = await self._in_thread(functools.partial(classifier.texts, part))
            logits = np.zeros((len(part), classifier.classes.outputs))
            order = np.argsort([len(text) for text in texts], kind="stable")
            for start in range(0, len(order), _ROWS):
                chosen = order[start : start + _ROWS]
                compute = functools.partial(_logits, generator, entry, [texts[i] for i in chosen])
                logits[chosen] = await generator.result_of(compute)
            predictions += classifier.predictions(logits)

        return predictions

    # Models and packs

    async def models(self, _: Request) -> Response:
        data = [self._model(entry) for entry in self.worker.registry.entries.values()]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        entry = self.worker.registry.entries.get(name)
        if entry is None:
            raise not_found("model", name, "is not served.")
        return JSONResponse(self._model(entry))

    def _model(self, entry: Served) -> dict[str, Any]:
        return {
            "id": entry.name,
            "object": "model",
            "created": entry.created,
            "owned_by": "mlx-packs",
            "root": self.worker.base.public_name,
            "parent": None if entry.name == "base" else "base",
        }

    async def packs(self, _: Request) -> Response:
        data = []
        for name, entry in self.worker.registry.entries.items():
            pack = entry.pack
            if pack is None:
                continue
            adapters = pack.manifest["adapters"]
            scores = pack._part("eval")
            data.append(
                {
                    "name": name,
                    "source": entry.source,
                    "parameters": adapters["parameters"],
                    "ranks": ranks_of(specs_of(pack.manifest)),
                    "sha256": pack._adapters_hash,
                    "ppl_before": scores.get("ppl_before"),
                    "ppl_after": scores.get("ppl_after"),
                }
            )

        base = self.worker.base
        facts = {
            "base": base.public_name,
            "architecture": base.architecture,
            "answers": self.worker.route,
            "images": images_of(base.tokenizer) is not None,
            "learns": None,
        }
        if self.learning is not None:
            facts["learns"] = self.learning.folder.name
        return JSONResponse({"object": "list", **facts, "data": data})

    async def add_pack(self, _: Request, body: PackBody) -> Response:
        began = time.monotonic()
        name, changed = await self.library.add(body.source, body.name)
        seconds = round(time.monotonic() - began, 3)
        return JSONResponse({"name": name, "changed": changed, "seconds": seconds}, 201)

    async def remove_pack(self, request: Request) -> Response:
        name = request.path_params["name"]
        await self.library.remove(name)
        return JSONResponse({"name": name, "removed": True})

    # The server itself

    async def health(self, _: Request) -> Response:
        running, waiting = self.worker.counts
        alive = self.worker.is_alive
        status = "ok" if alive else "stopping"
        facts: dict[str, Any] = {"status": status, "running": running, "waiting": waiting}
        if self.training is not None:
            facts["training"] = self.training.load
        return JSONResponse(facts, 200 if alive else 503)

    async def page(self, _: Request) -> Response:
        return HTMLResponse(page(), headers=_PAGE_HEADERS)

    # Parts

    def _deadline(self) -> float:
        return time.monotonic() + self.settings.request_seconds

    async def _in_thread(
        self, function: Callable[[], T], limit: anyio.CapacityLimiter | None = None
    ) -> T:
        async with limit or self._tokenizing:
            return await run_in_threadpool(function)

    async def _until(self, deadline: float, request: Request, work: Awaitable[T]) -> T:
        """Return what is waited for; raise when it is too late, or the client goes before."""
        with sandbox_deadline(deadline), anyio.fail_after(deadline - time.monotonic()):
            return await unless_gone(request, work)


def _parts(texts: Sequence[Any], beside: int = 0) -> Iterator[list[Any]]:
    """Yield some texts or rows at a time, by the characters of each and of what is beside it."""
    part = []
    size = 0
    for text in texts:
        part.append(text)
        size += beside + len(text if isinstance(text, str) else repr(text))
        if size > _PART or len(part) == _PART_TEXTS:
            yield part
            part = []
            size = 0

    if part:
        yield part


def _logits(generator: TextWorker, entry: Served, texts: Sequence[np.ndarray]) -> np.ndarray:
    generator.registry.slots.selection.set([entry.slot])
    return entry.classifier.logits(texts, _ROWS)


def _texts(generator: TextWorker, count: int, maker: MakeRequest) -> Texts:
    """Return the texts of a request, unless they are more than can ever wait at once."""
    if count > (most := generator.limits.waiting):
        raise field_error("n", f"the request asks for {count} texts, but only {most} may wait.")
    return Texts(generator, count, maker)


_WATCH_SECONDS = 1.0
_PART = 200_000  # characters that are tokenized between two requests
_PART_TEXTS = 64
_ROWS = 8  # of a batch that is classified between two steps
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


def make_app(server: Server) -> Starlette:
    """Return the application; it starts and ends the watch of folders, not the worker."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        scans = [server.library.scan]
        if server.learning is not None:
            scans.append(server.learning.serve_current)
        watches = [asyncio.ensure_future(follow(scan, _WATCH_SECONDS)) for scan in scans]
        try:
            yield
        finally:
            for watch in watches:
                watch.cancel()
            if server.training is not None:
                server.training.results.abort()

    async def on_error(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == 404:
            return no_route(request.url.path, post, server.worker.route)
        return error_response(error)

    async def on_gone(_: Request, __: Exception) -> Response:
        return Response(status_code=499)

    async def on_late(_: Request, __: Exception) -> Response:
        return failure(504, "The request took too long.")

    feedback = server.learning.rate if server.learning is not None else rejected
    # POST requests that change nothing, so that they need no token.
    computing: dict[str, Handler] = {
        "/v1/chat/completions": server.chat,
        "/v1/completions": server.complete,
        "/v1/embeddings": server.embed,
        "/v1/classify": server.classify,
        "/v1/rerank": server.rerank,
    }
    handlers: dict[tuple[str, str], Handler] = {
        ("GET", "/"): server.page,
        ("GET", "/health"): server.health,
        ("GET", "/v1/models"): server.models,
        ("GET", "/v1/models/{name:path}"): server.model,
        ("GET", "/v1/packs"): server.packs,
        ("POST", "/v1/packs"): server.add_pack,
        ("POST", "/v1/feedback"): feedback,
        ("DELETE", "/v1/packs/{name:path}"): server.remove_pack,
    }
    handlers |= {("POST", path): handler for path, handler in computing.items()}
    post = [path for method, path in handlers if method == "POST"]
    if server.training is not None:
        handlers |= server.training.routes()
    routes = [
        Route(path, answering(handler), methods=[method])
        for (method, path), handler in handlers.items()
    ]
    on: dict[Any, Any] = {
        PackError: on_error,
        HTTPException: on_error,
        ClientDisconnect: on_gone,
        TimeoutError: on_late,
        Exception: on_error,
    }

    app = Starlette(routes=routes, exception_handlers=on, lifespan=lifespan)
    app.add_middleware(AccessGuard, settings=server.settings, computing=tuple(computing))
    return app
