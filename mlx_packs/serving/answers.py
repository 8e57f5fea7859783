"""Turns a request over HTTP into generations, and these into JSON or a stream of events."""

import asyncio
import base64
import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..bases.tokenizer import token_bytes
from .generation import TextWorker
from .protocol import Message, RerankBody, Tool, new_id, now, tool_calls
from .request import Event, Finished, Logprob, MakeRequest, Progress, Started


@dataclass
class Choice:
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    cached: int = 0
    adapters: str | None = None  # as `Started` has it
    tokens: int = 0
    reason: str | None = None


class Texts:
    """The texts of one request, as they are computed."""

    def __init__(self, generator: TextWorker, count: int, make: MakeRequest) -> None:
        self._generator = generator
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._requests = [make(i, _listener(i, self._events)) for i in range(count)]
        self._left = count
        self.choices = [Choice() for _ in range(count)]

    async def start(self) -> None:
        """Submit all, and wait until each has its place; raise the error of the first with none."""
        for request in self._requests:
            self._generator.submit(request)

        waiting = set(range(len(self._requests)))
        early = []
        while waiting:
            i, event = await self._events.get()
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Started):
                self.choices[i].cached = event.cached
                self.choices[i].adapters = event.adapters
                waiting.discard(i)
            else:
                early.append((i, event))

        for item in early:
            self._events.put_nowait(item)

    async def events(self) -> AsyncIterator[tuple[int, Progress | Finished]]:
        """Yield what happens to each text, until all have ended; raise what ended one of them."""
        while self._left:
            i, event = await self._events.get()
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Finished):
                self._left -= 1
                self.choices[i].tokens = event.tokens
                self.choices[i].reason = event.reason
                yield i, event
            elif isinstance(event, Progress):
                yield i, event

    def cancel(self) -> None:
        for request in self._requests:
            self._generator.cancel(request)


def _listener(i: int, events: asyncio.Queue[tuple[int, Event]]) -> Callable[[Event], None]:
    """Return what puts the events of a text into a queue; it holds neither the request nor others.

    So requests end with their last reference, and with them the images that they hold.
    """
    loop = asyncio.get_running_loop()

    def tell(event: Event) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(events.put_nowait, (i, event))

    return tell


class ChatAnswer:
    """A chat completion from texts that are started; ``model`` is as the client wrote it."""

    kind = "chat.completion"
    stream_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(
        self, texts: Texts, model: str, prompt_tokens: int, tokenizer: Any, tools: Sequence[Tool]
    ) -> None:
        self._texts = texts
        self._prompt_tokens = prompt_tokens
        self._tokenizer = tokenizer
        self._tools = tools
        self.id = new_id(self.prefix)
        self._head = {"id": self.id, "created": now(), "model": model}

    def messages(self) -> list[tuple[dict[str, Any], str | None, str | None]]:
        """Return each choice, once it has ended, as a message of training.

        With it come the reason of its end and the hash of the adapters that gave it.
        """
        return [
            (Message.model_validate(_message(each)).to_template(), each.reason, each.adapters)
            for each in self._texts.choices
        ]

    async def whole(self) -> dict[str, Any]:
        async for i, event in self._texts.events():
            if isinstance(event, Progress):
                self._add(self._texts.choices[i], event)
        choices = [self._choice(i, choice) for i, choice in enumerate(self._texts.choices)]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._usage()}

    async def stream(self, wants_usage: bool) -> AsyncIterator[dict[str, Any]]:
        for i in range(len(self._texts.choices)):
            yield self._chunk(i, {"role": "assistant", "content": ""})

        async for i, event in self._texts.events():
            choice = self._texts.choices[i]
            if isinstance(event, Finished):
                yield self._chunk(i, {}, self._reason(choice))
                continue

            deltas = self._add(choice, event)
            logprobs = None
            if event.logprob:
                logprobs = self._logprobs([event.logprob])
                deltas = deltas or [{}]
            for delta in deltas:
                yield self._chunk(i, delta, logprobs=logprobs)
                logprobs = None

        if wants_usage:
            empty = {**self._head, "object": self.stream_kind, "choices": []}
            yield {**empty, "usage": self._usage()}

    def _add(self, choice: Choice, event: Progress) -> list[dict[str, Any]]:
        """Add what a token ended to a choice, and return it as deltas of a stream."""
        deltas: list[dict[str, Any]] = []
        for piece in event.pieces:
            calls = []
            if piece.kind == "tool_call" and self._tools:
                calls = tool_calls(self._tokenizer.tool_parser, piece.text, self._tools)

            if calls:
                numbered = enumerate(calls, len(choice.calls))
                deltas.append({"tool_calls": [{"index": i, **call} for i, call in numbered]})
                choice.calls += calls
            elif piece.kind == "reasoning":
                deltas.append({"reasoning_content": piece.text})
                choice.reasoning.append(piece.text)
            else:  # content, or a call that cannot be read: shown as it was written
                deltas.append({"content": piece.text})
                choice.content.append(piece.text)

        if event.logprob is not None:
            choice.logprobs.append(event.logprob)
        return deltas

    def _usage(self) -> dict[str, Any]:
        choices = self._texts.choices
        tokens = sum(choice.tokens for choice in choices)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self._prompt_tokens + tokens,
            "prompt_tokens_details": {"cached_tokens": choices[0].cached},
        }

    def _reason(self, choice: Choice) -> str | None:
        if choice.calls and choice.reason == "stop":
            return "tool_calls"
        return choice.reason

    def _chunk(
        self, i: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        choice = {"index": i, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        return {**self._head, "object": self.stream_kind, "choices": [choice]}

    def _choice(self, i: int, choice: Choice) -> dict[str, Any]:
        return {
            "index": i,
            "message": _message(choice),
            "finish_reason": self._reason(choice),
            "logprobs": self._logprobs(choice.logprobs) if choice.logprobs else None,
        }

    def _logprobs(self, entries: Sequence[Logprob]) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._token(entry.token, entry.logprob),
                    "top_logprobs": [self._token(token, score) for token, score in entry.top],
                }
                for entry in entries
            ]
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        """Return a token as OpenAI's; one that cannot be has the log-probability -9999."""
        written = token_bytes(self._tokenizer, token)
        if not math.isfinite(logprob):
            logprob = -9999.0
        return {"token": _text(written), "logprob": logprob, "bytes": list(written)}


