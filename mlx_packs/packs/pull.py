"""Packs from the Hugging Face Hub."""

from pathlib import Path

from ..display import QUIET, Display
from .hub import fetch
from .pack import Pack


def pull(
    name: str,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    display: Display | None = None,
) -> Pack:
    """Fetch a pack from the Hub, atomically.

    A branch or tag is resolved to its commit first; ``hub.json`` beside the pack records both.

    Args:
        name: ``owner/name``, with ``@revision`` if it is not ``main``.
        out: folder to write; without it the cache, where ``owner/name`` is found as a pack.
        overwrite: whether a pack at ``out`` is replaced.
        display: progress output.

    Raises:
        PackError: the Hub cannot be reached, the pack is not complete, or a hash differs.
    """
    return Pack.open(fetch(name, out, overwrite, display or Display(QUIET)))
