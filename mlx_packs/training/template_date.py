"""The date of a run for chat templates that read the clock, so that a resumed run sees no other."""

from datetime import date

from ..bases.template_clock import reads_clock
from ..errors import PackError
from ..packs.base import Base
from .settings import Run


def with_template_date(run: Run, base: Base, earlier: dict | None) -> Run:
    """Return a run with the date that its chat template reads, where it reads the clock.

    ``earlier`` is the identity of the run that is resumed: early versions recorded no date, and
    their templates go on reading the clock.

    Raises:
        PackError: a date is given for a template that has no use for it.
    """
    specified = run.columns.template_date
    if not reads_clock(base.tokenizer):
        if specified is None:
            return run
        raise PackError(
            f"--template-date: the chat template of {base.name} does not read the clock. Leave it "
            "out.",
            "conflict",
            "template_date",
        )

    if specified is None and earlier is None:
        specified = date.today().isoformat()
    if specified is None:
        run.display.line("template", "reads the clock, and this run has recorded no date")
        return run
    run.display.line(
        "template",
        f"reads the clock: {specified} in training (--template-date), the current date in use",
    )
    return run.with_settings({}, {"template_date": specified})
