"""The clock that chat templates read (Llama 3.2, gpt-oss, Granite); training stops it at a date."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any

_STOPPED_AT: ContextVar[datetime | None] = ContextVar("stopped_at", default=None)


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
