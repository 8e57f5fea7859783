"""The date of a run for chat templates that read the clock, so that a resumed run sees no other."""

from datetime import date

from ..bases.template_clock import reads_clock
from ..display import Display
from ..errors import PackError
from ..packs.base import Base
from .settings import RunSettings


def with_template_date(
    settings: RunSettings, base: Base, earlier: dict | None, display: Display
) -> RunSettings:
    """Return settings with the date that the chat template reads, if it reads the clock.

    ``earlier`` is the identity of the run that is resumed: early versions recorded no date, and
    their templates go on reading the clock.
    """
    specified = settings.columns.template_date
    if not reads_clock(base.tokenizer):
        if specified is None:
            return settings
        raise PackError(
            f"--template-date: the chat template of {base.name} does not read the clock. Leave it "
            "out.",
            "conflict",
            "template_date",
        )

    if specified is None and earlier is None:
        specified = date.today().isoformat()
    if specified is None:
        display.line("template", "reads the clock, and this run has recorded no date")
        return settings

    display.line(
        "template",
        f"reads the clock: {specified} in training (--template-date), the current date in use",
    )
    return settings.with_settings({}, {"template_date": specified})
