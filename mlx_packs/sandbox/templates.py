"""Chat templates, rendered as by transformers; this module runs in a sandbox.

Other libraries than jinja are not imported, so that it starts fast. The environment is that of
`transformers.utils.chat_template_utils`, and a test compares both.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class _Generation(Extension):
    """``{% generation %}`` marks the answers for transformers; it changes no text."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    @staticmethod
    def _text(caller: Any) -> str:
        return caller()


class _Dict:
    """What ``dict`` is in a template."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """A namespace without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: N805
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"it stores {name!r} in a namespace")


def raise_exception(message: Any) -> None:
    """Reject a conversation, as templates do."""
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as it is; jinja's own filter escapes it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@functools.lru_cache(maxsize=32)
def _compiled(text: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment.from_string(text)


def render(conversations: Sequence[tuple]) -> list[list[list[str]]]:
    """Return renderings of the beginnings of conversations.

    Args:
        conversations: For each one the template, its messages, the requests, the variables that
            all renderings have, and the present as YYYY-MM-DD (None for the clock's). A request
            has the number of messages, and variables of its own.

    Returns:
        For each request of each conversation its text, as ``["text", text]``, or why there is
        none: ``rejected``, ``syntax``, ``forbidden`` or ``endless``, and the reason.
    """
    return [_renderings(*conversation) for conversation in conversations]


def _renderings(
    text: str,
    messages: Sequence[Mapping],
    requests: Sequence[tuple[int, Mapping]],
    variables: Mapping[str, Any],
    date: str | None,
) -> list[list[str]]:
    turns = [_message(message) for message in messages]
    clock = datetime.fromisoformat(date) if date is not None else datetime.now()
    shared = {**variables, "strftime_now": clock.strftime}
    return [_rendered(text, turns[:count], {**shared, **options}) for count, options in requests]


def _message(message: Mapping) -> dict:
    """Return a message without None, and with its thoughts under each name that templates read."""
    present = {key: value for key, value in message.items() if value is not None}
    thoughts = next((present[key] for key in _REASONING_FIELDS if key in present), None)
    if thoughts is None:
        return present
    return {"thinking": thoughts, **present, "reasoning_content": thoughts}


def _rendered(text: str, messages: list[dict], variables: dict) -> list[str]:
    try:
        return ["text", _compiled(text).render(messages=messages, **variables)]
    except TemplateSyntaxError as error:
        return ["syntax", f"in line {error.lineno}: {_reason(error)}"]
    except SecurityError as error:
        return ["forbidden", _reason(error)]
    except RecursionError:
        return ["endless", ""]
    except MemoryError:
        raise
    except Exception as error:
        return ["rejected", _reason(error)]


def _reason(error: Exception) -> str:
    text = " ".join(str(error)[:2000].split())
    if isinstance(error, KeyError):
        text = f"there is no {text}"
    return text or type(error).__name__


def syntax_error(text: str) -> str | None:
    """Return why a template cannot be parsed; None if it can."""
    try:
        _compiled(text)
    except RecursionError:
        return "it is nested too deep"
    except MemoryError:
        raise
    except Exception as error:
        return _reason(error)
    return None


def variables_of(text: str) -> list[str]:
    """Return the names that a template reads and does not set itself."""
    return sorted(find_undeclared_variables(_compiled(text).environment.parse(text)))
