"""A conversation with a base: its messages, and the keys and values of its tokens."""

import os
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..bases.tokenizer import opens_thoughts, split_thoughts, thought_marks
from ..bases.turns import IMAGE_MARK
from ..config.sampling import Sampling
from ..data.messages import THOUGHTS
from ..vision.pictures import ImageSource
from .generate import PENALIZED_TOKENS, chat_prompt, reads_at_once, responses

if TYPE_CHECKING:
    from ..bases.model import BaseModel


def question(text: str, images: Sequence[Any] = ()) -> dict[str, Any]:
    """Return a message of the user, whose images come before its text.

    ``images`` are paths, URLs of data, or PIL images.
    """
    if not images:
        return {"role": "user", "content": text}
    return {
        "role": "user",
        "content": IMAGE_MARK * len(images) + text,
        "images": [ImageSource(image) for image in images],
    }


class ChatSession:
    """A conversation that goes on; ``messages`` have ``role`` and ``content``.

    ``system`` comes before all other messages, unless it is empty. ``variables`` of the chat
    template take precedence over the variables that a pack was trained with.
    """

    def __init__(
        self,
        base: "BaseModel",
        system: str = "",
        sampling: Sampling | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.base = base
        self.system = system
        self.sampling = sampling or Sampling()
        self._variables = variables or {}
        self.messages: list[dict[str, Any]] = []
        self.clear()

    def clear(self) -> None:
        """Begin again, after the system message."""
        self.messages = []
        self._attached: list[Any] = []
        if self.system:
            self.messages.append({"role": "system", "content": self.system})
        self.forget_keys()

    def forget_keys(self) -> None:
        """Compute the conversation anew at the next reply: the base has another pack."""
        self._cache: list[Any] | None = None
        self._tokens: list[int] = []  # whose keys and values the cache has, and the last one

    def attach(self, image: Any) -> None:
        """Add an image to the next message: a path, a URL of data, or a PIL image."""
        self._attached.append(image)

    def reply(self, text: str) -> Generator[str, None, None]:
        """Yield pieces of the answer to a message; both are part of the conversation then.

        An answer that is not taken to its end counts as far as it was taken. Its thoughts, whose
        opening mark comes first, are not part of its content.

        Raises a PackError if the chat template fails; the conversation stays as it was.
        """
        attached = self._attached
        self._attached = []  # a faulty image is not asked about again
        messages = [*self.messages, question(text, attached)]
        prompt = chat_prompt(self.base, messages, **self._variables)
        new = self._not_cached(prompt)

        tokenizer = self.base.tokenizer
        is_open = opens_thoughts(tokenizer, prompt)
        answer: list[str] = []
        try:
            if is_open:
                yield f"{thought_marks(tokenizer)[0]}\n"
            for response in responses(self.base, new, self.sampling, self._cache):
                self._tokens.append(response.token)
                answer.append(response.text)
                yield response.text
        finally:
            if answer:
                thoughts, content = split_thoughts(tokenizer, "".join(answer), is_open)
                message = {"role": "assistant", "content": content}
                if thoughts:
                    message |= dict.fromkeys(THOUGHTS, thoughts)
                self.messages = [*messages, message]

    def _not_cached(self, prompt: list[int]) -> list[int]:
        """Return the tokens of a prompt that the cache lacks, and take others out of it."""
        from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

        kept = 0
        cache = None if reads_at_once(self.base, prompt) else self._cache
        if cache and can_trim_prompt_cache(cache) and all(hasattr(c, "offset") for c in cache):
            cached = min(int(c.offset) for c in cache)
            seen = 1 if self.sampling.repetition_penalty == 1 else PENALIZED_TOKENS
            known = (self._tokens[:cached], prompt[:-seen])  # others mlx-lm is to be given
            kept = len(os.path.commonprefix(known))
            trim_prompt_cache(cache, cached - kept)
        else:
            self._cache = make_prompt_cache(self.base.model)

        self._tokens = list(prompt)
        return prompt[kept:]
