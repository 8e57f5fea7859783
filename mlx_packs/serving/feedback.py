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
from .fields import Object, not_found, value_error
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
    """A choice of an answer, or why it cannot be rated.

    Attributes:
        size: bytes of the answer as JSON.
        row: the identity of its rows.
    """

    answer: Answer | None = None
    reason: str = ""
    size: int = 0
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

        ``variables`` are those that the chat template was given.
        """
        prompt = [message.to_template() for message in body.messages]
        columns: dict[str, Any] = {}

        if body.usable_tools:
            columns["tools"] = [tool.to_template() for tool in body.usable_tools]
        if variables:
            columns["chat_template_kwargs"] = variables

        has_images = any(message.images for message in body.messages)

        for index, (message, reason, adapters) in enumerate(answer.messages()):
            if body.model != self.folder.name or adapters not in self._numbers:
                fault = f"is of '{body.model:.140}', and this server learns for {self.folder.name}"
                remembered = _Remembered(reason=fault)
            elif has_images:
                remembered = _Remembered(reason="is about images, which are not learned from")
            else:
                version = self._numbers[adapters]
                about = {"model": body.model, "version": version, "pack": adapters}
                rated = Answer(prompt, message, columns, about, reason == "length")
                text = json.dumps(vars(rated), ensure_ascii=False)
                # a client may send half a character
                size = len(text.encode(errors="surrogatepass"))
                remembered = _Remembered(rated, size=size)
            self._put((answer.id, index), remembered)

    def _put(self, key: tuple[str, int], remembered: _Remembered) -> None:
        self._choices[key] = remembered
        self._bytes += remembered.size
        while len(self._choices) > _ANSWERS or self._bytes > _BYTES:
            _, oldest = self._choices.popitem(last=False)
            self._bytes -= oldest.size

    # Feedback

    async def rate(self, _: Request, body: FeedbackBody) -> Response:
        """Answer ``POST /v1/feedback``: keep the answer with what is said of it."""
        async with self._writing:
            remembered, answer = self._rated(body)
            identity = secrets.token_hex(16)
            rows = rows_of(answer, identity, body.rating, body.correction)
            await run_in_threadpool(write_rows, self._path, rows, remembered.row)
            replaces = remembered.row is not None
            remembered.row = identity

        facts = {"id": body.id, "index": body.index, "kept": sorted(rows), "replaces": replaces}
        return JSONResponse({"object": "feedback", **facts})

    def _rated(self, body: FeedbackBody) -> tuple[_Remembered, Answer]:
        """Return the answer that feedback is about; a PackError if it says nothing of one."""
        remembered = self._choices.get((body.id, body.index))
        if remembered is None:
            reason = f"is none of the latest {_ANSWERS:,} chat answers of this server."
            raise not_found("id", body.id, reason)

        answer = remembered.answer
        if answer is None:
            text = f"this answer {remembered.reason}. It cannot be rated."
            raise value_error("id", body.id, text, "conflict")

        _check_said(body, answer)
        return remembered, answer


def _check_said(body: FeedbackBody, answer: Answer) -> None:
    """Raise a PackError if what is said of an answer contradicts itself or the answer."""
    text = body.correction
    is_up = body.rating == "up"
    invalid = {
        "rating: is required, or a correction.": body.rating is None and text is None,
        "rating: is 'up', but a correction says that the answer is wrong. Send one of them.": (
            is_up and text is not None
        ),
        "correction: is empty.": text is not None and not text.strip(),
        "correction: is the answer itself. Send the rating 'up' instead.": (
            text is not None and text.strip() == answer.text.strip()
        ),
    }
    conflicts = {
        "rating: the answer is empty, so it can only be corrected.": (
            body.rating is not None and answer.is_empty
        ),
        "rating: the answer was cut off at max_tokens, so it can only be rated down, or "
        "corrected.": is_up and answer.is_cut,
    }
    for code, faults in (("invalid", invalid), ("conflict", conflicts)):
        for message, holds in faults.items():
            if holds:
                raise PackError(message, code, message.partition(":")[0])


async def rejected(_: Request, __: FeedbackBody) -> Response:
    """Answer feedback to a server that keeps none."""
    raise PackError(
        "/v1/feedback: this server keeps no answers. Start it with --learn DIR.", "unsupported"
    )
