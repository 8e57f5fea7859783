"""The images of a run: progress while their features are computed, and how many there were."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ..bases.turns import images_of
from ..config.data import DataConfig
from ..data.encoding import EncodingOptions, Examples, encode
from ..data.formats import Row
from ..display import QUIET, Display
from ..packs.base import Base


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
    if count := counts["count"]:
        origins = {"computed": counts["computed"], "from earlier runs": counts["recalled"]}
        parts = [f"{number:,} {origin}" for origin, number in origins.items() if number]
        mean = counts["tokens"] / count
        text = f"{count:,}, {mean:,.0f} tokens each on average: {', '.join(parts)}"
        display.line("images", text)


def encode_shown(
    rows: Sequence[Row],
    base: Base,
    columns: DataConfig,
    options: EncodingOptions,
    display: Display | None,
) -> Examples:
    """Encode rows that are evaluated, and show their images."""
    with encoding_progress(len(rows), base, display) as advance:
        return encode(rows, base.tokenizer, columns, options, advance=advance)


@contextmanager
def encoding_progress(
    count: int, base: Base, display: Display | None
) -> Iterator[Callable[[], None] | None]:
    """Yield what counts a text that is encoded, None without images; release the tower at last."""
    if images_of(base.tokenizer) is None:
        yield None
        return

    display = display or Display(QUIET)
    with images_of_run(base, display), display.task("data", count, "examples") as bar:
        yield bar.advance


def images_report(base: Base) -> dict:
    """Return the part of a run's report on its images; empty without any."""
    images = images_of(base.tokenizer)
    if images is None or not images.counts()["count"]:
        return {}
    return {"images": images.counts()}
