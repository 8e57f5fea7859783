"""Chat templates: untrusted programs, rendered within limits of time and size.

transformers renders them in jinja's sandbox, which keeps them from running other code. Here the
same environment counts as well: every turn of a loop and every call takes from a budget of CPU
time, and every text and list that a template makes is checked before it is created.

Some templates read the clock (Llama 3.2, gpt-oss, Granite); training stops it at a date.
"""

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from types import GeneratorType
from typing import Any, Literal, overload

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.environment import Template
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ..errors import PackError, library_errors, reason_of

SECONDS = 2.0  # of CPU time for one conversation
CHARACTERS = 1 << 22  # that a template may produce, beside its input
_TIMES_GIVEN = 8  # the limit grows by so many times the input
_ITEM = 8  # an entry of a list counts as so many characters
_TICKS = 256  # between two readings of the clock
_CHARACTERS_A_TICK = 1 << 13  # what an operation on so many takes is one more
_INTEGER_BITS = 1 << 16
_STOPPED_AT: ContextVar[datetime | None] = ContextVar("stopped_at", default=None)
_REMEDY = "Take the template that the model's publisher has, or examples with 'text'."
# Methods of texts, and filters, whose result can be far longer than what goes in.
_PADS = frozenset(("center", "ljust", "rjust", "zfill"))
_FORMATS = frozenset(("format", "format_map"))
_GROWS = frozenset("batch expandtabs indent slice tojson translate urlize wordwrap xmlattr".split())
_GROWTH = 16  # of these: by so much less than what goes in times what they are given


class _LimitReached(Exception):  # noqa: N818
    """A template takes too long or produces too much."""


