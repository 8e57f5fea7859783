"""The page of a run or a pack: one file of HTML without anything from outside, and no script.

Every text is escaped by the template engine; the page also forbids browsers to load or run
anything, should a text ever pass for more than text.
"""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ..display import size
from ..terminal import printable_text
from .chart import Chart, chart, shown
from .facts import Page, progress_series, rate_name

if TYPE_CHECKING:
    from jinja2 import Environment

_WIDE = (1040, 330)
_NARROW = (360, 260)
_SMALL = (340, 150)


@cache
def environment() -> "Environment":
    """Return the template engine, which escapes every text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )

    environment.filters["shown"] = shown
    environment.globals["size"] = size
    return environment


def _printable(value: object) -> object:
    """Return a plain text without what could steer a terminal; other values stay."""
    if type(value) is not str:
        return value
    return printable_text(value)


def render(facts: Page) -> str:
    mark = (facts.best, "best") if facts.best is not None else None

    template = environment().get_template("page.html.jinja")
    return template.render(
        facts=facts,
        wide=_progress(facts, _WIDE, mark),
        narrow=_progress(facts, _NARROW, mark),
        small=[
            (title, small)
            for title, name in (
                ("Learning rate", "learning_rate"),
                ("Gradient norm", "grad_norm"),
                (rate_name(facts.unit), "rate"),
            )
            if (small := chart({(title, "other"): facts.curve.get(name, [])}, "", _SMALL))
        ],
    )


def render_fragment(facts: Page) -> str:
    """Return the view for a notebook: figures, results and the loss curve, without a page."""
    template = environment().get_template("fragment.html.jinja")
    return template.render(facts=facts, curve=_progress(facts, (640, 240), None))


def _progress(facts: Page, size: tuple[int, int], mark: tuple[float, str] | None) -> Chart | None:
    training, validation = progress_series(facts.curve)
    series = {
        (f"training {training}", "train"): facts.curve.get(training, []),
        (f"validation {training}", "valid"): facts.curve.get(validation, []),
    }
    label = facts.loss_name if training == "loss" else training
    return chart(series, label, size, mark)
