"""Feedback on chat answers (``packs serve --learn``), and the version that is served."""

import asyncio
import json
import logging
import secrets
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..errors import PackError
from ..learning.folder import LearningFolder
from ..learning.rows import Answer, rows_of, write_rows
from .answers import ChatAnswer
from .fields import Object, field_error, not_found
from .library import Library
from .protocol import MAX_CHOICES, ChatBody

log = logging.getLogger("mlx_packs.serving")
_ANSWERS = 1000  # that are remembered
_BYTES = 64 << 20  # of them
_CHARACTERS = 100_000  # of a correction


class FeedbackBody(Object):
    """The body of ``/v1/feedback``."""

    id: str = Field(min_length=1, max_length=200)
    index: int = Field(0, ge=0, lt=MAX_CHOICES)
    rating: Literal["up", "down"] | None = None
    correction: str | None = Field(None, max_length=_CHARACTERS)


@dataclass
class _Remembered:
    """A choice of an answer, with its bytes as JSON, and the identity of its rows if it has any."""

    answer: Answer
    size: int
    row: str | None = None


class Learning:
    """Keeps rated answers of one pack in a folder, and serves the version that the folder names."""

    def __init__(self, folder: LearningFolder, library: Library) -> None:
        self.folder = folder
        self.version = -1  # that is served; none yet
        self._library = library
        self._path = folder.path.absolute()  # which messages to clients leave out
        self._choices: OrderedDict[tuple[str, int], _Remembered] = OrderedDict()
        self._bytes = 0
        self._numbers: dict[str | None, int] = {}  # versions that were served, by their adapters
        self._writing = asyncio.Lock()

    # Versions

    def serve_current(self) -> None:
        """Serve the version that the folder names, unless it is served; waits for the worker.

        Requests that run end with the version that they began with.
        """
        number = self.folder.current
        if number == self.version:
            return

        pack = self.folder.pack_of(number)
        adapters = pack._adapters_hash if pack is not None else None

        self._numbers[adapters] = number
        self._library.put(self.folder.name, pack, f"version {number}")
        if self.version >= 0:
            log.info("%s: version %d is served.", self.folder.name, number)
        self.version = number

    # Answers

    def remember(self, answer: ChatAnswer, body: ChatBody, variables: dict[str, Any]) -> None:
        """Remember an answer that has ended, so that it can be rated.

        Only answers of the pack that learns are kept, and none about images. ``variables`` are
        those that the chat template was given.
        """
        if body.model != self.folder.name or any(message.images for message in body.messages):
            return

        prompt = [message.to_template() for message in body.messages]
        columns: dict[str, Any] = {}
        if body.usable_tools:
            columns["tools"] = [tool.to_template() for tool in body.usable_tools]
        if variables:
            columns["chat_template_kwargs"] = variables

        for index, (message, reason, adapters) in enumerate(answer.messages()):
            version = self._numbers.get(adapters)
            about = {"model": body.model, "version": version, "pack": adapters}
            rated = Answer(prompt, message, columns, about, reason == "length")
            text = json.dumps(vars(rated), ensure_ascii=False)
            # a client may send half a character
            size = len(text.encode(errors="surrogatepass"))
            self._choices[answer.id, index] = _Remembered(rated, size)
            self._bytes += size

        while len(self._choices) > _ANSWERS or self._bytes > _BYTES:
            _, oldest = self._choices.popitem(last=False)
            self._bytes -= oldest.size

    # Feedback

    async def rate(self, _: Request, body: FeedbackBody) -> Response:
        """Answer ``POST /v1/feedback``: keep the answer with what is said of it."""
        async with self._writing:
            remembered = self._rated(body)
            identity = secrets.token_hex(16)
            rows = rows_of(remembered.answer, identity, body.rating, body.correction)
            await run_in_threadpool(write_rows, self._path, rows, remembered.row)
            replaces = remembered.row is not None
            remembered.row = identity

        facts = {"id": body.id, "index": body.index, "kept": sorted(rows), "replaces": replaces}
        return JSONResponse({"object": "feedback", **facts})

    def _rated(self, body: FeedbackBody) -> _Remembered:
        """Return the answer that feedback is about; a PackError if it says nothing of one."""
        remembered = self._choices.get((body.id, body.index))
        if remembered is None:
            reason = (
                f"is none of the latest {_ANSWERS:,} chat answers of {self.folder.name} on this "
                "server. Answers of other models and about images cannot be rated."
            )
            raise not_found("id", body.id, reason)

        _check_said(body, remembered.answer)
        return remembered


def _check_said(body: FeedbackBody, answer: Answer) -> None:
    """Raise a PackError if what is said of an answer contradicts itself or the answer."""
    text = body.correction
    is_up = body.rating == "up"
    if body.rating is None and text is None:
        raise field_error("rating", "is required, or a correction.")
    if text is not None:
        if is_up:
            reason = "is 'up', but a correction says that the answer is wrong. Send one of them."
            raise field_error("rating", reason)
        if not text.strip():
            raise field_error("correction", "is empty.")
        if text.strip() == answer.text.strip():
            reason = "is the answer itself. Send the rating 'up' instead."
            raise field_error("correction", reason)

    if body.rating is not None and answer.is_empty:
        reason = "the answer is empty, so it can only be corrected."
        raise field_error("rating", reason, "conflict")
    if is_up and answer.is_cut:
        reason = "the answer was cut off at max_tokens, so it can only be rated down, or corrected."
        raise field_error("rating", reason, "conflict")


async def rejected(_: Request, __: FeedbackBody) -> Response:
    """Answer feedback to a server that keeps none."""
    raise PackError(
        "/v1/feedback: this server keeps no answers. Start it with --learn DIR.", "unsupported"
    )
