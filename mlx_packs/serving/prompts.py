"""Bodies of requests as tokens and images, and as what the worker computes.

Images are read and decoded by threads of requests. Their features are computed between two steps
by the thread that computes texts, and are in the memory of the server.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as Late
from functools import partial
from typing import Any

from mlx_lm.sample_utils import make_logits_processors

from ..bases.model import BaseModel
from ..bases.turns import NO_IMAGES, given_variables, images_of
from ..config.data import renderer_argument
from ..errors import PackError
from ..inference.generate import (
    PENALIZED_TOKENS,
    chat_prompt,
    check_end,
    raw_prompt,
    seeing_no_images,
)
from ..vision.pictures import open_picture
from .fields import field_error
from .generation import TextWorker
from .grammar import Grammars
from .protocol import ChatBody, CompletionBody, GenerationBody
from .request import Event, MakeRequest, Processor, TextRequest, first_state, sampler_of

_NO_LAYOUT: Mapping[str, Any] = {}
MOST_IMAGES = 64  # of one request
_MOST_BYTES = 1 << 30  # of features in memory when a request begins


class RequestPrompts:
    """Makes requests of one base.

    Args:
        base: a decoder.
        max_tokens: default length of an answer; less if the context ends before.
        context: tokens of prompt and answer together.
    """

    def __init__(self, base: BaseModel, max_tokens: int, context: int) -> None:
        self._base = base
        self._max_tokens = max_tokens
        self._context = context
        self._grammars = Grammars(base.tokenizer, base.vocab_size)

    def of_chat(
        self,
        body: ChatBody,
        defaults: Mapping[str, Any] | None = None,
        images: Sequence[Any] = (),
        layout: Mapping[str, Any] = _NO_LAYOUT,
        tokenizer: Any = None,
    ) -> list[int]:
        """Return the tokens of a conversation; a PackError if the template cannot render it.

        ``images`` are from `read_images`. The ``opening`` of JSON in the ``layout``
        of a pack ends the prompt of an answer that is JSON. ``tokenizer`` is the model's.
        """
        tokenizer = tokenizer or self._base.tokenizer
        variables = body.chat_template_kwargs or {}
        if taken := renderer_argument(variables):
            text = f"{taken} is not a variable of the template."
            raise field_error("chat_template_kwargs", text)

        tools = None
        if body.usable_tools:
            if not tokenizer.has_tool_calling:
                text = f"the chat template of {self._base.name} has none."
                raise field_error("tools", text, "unsupported")
            tools = [tool.to_template() for tool in body.usable_tools]

        messages = [message.to_template() for message in body.messages]
        remaining = iter(images)
        for message in messages:
            if "images" in message:
                message["images"] = [next(remaining) for _ in message["images"]]

        variables = {**(defaults or {}), **given_variables(variables)}
        prompt = chat_prompt(self._base, messages, tools, tokenizer, **variables)
        if images:
            check_end(prompt)
        if body.is_json and "opening" in layout:
            prompt += tokenizer.encode(layout["opening"], add_special_tokens=False)
        self._checked([token for token in prompt if not images or token >= 0])
        return prompt

    def of_texts(self, body: CompletionBody) -> list[list[int]]:
        if body.prompt and isinstance(body.prompt[0], int):
            return [self._checked(list(body.prompt))]
        return [self._checked(raw_prompt(self._base, text)) for text in body.prompt]

    def chat_maker(
        self,
        body: ChatBody,
        prompt: list[int],
        deadline: float,
        images: Sequence[Any] = (),
        layout: Mapping[str, Any] = _NO_LAYOUT,
        tokenizer: Any = None,
    ) -> MakeRequest:
        tokenizer = tokenizer or self._base.tokenizer
        state: str | None = first_state(tokenizer, prompt)
        if not self._base.tokenizer.has_thinking:  # answers would contain the thoughts
            layout = {**layout, "thoughts": False}
        grammar = None
        if body.is_json:
            grammar = self._grammars.check(body.answer_schema, layout, state)
            if state == "normal" and not layout.get("thoughts"):
                state = None

        def make(i: int, on_event: Callable[[Event], None]) -> TextRequest:
            processors = self._processors(body)
            if grammar is not None:
                processors.append(self._grammars.processor(grammar, len(prompt)))

            limit = body.max_completion_tokens or body.max_tokens or self._default(prompt)
            top = body.top_logprobs or 0 if body.logprobs else None
            return TextRequest(
                body.model,
                prompt,
                limit,
                on_event,
                **self._choosing(body, i),
                processors=processors,
                state=state,
                one_call=not body.parallel_tool_calls,
                top_logprobs=top,
                deadline=deadline,
                tokenizer=tokenizer,
                images=images,
            )

        return make

    def text_maker(
        self, body: CompletionBody, prompts: Sequence[list[int]], deadline: float
    ) -> MakeRequest:
        def make(i: int, on_event: Callable[[Event], None]) -> TextRequest:
            return TextRequest(
                body.model,
                prompts[i],
                body.max_tokens or self._default(prompts[i]),
                on_event,
                **self._choosing(body, i),
                processors=self._processors(body),
                after=prompts[i][-CHARACTER_TOKENS:],
                deadline=deadline,
            )

        return make

    def _default(self, prompt: list[int]) -> int:
        return max(1, min(self._max_tokens, self._context - len(prompt)))

    def _choosing(self, body: GenerationBody, i: int) -> dict[str, Any]:
        seed = None if body.seed is None else body.seed + i
        chosen = (body.temperature, body.top_p, body.top_k, body.min_p, seed)
        return {"sampler": lambda: sampler_of(*chosen), "stop": body.stop}

    def _processors(self, body: GenerationBody) -> list[Processor]:
        bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
        if beyond := [token for token in bias if token >= self._base.vocab_size]:
            raise field_error("logit_bias", f"token {beyond[0]} is unknown.")

        repetition = body.repetition_penalty
        penalties = make_logits_processors(
            logit_bias=bias or None,
            repetition_penalty=None if repetition == 1 else repetition,
            repetition_context_size=PENALIZED_TOKENS,
            presence_penalty=body.presence_penalty or None,
            presence_context_size=_ALL,
            frequency_penalty=body.frequency_penalty or None,
            frequency_context_size=_ALL,
        )
        return seeing_no_images(self._base, penalties)

    def _checked(self, prompt: list[int]) -> list[int]:
        check_tokens(prompt, self._base.vocab_size)
        return prompt


def check_tokens(prompt: list[int], vocab_size: int) -> None:
    """Raise a PackError for a prompt without a token, or with one beyond the vocabulary."""
    if not prompt:
        raise field_error("prompt", "has no token.")
    if max(prompt) >= vocab_size or min(prompt) < 0:
        raise field_error("prompt", f"a token lies beyond the vocabulary of {vocab_size}.")


def read_images(worker: TextWorker, body: ChatBody, allow_urls: bool, deadline: float) -> list[Any]:
    """Return the images of a body in their order; a fault of one is a PackError.

    They exist as long as the caller, or a prompt that is computed, holds them. No path is ever
    read, and HTTP URLs only with ``allow_urls``.
    """
    sources = {
        f"messages.{i}.content.{j}": source
        for i, message in enumerate(body.messages)
        for j, source in message.images.items()
    }
    images = images_of(worker.base.tokenizer)
    if images is None:
        raise field_error("messages", f"{worker.base.name}: {NO_IMAGES}", "unsupported")
    if len(sources) > MOST_IMAGES:
        text = f"have {len(sources)} images, but {MOST_IMAGES} is the most. Send fewer."
        raise field_error("messages", text)
    if images.nbytes > _MOST_BYTES:
        raise PackError("The images that wait need too much memory. Try again later.", "busy")

    read = []
    for place, source in sources.items():
        _check_url(place, source.value, allow_urls)
        try:
            picture = open_picture(source, allow_urls)
            future = worker.call(partial(images.add, picture))
            read.append(future.result(max(0.0, deadline - time.monotonic())))
        except ValueError as error:
            raise field_error(place, str(error), "data") from None
        except Late:
            future.cancel()
            raise PackError("The request took too long.", "timeout") from None
    return read


def _check_url(place: str, url: str, allow_urls: bool) -> None:
    """Raise a PackError for what a client may not let this machine read."""
    if url[:5].lower() == "data:":
        return
    if allow_urls and re.match("https?://", url, re.IGNORECASE):
        return

    remedy = "Send the image itself, or start the server with --allow-urls for HTTP URLs."
    if allow_urls:
        remedy = "Send the image itself, or its HTTP URL."
    text = f"an image must be a data: URL, as data:image/png;base64,…. {remedy}"
    raise field_error(place, text, "data")


CHARACTER_TOKENS = 4  # at most, since a character has at most four bytes
_ALL = 1 << 20  # tokens that OpenAI's penalties look back on: the whole text
