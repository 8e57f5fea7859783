"""Turns of a conversation as a chat template writes them: what begins and what ends an answer.

A checkpoint's ``eos_token_id`` ends a text. A template may end an answer with another token, or
with none at all: the mark of the next speaker is then the end. A template may also ignore that a
prompt is asked for, or read contents as lists of parts only. Rendered probes show all of this.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import PackError
from .chat_template import Beginnings, encode_rendered, render_beginnings, render_chat
from .families import VISION_FAMILIES

IMAGE_MARK = "\ufffc"  # stands for an image in the text of a message
NO_IMAGES = (
    "the base takes no images: its config.json has no vision tower that is known. Use one of "
    f"these families: {', '.join(VISION_FAMILIES)}."
)
SENTINEL = "\ue000\ue001\ue002"  # private use: in no template and no sane text
_ASKED = "\ue003\ue004\ue005"
_SYSTEM = {"role": "system", "content": "a"}
_QUESTION = {"role": "user", "content": _ASKED}
_ANSWER = {"role": "assistant", "content": SENTINEL}
_CALL_ID = "call00001"  # Mistral's templates want nine letters or digits
_CALL = {
    "id": _CALL_ID,
    "type": "function",
    "function": {"name": SENTINEL, "arguments": {"a": "b"}},
}
_TOOL = {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}
_RESULT = {"role": "tool", "content": "a", "name": SENTINEL, "tool_call_id": _CALL_ID}


@dataclass(frozen=True)
class AnswerEnd:
    """What ends an answer of a chat template."""

    token: int | None = None  # the one behind an answer; None if the template shows none
    text: str = ""  # of the token
    is_written: bool = True  # behind the last answer of a conversation, too
    others: tuple[int, ...] = ()  # tokens that end other answers: those that call a tool
    is_known: bool = True  # if the template does not render the probe, the token is EOS

    @property
    def missing(self) -> str:
        """The text that training puts behind the last answer; empty if the template writes it."""
        return "" if self.is_written else self.text

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens at which generation stops."""
        return self.others if self.token is None else (self.token, *self.others)


@dataclass(frozen=True)
class TurnStyle:
    """How a chat template reads and writes turns."""

    end: AnswerEnd
    takes_parts: bool = False  # whether contents are shown only as lists of parts
    # whether it ignores ``add_generation_prompt``, although it writes a header before an answer
    needs_header: bool = False
    opening: tuple[str, ...] = ()  # added tokens before a question, as texts
    header: str = ""  # the text before a question, without these tokens
    between: str = ""  # the text between a question and its answer

    def mark_around(self, role: str, text: str) -> str | None:
        """The mark around a turn that its text already has, too; None if the text is plain."""
        text = text.strip()
        ends = self.end.is_written and self.end.text
        if role == "assistant" and ends and text.endswith(ends):
            return self.end.text
        has_header = self.header and self.between and text.startswith(self.header)
        if has_header and text.removeprefix(self.header).endswith(self.between):
            return self.header

        for mark in self.opening:
            if text.startswith(mark):
                return mark
        return None


def turn_style(tokenizer: Any) -> TurnStyle:
    """Rendered once per template."""
    plain = getattr(tokenizer, "_tokenizer", tokenizer)
    template = getattr(plain, "chat_template", None)
    known_template, style = getattr(tokenizer, "_turn_style", (None, None))
    if style is None or known_template != template:
        style = _turn_style(tokenizer)
        tokenizer._turn_style = template, style
    return style


def answer_end(tokenizer: Any) -> AnswerEnd:
    """What ends an answer: the first added token after it, else the next turn's mark, else EOS."""
    return turn_style(tokenizer).end


def stop_at_answer_end(tokenizer: Any) -> None:
    """Let generation stop at what ends an answer, in addition to what ends a text."""
    ends = answer_end(tokenizer).tokens
    tokenizer._unnamed_ends = [end for end in ends if end not in tokenizer.eos_token_ids]
    tokenizer.eos_token_ids = {*tokenizer.eos_token_ids, *ends}


def unnamed_ends(tokenizer: Any) -> list[int]:
    """Tokens that end an answer and that neither config nor tokenizer names as EOS."""
    return getattr(tokenizer, "_unnamed_ends", [])


def answer_end_note(tokenizer: Any) -> str:
    """A line on an answer's end that does not end a text; empty if nothing is unusual."""
    if not getattr(tokenizer, "has_chat_template", False):
        return ""

    end = answer_end(tokenizer)
    if end.token is None:
        return (
            "the chat template shows no token that ends an answer, and the tokenizer has none: "
            "generation stops only at --max-tokens. Set eos_token in tokenizer_config.json"
        )

    if not end.is_known:
        return (
            "the chat template rejects a plain question with its answer, so that what ends an "
            "answer is unknown: generation stops at eos_token_id. Name all ends in config.json"
        )
    if not end.is_written:
        return (
            f"the chat template does not end the last answer: {end.text} is put behind it, "
            "and generation stops there"
        )

    if unnamed := unnamed_ends(tokenizer):
        texts = " or ".join(tokenizer.decode([token]) for token in unnamed)
        return (
            f"an answer ends with {texts}, which eos_token_id does not name: "
            "generation stops there, too"
        )
    return ""


