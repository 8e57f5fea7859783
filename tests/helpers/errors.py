"""What tests assert of an error: its stable code and the setting that it names, not its English."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mlx_packs.errors import PackError


@contextmanager
def raises(code: str, flag: str | None = None, *names: str) -> Iterator[pytest.ExceptionInfo]:
    """A PackError with this code, about this setting; its message has each of ``names``.

    Args:
        flag: as in Python (``max_seq_length``); None does not ask.
        names: what the message must name: files, lines, tensors, values; not its wording.
    """
    with pytest.raises(PackError) as caught:
        yield caught
    check(caught.value, code, flag, *names)


def check(error: PackError | None, code: str, flag: str | None = None, *names: str) -> None:
    """Assert what `raises` asserts, of an error that was caught elsewhere."""
    assert error is not None, "no PackError was raised"
    assert error.code == code, (error.code, error.message)
    assert flag is None or error.flag == flag, (error.flag, error.message)
    for name in names:
        assert name in error.message, error.message
