"""Samples of a model by the Tinker protocol: tokens with their log-probabilities.

A sequence has the token that ended it, so that a model can be trained to end.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ...errors import PackError
from ...runtime import mx
from ..answers import Texts
from ..generation import Generator
from ..http import ServerSettings
from ..prompts import CHARACTER_TOKENS, check_tokens
from ..request import Event, Progress, Request, sampler_of
from .protocol import SampleBody
from .wire import Sample, sample_output

_BUSY_SECONDS = 0.2


class SampleRunner:
    """Samples from the base and from adapters that are served on it."""

    def __init__(self, generator: Generator, settings: ServerSettings) -> None:
        self._generator = generator
        self._settings = settings

    def check(self, body: SampleBody) -> None:
        """Raise a PackError for a request that can never be computed."""
        prompt = body.prompt.tokens
        check_tokens(prompt, self._generator.base.vocab_size)
        self._generator.check_length(len(prompt), body.sampling_params.max_tokens or 1, "prompt")

        most = self._generator.limits.waiting
        if body.num_samples > most:
            raise PackError(
                f"num_samples: asks for {body.num_samples} sequences, but only {most} may wait. "
                "Send several requests.",
                flag="num_samples",
            )

    async def sample(self, body: SampleBody, model: str) -> bytes:
        """Return the message with the sequences that ``model`` of the registry continues with."""
        logprobs = None
        if body.prompt_logprobs:
            compute = partial(prompt_logprobs, self._generator, model, body.prompt.tokens)
            logprobs = await self._generator.result_of(compute)

        deadline = time.monotonic() + self._settings.request_seconds
        while True:
            try:
                sequences = await self._sequences(body, model, deadline)
            except PackError as error:
                if error.code != "busy" or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_BUSY_SECONDS)
            else:
                return sample_output(sequences, logprobs)

    async def _sequences(self, body: SampleBody, model: str, deadline: float) -> list[Sample]:
        make = partial(self._request, body, model, deadline)
        texts = Texts(self._generator, body.num_samples, make)
        try:
            await texts.start()
            async for i, event in texts.events():
                if isinstance(event, Progress) and event.logprob is not None:
                    texts.choices[i].logprobs.append(event.logprob)
        except BaseException:
            texts.cancel()
            raise

        return [
            Sample(
                [each.token for each in choice.logprobs],
                [each.logprob for each in choice.logprobs],
                choice.reason == "stop",
            )
            for choice in texts.choices
        ]

    def _request(
        self,
        body: SampleBody,
        model: str,
        deadline: float,
        i: int,
        on_event: Callable[[Event], None],
    ) -> Request:
        params = body.sampling_params
        prompt = body.prompt.tokens
        seed = None if params.seed is None else params.seed + i
        room = self._generator.limits.context - len(prompt)
        default = max(1, min(self._settings.max_tokens, room))

        stop, stop_tokens = self._stops(params.stop)

        return Request(
            model,
            prompt,
            params.max_tokens or default,
            on_event,
            lambda: sampler_of(params.temperature, params.top_p, params.top_k, 0.0, seed),
            stop=stop,
            after=prompt[-CHARACTER_TOKENS:],
            top_logprobs=0,
            stop_tokens=stop_tokens,
            deadline=deadline,
        )

    def _stops(self, stop: str | list[str] | list[int] | None) -> tuple[list[str], list[int]]:
        """Return texts and tokens that end a sequence; the tokenizer's end it, too, unless []."""
        if stop == []:
            return [], []
        tokens = sorted(self._generator.base.tokenizer.eos_token_ids)
        if isinstance(stop, str):
            return [stop], tokens

        texts = [each for each in stop or () if isinstance(each, str) and each]
        return texts, tokens + [each for each in stop or () if isinstance(each, int)]


def prompt_logprobs(generator: Generator, model: str, prompt: list[int]) -> np.ndarray:
    """Return the log-probabilities [T] of the tokens of a prompt; the first has none (NaN)."""
    parts = [np.array([np.nan], np.float32)]
    registry = generator.registry
    entry = registry.lease(model)

    try:
        caches = make_prompt_cache(generator.base.model)
        step = generator.limits.prefill_chunk
        for start in range(0, len(prompt) - 1, step):
            targets = mx.array(prompt[start + 1 : start + 1 + step])
            inputs = mx.array([prompt[start : start + targets.size]])
            registry.slots.selection.set([entry.slot])
            logits = generator.base.model(inputs, cache=caches)[0].astype(mx.float32)
            scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            logprobs = mx.take_along_axis(scores, targets[:, None], axis=-1)[:, 0]
            mx.eval(logprobs, [cache.state for cache in caches])
            parts.append(np.array(logprobs))
    finally:
        registry.release(entry)

    return np.concatenate(parts)
