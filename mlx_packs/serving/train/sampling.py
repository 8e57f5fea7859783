"""Sampling by the Tinker protocol: its sessions, and tokens with their log-probabilities.

A sequence has the token that ended it, so that a model can be trained to end.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ...errors import PackError
from ...packs.pack import Pack
from ...runtime import mx
from ..answers import Choice, Texts
from ..fields import field_error, not_found
from ..generation import TextWorker
from ..http import ServerSettings
from ..prompts import CHARACTER_TOKENS, check_tokens
from ..registry import BASE_NAME
from ..request import Event, Progress, TextRequest, sampler_of
from .protocol import SampleBody
from .rows import MESSAGES
from .states import Saved, run_of

_BUSY_SECONDS = 0.2
_PREFIX = "tinker"  # of names in the registry, which other packs do not have
_SAVED = "saved"
_MOST_LOADED = 8  # saved models in memory, and steps of each model
_STOPPED = 0
_TOO_LONG = 1


class Samplers:
    """Sampling sessions on the base, on saved models, and on models as they were at some step.

    Their packs are served beside all others. The latest eight steps of each model are in memory,
    and the latest eight saved models.
    """

    def __init__(self, generator: TextWorker, settings: ServerSettings) -> None:
        self._generator = generator
        self._settings = settings
        self._sessions: dict[str, tuple[str, str | None]] = {}
        # names in the registry, by the id of the model of steps, or `_SAVED`
        self._loaded: dict[str, list[str]] = {}

    def find(self, session_id: str) -> tuple[str, str | None]:
        """Return the name of a session's pack in the registry, and its path if it is saved."""
        session = self._sessions.get(session_id)
        if session is None:
            reason = "is not known here. Make a new sampling client."
            raise not_found("sampling_session_id", session_id, reason)
        return session

    def of_base(self) -> str:
        return self._new(BASE_NAME)

    async def of_saved(self, saved: Saved) -> str:
        """Return the id of a new session on a saved model as it is now."""
        name = f"{_PREFIX}/{saved.run}/{saved.kind}/{saved.name}"
        await self._load(_SAVED, name, Pack.open(saved.folder))
        return self._new(name, saved.uri)

    async def of_step(self, model_id: str, pack: Pack, number: int) -> str:
        """Return the id of a new session on a model as it is now, whose weights ``pack`` has."""
        name = f"{_PREFIX}/{run_of(model_id)}/step-{number}"
        await self._load(model_id, name, pack)
        return self._new(name)

    async def _load(self, group: str, name: str, pack: Pack) -> None:
        """Serve a pack, and no longer the oldest of its group if that has too many."""
        names = [each for each in self._loaded.get(group, []) if each != name]
        removed = names[: max(0, len(names) + 1 - _MOST_LOADED)]
        self._loaded[group] = [*names[len(removed) :], name]

        def replace_packs() -> None:
            for each in (*removed, name):
                self._forget(each)
            self._generator.registry.add(name, pack)

        await self._generator.result_of(replace_packs)

    async def forget_steps(self, model_id: str) -> None:
        """Free the memory of all steps of a model."""
        for name in self._loaded.pop(model_id, []):
            await self._generator.result_of(partial(self._forget, name))

    def _new(self, name: str, uri: str | None = None) -> str:
        session_id = uuid.uuid4().hex
        self._sessions[session_id] = name, uri
        return session_id

    def _forget(self, name: str) -> None:
        if name in self._generator.registry.names:
            self._generator.registry.remove(name)

    def check(self, body: SampleBody) -> None:
        """Raise a PackError for a request that can never be computed."""
        prompt = body.prompt.tokens
        check_tokens(prompt, self._generator.base.vocab_size)
        self._generator.check_length(len(prompt), body.sampling_params.max_tokens or 1, "prompt")

        most = self._generator.limits.waiting
        if body.num_samples > most:
            text = f"asks for {body.num_samples} sequences, but only {most} may wait."
            raise field_error("num_samples", f"{text} Send several requests.")

    async def sample(self, body: SampleBody, model: str) -> bytes:
        """Return the message with the sequences that ``model`` of the registry continues with."""
        logprobs = None
        if body.prompt_logprobs:
            compute = partial(_prompt_logprobs, self._generator, model, body.prompt.tokens)
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
                return _output(sequences, logprobs)

    async def _sequences(self, body: SampleBody, model: str, deadline: float) -> Sequence[Choice]:
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

        return texts.choices

    def _request(
        self,
        body: SampleBody,
        model: str,
        deadline: float,
        i: int,
        on_event: Callable[[Event], None],
    ) -> TextRequest:
        params = body.sampling_params
        prompt = body.prompt.tokens
        seed = None if params.seed is None else params.seed + i
        room = self._generator.limits.context - len(prompt)
        default = max(1, min(self._settings.max_tokens, room))

        stop, stop_tokens = self._stops(params.stop)

        return TextRequest(
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


def _output(sequences: Sequence[Choice], logprobs: np.ndarray | None) -> bytes:
    """Return a SampleResponse; ``logprobs`` are of the prompt's tokens, if asked for."""
    message = MESSAGES.SampleResponse()
    for choice in sequences:
        reason = _STOPPED if choice.reason == "stop" else _TOO_LONG
        sequence = message.sequences.add(stop_reason=reason)
        tokens = [each.token for each in choice.logprobs]
        sequence.tokens = np.array(tokens, np.int32).tobytes()
        scores = [each.logprob for each in choice.logprobs]
        sequence.logprobs = np.array(scores, np.float32).tobytes()

    if logprobs is not None:
        message.prompt_logprobs = logprobs.astype(np.float32).tobytes()
    return message.SerializeToString()


def _prompt_logprobs(generator: TextWorker, model: str, prompt: list[int]) -> np.ndarray:
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