class _Meter:
    """The remaining budget of one rendering.

    Args:
        given: characters of what the template is given.
    """

    def __init__(self, given: int) -> None:
        self.limit = CHARACTERS + _TIMES_GIVEN * given
        self._deadline: float | None = None  # the clock is slow; most conversations need no reading
        self._left = _TICKS

    def tick(self, ticks: int = 1) -> None:
        """Count a turn of a loop, a call, or a piece of text."""
        self._left -= ticks
        if self._left >= 0:
            return

        self._left = _TICKS
        now = time.thread_time()
        if self._deadline is None:
            self._deadline = now + SECONDS
        elif now > self._deadline:
            raise _LimitReached(f"takes more than {SECONDS:.0f} seconds")

    def check_size(self, size: int) -> None:
        """Check a number of characters before they are created."""
        if size > self.limit:
            raise _LimitReached(f"produces a text or list of more than {self.limit:,} characters")
        self.tick(size // _CHARACTERS_A_TICK)

    def checked(self, value: Any) -> Any:
        if isinstance(value, str):
            size = len(value)
        else:
            size = _weight(value, self.limit)

        self.check_size(size)
        return value


_METER: ContextVar[_Meter | None] = ContextVar("meter", default=None)


def _meter() -> _Meter:
    return _METER.get() or _Meter(0)


def _weight(value: Any, limit: float = float("inf")) -> int:
    """The characters of a value; parts that occur twice count twice. Stops above a limit."""
    total = 0
    rest = [value]
    while rest and total <= limit:
        part = rest.pop()
        if isinstance(part, str):
            total += len(part)
        elif isinstance(part, Mapping):
            total += _ITEM * len(part)
            rest += [*part.keys(), *part.values()]
        elif isinstance(part, (list, tuple)):
            total += _ITEM * len(part)
            if total <= limit:
                rest += part
        elif isinstance(part, Namespace):
            rest.append(object.__getattribute__(part, "_Namespace__attrs"))
        else:
            total += _ITEM

    return total


class _CodeGenerator(CodeGenerator):
    """Compiles templates so that loops, lists and joined texts are counted."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802
        tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        node.set_environment(self.environment)
        super().visit_For(node, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        self._checked(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self._checked(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        if node.ctx == "load":
            self._checked(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def _checked(self, visit: Callable, node: nodes.Expr, frame: Frame) -> None:
        self.write("environment.checked(")
        visit(node, frame)
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox of transformers, which counts what a template uses."""

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    @classmethod
    def like(cls, environment: ImmutableSandboxedEnvironment) -> "_Environment":
        copy = object.__new__(cls)
        vars(copy).update(vars(environment), overlayed=True, linked_to=environment)
        copy.extensions = {name: e.bind(copy) for name, e in environment.extensions.items()}
        copy.filters = {name: _metered(name, f) for name, f in environment.filters.items()}
        copy.globals = {k: v for k, v in environment.globals.items() if k != "lipsum"}
        copy.globals["strftime_now"] = strftime_now
        return copy

    @staticmethod
    def tick() -> None:
        _meter().tick()

    @staticmethod
    def checked(value: Any) -> Any:
        return _meter().checked(value)

    @staticmethod
    def concat(parts: Iterator[str]) -> str:
        meter = _meter()
        total = 0
        pieces = []
        for part in parts:
            total += len(part)
            meter.check_size(total)
            pieces.append(part)
        return "".join(pieces)

    @staticmethod
    def joined(parts: tuple) -> str:
        texts = [str(part) for part in parts]
        _meter().check_size(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = _meter()
        meter.tick()

        if operator == "*":
            for one, times in ((left, right), (right, left)):
                if isinstance(one, (str, list, tuple)) and isinstance(times, int):
                    meter.check_size(max(0, times) * _weight(one))

        if operator == "%" and isinstance(left, str):
            _check_format(meter, left, right)

        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() + right.bit_length()
            if operator == "**" and abs(left) > 1:
                bits = left.bit_length() * abs(right)
            if bits > _INTEGER_BITS:
                raise _LimitReached(f"produces an integer of more than {_INTEGER_BITS:,} bits")

        return meter.checked(super().call_binop(context, operator, left, right))

    def call(
        __self,  # noqa: N805
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        meter = _meter()
        meter.tick()
        method = getattr(__obj, "__wrapped__", __obj)
        subject = getattr(method, "__self__", None)
        if isinstance(subject, str):
            _check_text(meter, method.__name__, subject, args, kwargs)
        return meter.checked(super().call(__context, __obj, *args, **kwargs))


def _metered(name: str, function: Callable) -> Callable:
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context, before the value

    @functools.wraps(function)
    def metered(*args: Any, **kwargs: Any) -> Any:
        meter = _meter()
        meter.tick()

        before = args[:skipped]
        value, *rest = args[skipped:]
        if isinstance(value, GeneratorType):
            value = _listed(meter, value)

        if name == "join":
            separator = str(rest[0] if rest else kwargs.get("d", ""))
            items = 0
            if isinstance(value, Sized):
                items = len(value)
            meter.check_size(_weight(value, meter.limit) + len(separator) * items)
        else:
            _check_text(meter, name, value, rest, kwargs)

        return meter.checked(function(*before, value, *rest, **kwargs))

    return metered


def _listed(meter: _Meter, items: Iterator) -> list:
    """The result of a generating filter, such as map, as a list."""
    kept = []
    total = 0
    for item in items:
        meter.tick()
        total += _ITEM + _weight(item, meter.limit)
        meter.check_size(total)
        kept.append(item)
    return kept


def _check_text(
    meter: _Meter, name: str, subject: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Check how much a method of a text, or a filter, would produce."""
    arguments = [*args, *kwargs.values()]

    if name == "replace" and len(arguments) > 1 and isinstance(subject, str):
        old = str(arguments[0])
        new = str(arguments[1])
        meter.check_size(len(subject) + subject.count(old) * len(new))
    elif name == "join" and arguments and isinstance(arguments[0], (list, tuple)):
        meter.check_size(_weight(arguments[0]) + len(subject) * len(arguments[0]))
    elif name in _PADS:
        meter.check_size(max((n for n in arguments if isinstance(n, int)), default=0))
    elif name in _FORMATS and isinstance(subject, str):
        _check_format(meter, subject, arguments)
    elif name in _GROWS:
        sizes = (abs(n) if isinstance(n, int) else _weight(n, meter.limit) for n in arguments)
        meter.check_size(_weight(subject, meter.limit) * max(sizes, default=0) // _GROWTH)


def _check_format(meter: _Meter, text: str, arguments: Any) -> None:
    """Check the result of a format string: each place may take all arguments."""
    if re.search(r"\d{7}|%[^%a-zA-Z]*\*", text):
        raise _LimitReached("formats numbers with too many digits")
    places = text.count("%") + text.count("{")
    meter.check_size(len(text) + places * _weight(arguments, meter.limit))


@functools.lru_cache(maxsize=32)
def _compiled(text: str) -> Template:
    compiler = _plain()
    environment = _Environment.like(compiler("").environment)
    return environment.from_string(text)


@functools.cache
def _plain() -> Callable[[str], Template]:
    """The compiler of transformers, which from then on is ours inside `_metering`."""
    from importlib import metadata

    from transformers.utils import chat_template_utils

    compiler = getattr(chat_template_utils, "_compile_jinja_template", None)
    if compiler is None:
        raise PackError(
            f"transformers {metadata.version('transformers')}: chat templates cannot be limited "
            "with it. Install transformers 5.",
            "dependency",
        )

    @functools.wraps(compiler)
    def dispatch(text: str) -> Template:
        if _METER.get() is None:
            return compiler(text)
        return _compiled(text)

    chat_template_utils._compile_jinja_template = dispatch
    return compiler


@contextmanager
def _metering(given: int) -> Iterator[None]:
    """Count what templates rendered inside use."""
    _plain()
    token = _METER.set(_Meter(given))
    try:
        yield
    finally:
        _METER.reset(token)


def check_syntax(text: str, where: str) -> None:
    """Check that a template can be parsed; ``where`` is its file, for errors."""

    def faulty(reason: str) -> PackError:
        return PackError(f"{where}: the chat template is not valid Jinja: {reason}.", "unreadable")

    with library_errors(faulty):
        try:
            _compiled(text)
        except (MemoryError, RecursionError):
            raise faulty("it is nested too deep") from None


@functools.lru_cache(maxsize=32)
def variables_of(text: str) -> frozenset[str]:
    """The names that a template reads and does not set itself."""
    return frozenset(find_undeclared_variables(_compiled(text).environment.parse(text)))


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


@overload
def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping],
    *,
    tokenize: Literal[False],
    template_date: str | None = None,
    **options: Any,
) -> str: ...
@overload
def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping],
    *,
    tokenize: Literal[True],
    template_date: str | None = None,
    **options: Any,
) -> list[int]: ...
def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping],
    *,
    tokenize: bool,
    template_date: str | None = None,
    **options: Any,
) -> str | list[int]:
    """Return a conversation as a tokenizer's chat template renders it: its text, or its tokens.

    Args:
        tokenizer: as mlx-lm wraps it.
        messages: mappings with ``role`` and ``content``.
        tokenize: whether tokens are returned.
        template_date: where the template's clock stands, as YYYY-MM-DD; None for the present.
        options: of ``apply_chat_template``: ``tools``, ``add_generation_prompt`` and others.

    Raises:
        PackError: the template rejects this conversation (code ``data``); or it is no template,
            takes too long, makes too much, or does what the sandbox forbids (``unreadable``).
    """

    def faulty(fault: str) -> PackError:
        where = template_file(tokenizer)
        return PackError(f"{where}: the chat template {fault}. {_REMEDY}", "unreadable")

    def rejects(reason: str) -> PackError:
        fault = f"the chat template rejects this conversation: {reason}."
        return PackError(f"{template_file(tokenizer)}: {fault}", "data")

    weight = _weight([messages, options.get("tools")])
    with library_errors(rejects), _metering(weight), clock_at(template_date):
        try:
            return _applied(tokenizer, list(messages), tokenize, options)
        except _LimitReached as error:
            raise faulty(str(error)) from None
        except TemplateSyntaxError as error:
            raise faulty(f"is not valid Jinja in line {error.lineno}: {reason_of(error)}") from None
        except SecurityError as error:
            raise faulty(f"does what is not allowed: {reason_of(error)}") from None
        except (MemoryError, RecursionError):
            raise faulty("does not come to an end") from None


def _applied(tokenizer: Any, messages: list[Mapping], tokenize: bool, options: dict) -> Any:
    """Apply a tokenizer's template with the given variables only.

    mlx-lm's ``TokenizerWrapper.apply_chat_template`` adds ``enable_thinking=True`` for a model that
    can think. Without it, the template's own default applies, as in transformers and TRL.
    """
    name = getattr(tokenizer, "_thinking_kwarg", "enable_thinking")
    if "enable_thinking" in options:
        options = {name if k == "enable_thinking" else k: v for k, v in options.items()}

    plain = getattr(tokenizer, "_tokenizer", tokenizer)
    if (renderer := getattr(tokenizer, "_chat_template", None)) is None:
        return plain.apply_chat_template(messages, tokenize=tokenize, return_dict=False, **options)

    text = renderer(messages, **options)
    if not tokenize:
        return text
    return plain.encode(text, add_special_tokens=False)


def reads_clock(tokenizer: Any) -> bool:
    return "strftime_now" in str(getattr(tokenizer, "chat_template", None))


def strftime_now(form: str) -> str:
    """The present time, or where the clock is stopped."""
    return (_STOPPED_AT.get() or datetime.now()).strftime(form)


@contextmanager
def clock_at(date: str | None) -> Iterator[None]:
    """Stop the clock of templates inside the block, at midnight of a date; None lets it go on."""
    stopped_at = None
    if date is not None:
        stopped_at = datetime.fromisoformat(date)

    token = _STOPPED_AT.set(stopped_at)
    try:
        yield
    finally:
        _STOPPED_AT.reset(token)
