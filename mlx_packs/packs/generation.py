"""Text by a base model that is loaded if needed: whole, in pieces, or for many prompts."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config.arguments import checked_arguments
from .base import Base, loaded_base
from .weighted_sum import Packs


@checked_arguments
def generate(
    base: Base | str | Path | None,
    prompt: str | Sequence[Mapping],
    pack: Packs | None = None,
    **options: Any,
) -> str:
    """Return the text that a base model generates after a prompt; the model is loaded if needed.

    Args:
        base: A loaded base model, a name as in `load_base`, or None for the base model that the
            pack was trained on.
        prompt: The user's message, or a list of messages with ``role`` and ``content``.
        pack: A pack, its folder, or several packs with weights, as in `Base.applied`.
        **options: ``raw`` and the sampling settings of `Base.generate`.

    Raises:
        PackError: As in `Base.generate`, or if the base model cannot be found.
    """
    loaded, pack = loaded_base(base, pack)
    return loaded.generate(prompt, pack, **options)


@checked_arguments
def stream_generate(
    base: Base | str | Path | None,
    prompt: str | Sequence[Mapping],
    pack: Packs | None = None,
    **options: Any,
) -> Iterator[str]:
    """Return an iterator over pieces of the text that `generate` returns, as they are generated.

    Args:
        base: As in `generate`.
        prompt: As in `generate`.
        pack: As in `generate`.
        **options: As in `generate`.

    Raises:
        PackError: As in `generate`, before the first piece.
    """
    loaded, pack = loaded_base(base, pack)
    return loaded.stream(prompt, pack, **options)


@checked_arguments
def batch_generate(
    base: Base | str | Path | None,
    prompts: Sequence[str | Sequence[Mapping]],
    pack: Packs | None = None,
    **options: Any,
) -> list[str]:
    """Return the text that a base model generates after each prompt, several at a time.

    Args:
        base: As in `generate`.
        prompts: Prompts as in `generate`.
        pack: As in `generate`.
        **options: ``raw``, ``batch_size`` and the sampling settings of `Base.generate_batch`.

    Raises:
        PackError: As in `Base.generate_batch`, or if the base model cannot be found.
    """
    loaded, pack = loaded_base(base, pack)
    return loaded.generate_batch(prompts, pack, **options)