def given_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of a chat template without None, which stands for one that is not given."""
    return {name: value for name, value in variables.items() if value is not None}


def render_conversation(
    tokenizer: Any,
    messages: Sequence[Mapping],
    template_date: str | None = None,
    **options: Any,
) -> str:
    """Return a conversation as `render_chat` does, the same in training and in use.

    Contents have the form that the template reads. A prompt ends with the header of the answer,
    even if the template ignores ``add_generation_prompt``. A variable that is None is left out.
    """
    asked = bool(options.pop("add_generation_prompt", False))
    whole = Beginnings(messages, [(len(messages), asked)], template_date, options)
    [[text]] = render_prefixes(tokenizer, [whole])
    if isinstance(text, PackError):
        raise text
    return text


def encode_conversation(
    tokenizer: Any,
    messages: Sequence[Mapping],
    template_date: str | None = None,
    **options: Any,
) -> list[int]:
    """Return the tokens of `render_conversation`; tokens of an image name its features."""
    text = render_conversation(tokenizer, messages, template_date, **options)
    if sources := image_sources(messages):
        return _prompt_with_images(tokenizer, text, sources)
    return encode_rendered(tokenizer, text)


def render_prefixes(
    tokenizer: Any, conversations: Sequence[Beginnings]
) -> list[list[str | PackError]]:
    """Return a text for each place of conversations, or the error of `render_conversation`."""
    style = turn_style(tokenizer)
    beginnings = [
        replace(each, messages=_turns(each.messages, style), options=given_variables(each.options))
        for each in conversations
    ]
    results = render_beginnings(tokenizer, beginnings)
    if not style.needs_header:
        return results

    for each, texts in zip(beginnings, results, strict=True):
        options = {**each.options, "template_date": each.template_date}
        for place, (count, asked) in enumerate(each.places):
            if asked:
                before = _before_answer(tokenizer, list(each.messages[:count]), style, options)
                texts[place] = texts[place] if before is None else before
    return results


def images_of(tokenizer: Any) -> Any:
    """Return the `vision.images.Images` of a tokenizer; None if its base takes none."""
    return getattr(tokenizer, "_images", None)


def why_no_trees(tokenizer: Any) -> str | None:
    """Return why rows with images that begin alike are no trees, in a line; None if they are."""
    images = images_of(tokenizer)
    return None if images is None else images.why_no_trees


def image_sources(messages: Sequence[Mapping]) -> list[Any]:
    """Return the images of messages, in the order in which they appear."""
    return [source for message in messages for source in message.get("images") or ()]


def _prompt_with_images(tokenizer: Any, text: str, sources: Sequence[Any]) -> list[int]:
    """Return the tokens of a rendered prompt; a fault of an image is an error of the prompt."""
    images = images_of(tokenizer)
    if images is None:
        raise PackError(f"{tokenizer.name_or_path}: {NO_IMAGES}", "unsupported")
    try:
        return images.prompt(tokenizer, text, sources)
    except ValueError as error:
        raise PackError(f"the prompt: {error}", "data") from None


def _turns(messages: Sequence[Mapping], style: TurnStyle) -> list[Mapping]:
    turns = [_with_image_parts(message) for message in messages]
    if style.takes_parts:
        turns = [_in_parts(message) for message in turns]
    return turns


def _with_image_parts(message: Mapping) -> Mapping:
    """Return a message whose images are parts of its content, as chat templates read them."""
    if not message.get("images"):
        return message

    parts: list[dict] = []
    for number, text in enumerate(message["content"].split(IMAGE_MARK)):
        if number:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    own = {key: value for key, value in message.items() if key != "images"}
    return {**own, "content": parts}


def _before_answer(
    tokenizer: Any, turns: list[Mapping], style: TurnStyle, options: Mapping[str, Any]
) -> str | None:
    """The text before the next answer, header included; None if the template rejects one."""
    answer = _ANSWER
    if style.takes_parts:
        answer = _in_parts(answer)

    options = {**options, "add_generation_prompt": False}
    try:
        text = render_chat(tokenizer, [*turns, answer], **options)
    except PackError as error:
        if error.code != "data":
            raise
        return None

    prompt, sentinel, _ = text.partition(SENTINEL)
    return prompt if sentinel else None


def _in_parts(message: Mapping) -> Mapping:
    content = message.get("content")
    if not isinstance(content, str):
        return message

    parts = []
    if content:
        parts.append({"type": "text", "text": content})
    return {**message, "content": parts}


def _turn_style(tokenizer: Any) -> TurnStyle:
    if not tokenizer.has_chat_template:
        return TurnStyle(AnswerEnd(tokenizer.eos_token_id))

    unknown = TurnStyle(AnswerEnd(tokenizer.eos_token_id, is_known=False))
    second_choice = None
    for takes_parts in (False, True):
        for opening in ([_QUESTION], [_SYSTEM, _QUESTION]):
            probe = _Probe(tokenizer, opening, takes_parts)
            try:
                text = probe.render([_ANSWER])
            except PackError as error:  # it is raised again where a conversation is rendered
                if error.code != "data":
                    return unknown
                continue

            if SENTINEL in text and _ASKED in text:
                return _style_of(probe)
            if SENTINEL in text and second_choice is None:
                second_choice = probe

    if second_choice is None:
        return unknown
    return _style_of(second_choice)


@dataclass(frozen=True)
class _Probe:
    """Renders what may follow the opening of a conversation that the template takes."""

    tokenizer: Any
    opening: list[dict]
    takes_parts: bool

    def render(self, messages: Sequence[Mapping], **options: Any) -> str:
        turns: list[Mapping] = [*self.opening, *messages]
        if self.takes_parts:
            turns = [_in_parts(message) for message in turns]
        return render_chat(self.tokenizer, turns, **options)

    def try_to_render(self, messages: Sequence[Mapping], **options: Any) -> str | None:
        """None if the template rejects the messages."""
        try:
            return self.render(messages, **options)
        except PackError:
            return None

    def behind(self, *messages: Mapping) -> str:
        """The text behind the first sentinel; empty if there is none."""
        text = self.try_to_render(messages) or ""
        return text.partition(SENTINEL)[2].strip()

    def encode(self, text: str) -> list[int]:
        """Tokens of a text without the white space around it."""
        text = text.strip()
        return self.tokenizer.encode(text, add_special_tokens=False) if text else []


def _style_of(probe: _Probe) -> TurnStyle:
    end = _answer_end(probe)
    others = tuple(token for token in _call_ends(probe) if token != end.token)
    end = replace(end, others=others)

    before, asked, rest = probe.render([_ANSWER]).partition(SENTINEL)[0].partition(_ASKED)
    if not asked:
        return TurnStyle(end, probe.takes_parts, _needs_header(probe))

    tokenizer = probe.tokenizer
    marks = _marks(tokenizer)
    opening = [tokenizer.decode([token]) for token in probe.encode(before) if token in marks]
    texts = tuple(text for text in dict.fromkeys(opening) if text.strip())
    for text in texts:
        before = before.replace(text, "")

    around = {"opening": texts, "header": before.strip(), "between": rest.strip()}
    return TurnStyle(end, probe.takes_parts, _needs_header(probe), **around)


def _answer_end(probe: _Probe) -> AnswerEnd:
    tokenizer = probe.tokenizer
    marks = _marks(tokenizer)
    for token in probe.encode(probe.behind(_ANSWER)):
        if token in marks:
            return AnswerEnd(token, tokenizer.decode([token]))

    token = tokenizer.eos_token_id
    tokens = probe.encode(probe.behind(_ANSWER, _QUESTION))
    if tokens and tokens[0] in marks:
        token = tokens[0]
    if token is None:
        return AnswerEnd()
    return AnswerEnd(token, tokenizer.decode([token]), is_written=False)


def _call_ends(probe: _Probe) -> list[int]:
    """What ends an answer that calls a tool: a token that does not also stand between calls.

    If the template writes none, it is the mark that the result of the call starts with.
    """
    call = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    calls = {**call, "tool_calls": [_CALL, _CALL]}  # which not every template takes
    for tools, message in itertools.product((None, [_TOOL]), (calls, call)):
        text = probe.try_to_render([message], tools=tools) or ""
        if text.count(SENTINEL) >= len(message["tool_calls"]):
            break
    else:
        return []

    _, *between, behind = text.split(SENTINEL)
    names = ("tool_call_start", "tool_call_end")  # by which mlx-lm's parser reads calls
    parsed = "".join(getattr(probe.tokenizer, name, None) or "" for name in names)
    inside = {*probe.encode("".join(between)), *probe.encode(parsed)}
    ends = _marks(probe.tokenizer) - inside

    written = [token for token in probe.encode(behind) if token in ends]
    if written:
        return written[-1:]

    before = text.rstrip()
    text = probe.try_to_render([message, _RESULT], tools=tools) or ""
    follows = probe.encode(text.removeprefix(before)) if text.startswith(before) else []
    return [token for token in follows[:1] if token in ends]


def _needs_header(probe: _Probe) -> bool:
    """Whether a prompt, when asked for, lacks the header that the template writes."""
    plain, prompt = (
        probe.try_to_render([], add_generation_prompt=asked) for asked in (False, True)
    )
    if plain is None or plain != prompt:
        return False

    before = probe.render([_ANSWER]).partition(SENTINEL)[0]
    header = before.removeprefix(plain.rstrip())
    return header != before and bool(header.strip())


def _marks(tokenizer: Any) -> set[int]:
    """Tokens that may be marks of a template: special or only added."""
    added = getattr(tokenizer._tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *tokenizer.eos_token_ids, *added}
