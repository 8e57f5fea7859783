"""The images of a run: progress while their features are computed, and how many there were."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..bases.tokenizer import images_of
from ..display import Display
from ..display import Task as Bar
from ..packs.base import Base


def advance_of(bar: Bar, tokenizer: Any) -> Callable[[], None]:
    """Return what counts a step of a bar; it also shows how many images were computed."""
    images = images_of(tokenizer)
    if images is None:
        return bar.advance

    def advance() -> None:
        text = bar.unit
        if images.computed:
            text = f"{bar.unit}, {images.computed:,} images computed"
        bar.advance(text)

    return advance


@contextmanager
def images_of_run(base: Base, display: Display) -> Iterator[None]:
    """Count the images of examples that are encoded, and release the vision tower after them."""
    images = images_of(base.tokenizer)
    if images is None:
        yield
        return

    images.start_count()
    yield
    images.close_tower()

    counts = images.counts()
    if counts["count"]:
        display.line("images", _line(counts))


def _line(counts: Mapping[str, int]) -> str:
    origins = {"computed": counts["computed"], "from earlier runs": counts["recalled"]}
    parts = [f"{count:,} {origin}" for origin, count in origins.items() if count]
    mean = counts["tokens"] / counts["count"]
    return f"{counts['count']:,}, {mean:,.0f} tokens each on average: {', '.join(parts)}"


def images_report(base: Base) -> dict:
    """Return the part of a run's report on its images; empty without any."""
    images = images_of(base.tokenizer)
    if images is None or not images.counts()["count"]:
        return {}
    return {"images": images.counts()}
