"""Chat templates: untrusted programs, rendered in a sandbox with limits of time and memory.

Some templates read the clock (Llama 3.2, gpt-oss, Granite); training stops it at a date.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import PackError, library_errors
from ..sandbox.process import TEMPLATES, Fault, LimitExceeded

CHARACTERS = 1 << 22  # that a template may produce in addition to 8 times its input
_TIMES_INPUT = 8
_REMEDY = "Use the template that the model's publisher has, or examples with 'text'."
_MEMORY_PER_CHARACTER = 16
_MOST_COST = 4000  # of one call, so that 2 s are enough for many conversations


def check_syntax(text: str, where: str) -> None:
    """Check that a template can be parsed; ``where`` is its file, for errors."""
    try:
        fault, _ = TEMPLATES.call("syntax_error", text)
    except LimitExceeded as error:
        raise PackError(f"{where}: the chat template {error}. {_REMEDY}", "unreadable") from None
    if fault is not None:
        raise PackError(f"{where}: the chat template is not valid Jinja: {fault}.", "unreadable")


@functools.lru_cache(maxsize=32)
def variables_of(text: str) -> frozenset[str]:
    """Return the names that a template reads and does not set itself."""
    try:
        names, _ = TEMPLATES.call("variables_of", text)
    except (LimitExceeded, Fault):  # whoever renders it says why
        return frozenset()
    return frozenset(names)


def unread_variables(tokenizer: Any, names: Iterable[str]) -> list[str]:
    """The names that no chat template of a tokenizer reads; none if it is not in Jinja."""
    templates = getattr(getattr(tokenizer, "_tokenizer", tokenizer), "chat_template", None)
    if isinstance(templates, str):
        templates = {"default": templates}
    if not templates or getattr(tokenizer, "_chat_template", None) is not None:
        return []
    read = frozenset().union(*map(variables_of, templates.values()))
    return [name for name in names if name not in read]


def template_file(tokenizer: Any) -> Path:
    if name := getattr(tokenizer, "_template_name", None):
        return Path(name)

    folder = Path(str(getattr(tokenizer, "name_or_path", "")))
    names = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
    for name in names:
        if (folder / name).is_file():
            return folder / name
    return folder / names[-1]


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping],
    template_date: str | None = None,
    **options: Any,
) -> str:
    """Return a conversation as a tokenizer's chat template renders it.

    ``template_date`` is where the template's clock stands, as YYYY-MM-DD, None for the present;
    ``options`` are for ``apply_chat_template``. Raises PackError: the template rejects this
    conversation (code ``data``), is none, or takes or does what it may not (``unreadable``).
    """
    asked = bool(options.pop("add_generation_prompt", False))
    whole = Beginnings(messages, [(len(messages), asked)], template_date, options)
    [[text]] = render_beginnings(tokenizer, [whole])
    if isinstance(text, PackError):
        raise text
    return text


def encode_rendered(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text of `render_chat`."""
    plain = getattr(tokenizer, "_tokenizer", tokenizer)
    with library_errors(functools.partial(_rejects, tokenizer)):
        return plain.encode(text, add_special_tokens=False)


@dataclass(frozen=True)
class Beginnings:
    """Beginnings of one conversation that are to be rendered, with arguments of `render_chat`."""

    messages: Sequence[Mapping]
    # of each rendering: how many messages, and ``add_generation_prompt``
    places: Sequence[tuple[int, bool]]
    template_date: str | None
    options: Mapping[str, Any]

    @cached_property
    def characters(self) -> int:
        """Characters of the user's input."""
        return _characters([self.messages, self.options])

    @property
    def cost(self) -> int:
        """Messages of all renderings, and another one for each 1,000 of their characters."""
        messages = sum(count for count, _ in self.places)
        return messages + len(self.places) * self.characters // 1000


