"""`packs train --show-mask`: which tokens of some examples the loss is on."""

from dataclasses import replace
from datetime import date

from ..bases.chat_template import reads_clock
from ..bases.loading import tokenizer_of
from ..bases.tokenizer import with_template
from ..config.choices import TASKS
from ..config.recipe import Recipe
from ..config.tasks import tasks_of
from ..data.encoding import checked_format
from ..data.formats import own_formats
from ..data.left_out import template_notes
from ..data.overview import Reader
from ..display import Display
from ..tasks.phases import resolve_phases
from ..tasks.tokens import encoding_options
from .output import print_report, print_spans, wants_json

COUNT = 5  # of the examples of each phase that are shown


def show_mask(recipe: Recipe, display: Display) -> None:
    """Print the first training examples of each phase as `packs data` does."""
    tokenizer, vocab_size = tokenizer_of(recipe.model, recipe.run.get("trust_remote_code", False))
    phases = resolve_phases(recipe.train, recipe.data)
    shown = []
    losses = {}
    notes = {}

    for phase in phases:
        splits = phase.load_rows()
        rows = splits.rows["train"]
        columns = phase.columns
        tokenizer = with_template(tokenizer, columns.chat_template)
        if columns.template_date is None and reads_clock(tokenizer):
            columns = replace(columns, template_date=date.today().isoformat())

        row_format = splits.format
        if TASKS[phase.train.task].sequences == 2:  # rows may have other columns too
            (row_format,) = own_formats(phase.train.task)
        else:
            checked_format(rows, columns, row_format)

        options = encoding_options(phase.train, "train", row_format, vocab_size)
        masks, loss_on = Reader(row_format, columns, tokenizer, options).masked(rows[:COUNT])
        shown += masks
        losses[loss_on] = None
        notes |= dict.fromkeys(template_notes(rows, row_format, columns, tokenizer))

    loss_on = ", ".join(losses)
    if any(phase.train.task in tasks_of("loss_on") for phase in phases):
        loss_on += "; --loss-on all, completion or assistant"
    if wants_json():
        print_report({"loss_on": loss_on, "examples": shown}, [])
        return

    print_masked(shown)
    display.line("mask", f"loss on {loss_on}")
    for note in notes:
        display.line("data", note)


def print_masked(masked: list[dict]) -> None:
    """Print examples as `masked` returns them; targets are green, or between ⟦ and ⟧."""
    for example in masked:
        targets = f"{example['learned']} of {example['total']} tokens are trained on"
        spans = [(span["text"], span["learned"]) for span in example["spans"]]
        print_spans(f"{example['where']}: {targets}", spans)
