"""Joining the ranks of a run, and leaving them together."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version

from .. import signals
from ..errors import PackError
from ..runtime import mx
from . import group as current
from .group import ALONE, Group
from .link import SILENCE_S, Launched, Link, connect, launched

_CONNECT_S = 60  # for MLX, once all ranks are there; it holds Python's lock meanwhile
_link: Link | None = None  # of this process, as its group is


@contextmanager
def joined_ranks() -> Iterator[Group]:
    """Yield the group of the ranks that this process was launched with; without others `ALONE`.

    They end together: an error of one ends all of them, and the first one says so.
    """
    here = launched()
    if here is None:
        yield ALONE
        return

    ranks, link = _join(here)
    try:
        link.begin()
        yield ranks
        ranks.highest(0)  # all have written what they write
    except BaseException as error:
        with signals.deferred():  # a launcher sends one to all if a rank has gone
            _leave(link, error)
        raise
    link.end()


def _leave(link: Link, error: BaseException) -> None:
    """Tell the first rank the error that ends this one, unless another rank went without a word.

    Then the link ends the process, and says so: MLX's error comes of it, as does the signal by
    which a launcher ends the ranks that are left.
    """
    by_mlx = isinstance(error, RuntimeError) and "peer" in str(error)  # MLX's words
    known = isinstance(error, PackError)

    by_signal = isinstance(error, KeyboardInterrupt) or (known and error.code == "interrupted")

    if by_mlx or (by_signal and link.has_lost_a_rank()):
        time.sleep(SILENCE_S)
    link.end(error.message if known else f"{type(error).__name__}: {error}")


def when_gone(tell: Callable[[str], None]) -> None:
    """Let ``tell`` print, on the first rank, why another one has ended; then the process ends."""
    if _link is not None:
        _link.on_gone = tell


def _join(here: Launched) -> tuple[Group, Link]:
    """Connect with the first run in this process; later runs have its group and link."""
    global _link
    if _link is not None and current.group() is not ALONE:
        return current.group(), _link

    _link = connect(here, {name: version(name) for name in ("mlx-packs", "mlx", "mlx-lm")})
    signal.alarm(_CONNECT_S)  # the process ends, as no Python can run
    try:
        ranks = Group(mx.distributed.init(strict=True))
    except RuntimeError as error:
        raise PackError(f"--hosts: MLX cannot connect the ranks ({error}).", "network") from None
    finally:
        signal.alarm(0)

    current.join(ranks)
    return ranks, _link