def render_beginnings(
    tokenizer: Any, conversations: Sequence[Beginnings]
) -> list[list[str | PackError]]:
    """Return a text for each place, or the error of `render_chat`, by few calls of the sandbox."""
    results: list[list[str | PackError]] = []
    batch: list[Beginnings] = []
    for conversation in conversations:
        batch.append(conversation)
        if sum(each.cost for each in batch) > _MOST_COST:
            results += _rendered(tokenizer, batch)
            batch = []
    return results + _rendered(tokenizer, batch)


def _rendered(tokenizer: Any, batch: Sequence[Beginnings]) -> list[list[str | PackError]]:
    if (renderer := getattr(tokenizer, "_chat_template", None)) is not None:  # mlx-lm's own
        return [_by_function(tokenizer, renderer, each) for each in batch]

    with library_errors(functools.partial(_rejects, tokenizer)):
        calls = [_call(tokenizer, each) for each in batch]
    more_memory = _MEMORY_PER_CHARACTER * sum(each.characters for each in batch)
    try:
        results, _ = TEMPLATES.call("render", calls, more_memory=more_memory)
    except (LimitExceeded, Fault) as error:
        raise _faulty(tokenizer, str(error)) from None

    return [
        [_checked(tokenizer, kind, text, each.characters) for kind, text in texts]
        for each, texts in zip(batch, results, strict=True)
    ]


def _by_function(
    tokenizer: Any, renderer: Callable[..., str], conversation: Beginnings
) -> list[str | PackError]:
    texts: list[str | PackError] = []
    named = _named_options(tokenizer, conversation.options)
    for count, asked in conversation.places:
        options = {**named, "add_generation_prompt": asked}
        try:
            with library_errors(functools.partial(_rejects, tokenizer)):
                texts.append(renderer(list(conversation.messages[:count]), **options))
        except PackError as error:
            texts.append(error)
    return texts


def _call(tokenizer: Any, conversation: Beginnings) -> tuple:
    """Return the arguments of `sandbox.templates` for a conversation."""
    plain = getattr(tokenizer, "_tokenizer", tokenizer)
    options = _named_options(tokenizer, conversation.options)
    template = plain.get_chat_template(None, options.get("tools"))
    variables = {
        "tools": None,
        "documents": None,
        **plain.special_tokens_map,
        **options,
    }
    messages = list(conversation.messages)
    requests = [(count, {"add_generation_prompt": asked}) for count, asked in conversation.places]
    return template, messages, requests, variables, conversation.template_date


def _named_options(tokenizer: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with the template's own name for ``enable_thinking``."""
    name = getattr(tokenizer, "_thinking_kwarg", "enable_thinking")
    return {name if key == "enable_thinking" else key: value for key, value in options.items()}


def _checked(tokenizer: Any, kind: str, text: str, characters: int) -> str | PackError:
    """Return a rendered text, or the error of a rendering that failed."""
    if kind == "rejected":
        return _rejects(tokenizer, text.rstrip("."))
    if kind != "text":
        return _faulty(tokenizer, f"{_FAULTS[kind]}{text}".rstrip("."))

    limit = CHARACTERS + _TIMES_INPUT * characters
    if len(text) > limit:
        return _faulty(tokenizer, f"produces a text of more than {limit:,} characters")
    return text


_FAULTS = {
    "syntax": "is not valid Jinja ",
    "forbidden": "does what is not allowed: ",
    "endless": "does not come to an end",
}


def _faulty(tokenizer: Any, fault: str) -> PackError:
    where = template_file(tokenizer)
    return PackError(f"{where}: the chat template {fault}. {_REMEDY}", "unreadable")


def _rejects(tokenizer: Any, reason: str) -> PackError:
    fault = f"the chat template rejects this conversation: {reason}."
    return PackError(f"{template_file(tokenizer)}: {fault}", "data")


def _characters(value: Any) -> int:
    """Return the characters of all texts in lists and mappings."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_characters, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_characters, value))
    return 0


def reads_clock(tokenizer: Any) -> bool:
    return "strftime_now" in str(getattr(tokenizer, "chat_template", None))
