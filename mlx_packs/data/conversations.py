"""Conversations as the chat template renders them, and the positions of the answers in the text.

What is supervised is decided on the rendered text, never by encoding parts again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..bases.chat_template import render_chat
from ..errors import PackError
from .bad_rows import Reason, RowError

_SENTINEL = "\ue000\ue001\ue002"  # private use: in no template and no sane text

Span = tuple[int, int]  # of characters, the second excluded


@dataclass(frozen=True)
class Conversation:
    """Messages, the tools that they may call, and the tokenizer whose template renders them."""

    where: str  # the row that errors name
    messages: Sequence[Mapping]
    tools: list | None
    tokenizer: Any

    def _error(self, fault: str, reason: Reason, flag: str | None = None) -> RowError:
        return RowError(self.where, fault, reason, flag=flag)

    def render(self, messages: Sequence[Mapping], add_generation_prompt: bool = False) -> str:
        """Return the text of some messages, with the same tools."""
        if not messages:
            return ""
        return self._rendered(messages, tokenize=False, add_generation_prompt=add_generation_prompt)

    def prompt_tokens(self, messages: Sequence[Mapping]) -> list[int]:
        """Return the tokens of some messages, up to the assistant's next turn."""
        return self._rendered(messages, tokenize=True, add_generation_prompt=True)

    def _rendered(self, messages: Sequence[Mapping], **options: Any) -> Any:
        """Return the result of the chat template; an error that is about this row names it."""
        try:
            return render_chat(self.tokenizer, messages, tools=self.tools, **options)
        except PackError as error:
            if error.code != "data":
                raise
            raise self._error(error.message, "rejected by the chat template") from error

    def supervised(self, loss_on: str) -> tuple[str, list[Span]]:
        """Return the text, and the spans of it that are targets (none for ``all``)."""
        text = self.render(self.messages)
        if loss_on == "all":
            return text, []
        answers = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        if loss_on == "completion":
            return text, [(self._completion_start(text, answers), len(text))]
        if not answers:
            raise self._error("nothing to supervise: no message has role 'assistant'.", "no target")
        return text, [self._answer_span(i, text) for i in answers]

    def _completion_start(self, text: str, answers: list[int]) -> int:
        """Return where what follows the last prompt begins: mlx-lm's ``--mask-prompt``."""
        last = len(self.messages) - 1
        if answers == [0] == [last]:  # there is no prompt but the header of the answer
            return self._answer_span(0, text)[0]
        prompt = self.render(self.messages[:-1], add_generation_prompt=last in answers)
        if not text.startswith(prompt):
            raise self._error(
                "the chat template renders the prompt differently when the answer follows, so it "
                "cannot be told apart. Use --loss-on assistant.",
                "rejected by the chat template",
                "loss_on",
            )
        return len(prompt)

    def _answer_span(self, i: int, text: str) -> Span:
        """Return the position of answer ``i`` in the text, its end-of-turn token included.

        Where the template does not render a conversation as its beginning plus more (Qwen3 drops
        the thoughts of earlier turns), the answer is found by rendering another in its place.
        """

        def attempt(messages: Sequence[Mapping], **options: bool) -> str | None:
            try:
                return self.render(messages, **options)
            except RowError:  # some templates reject a part of a conversation
                return None

        messages = self.messages
        if i > 0:  # without a message before it, the header of the answer cannot be rendered
            before = attempt(messages[:i], add_generation_prompt=True)
            through = text if i + 1 == len(messages) else attempt(messages[: i + 1])
            if before and through and text.startswith(before) and text.startswith(through):
                if len(through) > len(before):
                    return len(before), len(before) + len(through[len(before) :].rstrip())
        bare = {"role": "assistant", "content": _SENTINEL}
        for other in (bare, {**messages[i], **bare}):  # without and with its tool calls
            changed = attempt([other if j == i else m for j, m in enumerate(messages)]) or ""
            start, sentinel, rest = changed.partition(_SENTINEL)
            if sentinel and text.startswith(start) and text.endswith(rest):
                if len(text) > len(start) + len(rest):
                    return len(start), len(text) - len(rest)
        raise self._error(
            f"the chat template does not show where answer {i} is. Use --loss-on completion "
            "or all.",
            "rejected by the chat template",
            "loss_on",
        )