class CompletionAnswer(ChatAnswer):
    kind = stream_kind = "text_completion"
    prefix = "cmpl"

    def _chunk(
        self, i: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        choice = self._text_choice(i, delta.get("content", ""), reason)
        return {**self._head, "object": self.stream_kind, "choices": [choice]}

    def _choice(self, i: int, choice: Choice) -> dict[str, Any]:
        return self._text_choice(i, "".join(choice.content), choice.reason)

    def _text_choice(self, i: int, text: str, reason: str | None) -> dict[str, Any]:
        return {"index": i, "text": text, "finish_reason": reason, "logprobs": None}


def _message(choice: Choice) -> dict[str, Any]:
    content = "".join(choice.content)
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if choice.reasoning:
        message["reasoning_content"] = "".join(choice.reasoning)
    if choice.calls:
        message |= {"content": content.strip() or None, "tool_calls": choice.calls}
    return message


def _text(written: bytes) -> str:
    """Return the bytes of a token as a text, in hex digits if they are a part of a character."""
    try:
        return written.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)


def sse(data: dict[str, Any] | str) -> str:
    if not isinstance(data, str):
        data = json.dumps(data, ensure_ascii=False)
    return f"data: {data}\n\n"


def embedding_answer(model: str, vectors: Any, tokens: int, encoding: str) -> dict[str, Any]:
    """Return embeddings [N, D] as OpenAI's."""

    def written(vector: Any) -> Any:
        if encoding == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        return vector.tolist()

    data = [
        {"object": "embedding", "index": i, "embedding": written(vector)}
        for i, vector in enumerate(vectors)
    ]
    numbers = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model, "usage": numbers}


def rerank_answer(body: RerankBody, scores: Any, tokens: int) -> dict[str, Any]:
    """Return scores [N] of the documents of a request, the most relevant first."""
    relevances = 1 / (1 + np.exp(-np.asarray(scores, np.float64)))
    order = np.argsort(-relevances, kind="stable")[: body.top_n]

    results = []
    for index in order.tolist():
        result: dict[str, Any] = {"index": index, "relevance_score": float(relevances[index])}
        if body.return_documents:
            result["document"] = {"text": body.documents[index]}
        results.append(result)

    numbers = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "model": body.model, "results": results, "usage": numbers}
