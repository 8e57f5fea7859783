"""Continuous batches of texts, each sequence with its own pack, by mlx-lm's `BatchGenerator`.

mlx-lm batches, prefills in chunks and keeps caches of prompts; here requests wait until their keys
and values have room, each is told its text as it grows, and a failed step ends its requests alone.
"""

import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from mlx_lm.generate import BatchGenerator, StopSequences
from mlx_lm.models.cache import LRUPromptCache, can_trim_prompt_cache, trim_prompt_cache

from ..bases.model import BaseModel
from ..bases.supported import is_batchable
from ..errors import PackError
from ..inference.generate import check_batches, reads_at_once
from ..runtime import mx
from .fields import field_error
from .registry import PackRegistry, Served
from .request import Finished, Limits, Logprob, Output, Processor, Progress, Started, TextRequest
from .slots import BatchedModel, PackOfSequence, PackSlots, cache_bytes, reserved_tokens
from .worker import Worker, exception_of

_CACHED_PROMPTS = 64
_PASSED_OVER = 6  # steps that a free place waits at most


@dataclass(eq=False)
class _Running:
    request: TextRequest
    entry: Served
    output: Output
    faults: list[Exception]
    tokens: int = 0


class TextWorker(Worker):
    """Computes the texts of all requests; a PackError if mlx-lm cannot batch the base.

    Attributes:
        registry: the packs; only `call` may touch it.
    """

    route = "/v1/chat/completions"

    def __init__(self, base: BaseModel, limits: Limits, matmul_path: str = "quantized") -> None:
        super().__init__()
        if not is_batchable(base.name, base.model):
            limits = replace(limits, batch_size=1)

        self.base = base
        self.limits = limits
        self.registry = PackRegistry(PackSlots(base, matmul_path))
        self._model = BatchedModel(self.registry.slots)
        check_batches(base)

        self._waiting: deque[TextRequest] = deque()
        self._running: dict[int, _Running] = {}
        self._passed_over = 0  # steps that a free place has waited for others
        self._eos = StopSequences([(token,) for token in base.tokenizer.eos_token_ids])

    # Called by other threads.

    def submit(self, request: TextRequest) -> None:
        """Let a request wait for its place; all else it is told by its ``on_event``."""
        self.post(lambda: self._enqueue(request))

    def cancel(self, request: TextRequest) -> None:
        """End a request whose client has gone; it is told nothing more."""
        self.post(lambda: self._drop(request))

    @property
    def counts(self) -> tuple[int, int]:
        return len(self._running), len(self._waiting)

    # Called by the thread that computes.

    def on_start(self) -> None:
        self.base.model.eval()
        self._stream = mx.default_stream(mx.default_device())
        self._fixed_bytes, self._token_bytes = cache_bytes(self._model)
        self._reset()

    def _reset(self) -> None:
        self._generator = BatchGenerator(
            self._model,
            completion_batch_size=self.limits.batch_size,
            prefill_batch_size=min(8, self.limits.batch_size),
            prefill_step_size=self.limits.context,  # prompts are inserted in parts
            stream=self._stream,
        )
        self._prompts = LRUPromptCache(_CACHED_PROMPTS, self.limits.kv_bytes)

    def is_busy(self) -> bool:
        return bool(self._running or self._waiting)

    def kv_bytes(self, sequences: int, tokens: int) -> int:
        """Return the bytes of keys and values of a batch whose longest sequence has ``tokens``."""
        return sequences * (self._fixed_bytes + self._token_bytes * reserved_tokens(tokens))

    def _enqueue(self, request: TextRequest) -> None:
        try:
            self._check(request)
        except PackError as error:
            request.on_event(error)
            return
        self._waiting.append(request)

    def _check(self, request: TextRequest) -> None:
        """Raise a PackError for a request that will never have a place, or has none now."""
        waiting = len(self._waiting)
        self.check_queue(waiting >= self.limits.waiting, f"{waiting} requests")
        field = "messages" if request.after is None else "prompt"
        self.check_length(len(request.prompt), request.max_tokens, field)

        tokens = len(request.prompt) + request.max_tokens
        if (need := self.kv_bytes(1, tokens)) > self.limits.kv_bytes:
            raise field_error(
                "max_tokens",
                f"{tokens} tokens need {need / 1e6:.0f} MB of keys and values, but the server has "
                f"{self.limits.kv_bytes / 1e6:.0f} MB. Shorten the prompt, lower max_tokens, or "
                "start the server with a larger --kv-memory.",
                "memory",
            )

    def check_length(self, prompt: int, max_tokens: int, field: str) -> None:
        """Raise a PackError if the tokens of a prompt and its text are more than the context.

        Any thread may call it.
        """
        tokens = prompt + max_tokens
        if tokens > self.limits.context:
            raise field_error(
                field,
                f"the prompt has {prompt} tokens, and with max_tokens {max_tokens} that is "
                f"{tokens}, but the context of {self.base.name} is {self.limits.context}. "
                "Shorten the prompt or lower max_tokens.",
            )

    def step(self) -> None:
        """Give waiting requests their places, and compute one token of each that runs."""
        self._expire()
        self._admit()
        if not self._running:
            return

        _, responses = self._generator.next()
        for response in responses:
            running = self._running.get(response.uid)
            if running is not None:
                self._take(response, running)

    def _expire(self) -> None:
        now = time.monotonic()
        late = [r for r in self._waiting if r.deadline < now]
        late += [r.request for r in self._running.values() if r.request.deadline < now]
        for request in late:
            self._drop(request)
            request.on_event(PackError("The request took too long.", "timeout"))

    def _admit(self) -> None:
        """Give places to requests that wait, where the batch is full to several at a time.

        Each admission takes two forward passes of its own, whether for one request or for several.
        """
        free = self.limits.batch_size - len(self._running)
        together = min(len(self._waiting), self.limits.batch_size // 4)
        if self._running and free < together and self._passed_over < _PASSED_OVER:
            self._passed_over += free > 0
            return

        self._passed_over = 0
        while self._waiting and len(self._running) < self.limits.batch_size:
            request = self._waiting[0]
            if not self._has_room(request):
                return

            self._waiting.popleft()
            try:
                self._insert(request)
            except Exception as error:  # of this request alone: its model, its prompt
                request.on_event(error)

    def _has_room(self, request: TextRequest) -> bool:
        """Return whether keys and values fit with another sequence; earlier prompts make way."""
        requests = [request, *(r.request for r in self._running.values())]
        longest = max(len(r.prompt) + r.max_tokens for r in requests)
        left = self.limits.kv_bytes - self.kv_bytes(len(requests), longest)
        if left < 0:
            return False
        self._prompts.trim_to(n_bytes=left)
        return True

    def _insert(self, request: TextRequest) -> None:
        entry = self.registry.lease(request.model)
        faults: list[Exception] = []
        tokenizer = request.tokenizer or self.base.tokenizer
        ends = request.stop_tokens
        if ends is None and request.tokenizer is not None:
            ends = tokenizer.eos_token_ids
        stops = StopSequences([(token,) for token in ends]) if ends is not None else self._eos

        try:
            prompt = request.prompt
            cache, known = self._recalled(entry, prompt)
            request.on_event(Started(known, entry.adapters))
            size = self.limits.prefill_chunk
            if reads_at_once(self.base, prompt):
                size = len(prompt)
            # the parts that are computed between two tokens of other requests
            parts = [prompt[start : start + size] for start in range(known, len(prompt), size)]
            (uid,) = self._generator.insert_segments(
                [parts],
                [request.max_tokens],
                caches=[[*cache, PackOfSequence([entry.slot])]],
                all_tokens=[prompt[:known]],
                samplers=[request.sampler()],
                logits_processors=[[_isolated(p, faults) for p in request.processors]],
                stop_sequences=[stops],
            )
        except BaseException:
            self.registry.release(entry)
            raise

        output = Output(tokenizer, request.stop, request.state, request.after, request.one_call)
        self._running[uid] = _Running(request, entry, output, faults)

    def _recalled(self, entry: Served, prompt: list[int]) -> tuple[list[Any], int]:
        """Return caches of a prompt's longest prefix in memory, and its number of tokens."""
        if reads_at_once(self.base, prompt):
            return self._model.new_cache(), 0

        cache, rest = self._prompts.fetch_nearest_cache(entry.key, prompt)
        if cache is not None and not rest:  # at least one token is left to be computed
            rest = prompt[-1:]
            if not (can_trim_prompt_cache(cache) and trim_prompt_cache(cache, 1)):
                cache = None

        if cache is None:
            return self._model.new_cache(), 0
        return cache, len(prompt) - len(rest)

    def _take(self, response: Any, running: _Running) -> None:
        request = running.request
        output = running.output
        if running.faults:
            if response.finish_reason is None:
                self._generator.remove([response.uid])
            del self._running[response.uid]
            self.registry.release(running.entry)
            request.on_event(running.faults[0])
            return

        running.tokens += 1
        ended = response.finish_reason
        pieces = []
        if ended != "stop":
            pieces += output.add(response.token)

        if output.stopped:
            if ended is None:
                self._generator.remove([response.uid])
            ended = "stop"
        if ended is not None:
            pieces += output.finish()

        logprob = None
        is_text = response.finish_reason != "stop" or request.stop_tokens is not None
        if request.top_logprobs is not None and is_text:
            scores = response.logprobs
            top = likeliest(scores, request.top_logprobs)
            logprob = Logprob(response.token, scores[response.token].item(), top)

        if pieces or logprob:
            request.on_event(Progress(tuple(pieces), logprob))

        if ended is None:
            return

        del self._running[response.uid]
        if response.prompt_cache is not None and not reads_at_once(self.base, request.prompt):
            *cache, _ = response.prompt_cache
            self._prompts.insert_cache(running.entry.key, list(response.all_tokens), cache)
        self.registry.release(running.entry)
        request.on_event(Finished(ended, running.tokens))

    def _drop(self, request: TextRequest) -> None:
        if request in self._waiting:
            self._waiting.remove(request)
            return
        for uid, running in self._running.items():
            if running.request is request:
                del self._running[uid]
                self._generator.remove([uid])
                self.registry.release(running.entry)
                return

    def on_failure(self, error: Exception) -> None:
        running = self._running
        self._running = {}
        for each in running.values():
            each.request.on_event(error)
            self.registry.release(each.entry)
        self._generator.close()
        self._reset()

    def on_end(self, reason: PackError) -> None:
        for request in self._waiting:
            request.on_event(reason)
        self._waiting.clear()
        self.on_failure(reason)
        self._generator.close()
        self.registry.slots.close()


def _isolated(process: Processor, faults: list[Exception]) -> Processor:
    """Return a processor whose error ends its own request, not those beside it in the batch."""

    def isolated(tokens: mx.array, logits: mx.array) -> mx.array:
        if not faults:
            try:
                return process(tokens, logits)
            except BaseException as error:  # a panic of a library in Rust is no Exception
                faults.append(exception_of(error))
        return logits

    return isolated


def likeliest(scores: mx.array, count: int) -> tuple[tuple[int, float], ...]:
    """Return the ``count`` tokens with the highest scores [V] and these, the highest first."""
    if not count:
        return ()
    tokens = mx.argpartition(-scores, kth=count - 1)[:count]
    pairs = zip(tokens.tolist(), scores[tokens].tolist(), strict=True)
    return tuple(sorted(pairs, key=lambda pair: -pair[1]))
