"""`packs data`: what a data set is, before an hour is spent on it."""

import json
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..config.choices import TASKS
from ..config.data import COLUMN_SETTINGS, DataConfig
from ..config.recipe import Recipe
from ..config.schema import TrainConfig
from ..config.tasks import tasks_of
from ..display import Display
from ..errors import PackError, flag_of
from ..terminal import echo
from . import options
from .options import option
from .output import print_report, print_spans, wants_json

if TYPE_CHECKING:
    from ..data.overview import Reader
    from ..data.rows import Rows
    from ..tasks.phases import RunPhase

_MASKED = 5  # examples of each phase of which `packs train --show-mask` shows the targets


@click.command()
@click.argument("path", metavar="PATH", type=click.Path())
@options.setting(
    "model", default="tiny", help="Base model whose tokenizer and chat template are used."
)
@options.setting("task", "by the format", default=None, help="Task whose run reads the examples.")
@options.setting("max_seq_length", default=TrainConfig.max_seq_length, type=click.IntRange(2))
@options.setting("loss_on", "by the format of the examples", default=None)
@options.setting("hold_out", default=DataConfig.hold_out)
@options.add(
    *(options.setting(name, default=getattr(DataConfig, name)) for name in COLUMN_SETTINGS)
)
@options.setting("chat_template", default=None)
@options.template_kwargs("Variables of the chat template, as for packs train.", None)
@options.setting("max_pixels", default=DataConfig.max_pixels, type=click.IntRange(0))
@options.setting("allow_urls", default=False)
@option("--samples", default=2, type=click.IntRange(0), help="Number of examples to show.")
@option(
    "--every-row",
    is_flag=True,
    help="Read splits of more than 50,000 examples wholly, not 50,000 examples in blocks. "
    "Near-duplicates are searched in these blocks.",
)
@option(
    "--bad-rows",
    is_flag=True,
    help="Print examples that cannot be used as soon as they are read, at most 200 of a split, to "
    "standard error; with --json each is a line of JSON.",
)
@option("--out", metavar="DIR", help="Folder to write train, valid and test to, as JSONL files.")
@options.overwrite
@options.trust_remote_code
@options.as_json
def data(
    path: str,
    model: str,
    task: str | None,
    max_seq_length: int,
    samples: int,
    out: str | None,
    overwrite: bool,
    trust_remote_code: bool,
    **settings,
) -> None:
    """Describe a dataset, and write its splits.

    PATH is a folder, a file, or a dataset of the Hub, as for packs train --data. The output shows
    the format, the splits, the lengths of the examples and how many are truncated, the examples
    that cannot be used, near-duplicates within and between splits, and the trained tokens of some
    examples. With --task, examples are read as by a run of the task with default settings.
    """
    from ..data.overview import write_splits
    from ..tasks.describe import describe_data

    if overwrite and out is None:
        raise PackError("--overwrite: applies to --out DIR only.", "conflict", "overwrite")

    of_reading = {name: settings.pop(name) for name in ("loss_on", "every_row")}
    on_bad = partial(print_bad, Display()) if settings.pop("bad_rows") else None
    columns = DataConfig(data=path, on_bad_row="skip", **settings)
    report = describe_data(
        *(None, model, task, columns),
        **of_reading,
        max_seq_length=max_seq_length,
        samples=samples,
        trust_remote_code=trust_remote_code,
        on_bad=on_bad,
        progress=Display(),
    )

    lines = report.lines()
    written = None
    if out is not None:
        written = write_splits(report.splits, columns, Path(out), overwrite)
        lines.append(_written_line(out, written, columns, model, task))
    print_report(report.to_json() | {"out": out, "written": written}, lines)
    if not wants_json():
        print_masked(report.samples)


def print_bad(display: Display, bad: Mapping[str, Any]) -> None:
    if wants_json():
        echo(json.dumps(bad), err=True)
    else:
        display.line("bad", f"{bad['where']}: {bad['message']}")


def _written_line(
    out: str, written: dict[str, int], columns: DataConfig, model: str, task: str | None
) -> str:
    counts = " · ".join(f"{count:,} {split}" for split, count in written.items())
    command = ["packs", "train", "--model", model, "--data", out]
    if task is not None:
        command += ["--task", task]
    for name in columns.changed(COLUMN_SETTINGS):
        command += [flag_of(name), getattr(columns, name)]
    return f"wrote   {out}: {counts}    try: {shlex.join(command)}"


def show_mask(recipe: Recipe, display: Display, numbers: Collection[int]) -> None:
    """Print training examples of each phase as `packs data` does: by number, or the first."""
    from ..data.left_out import template_notes
    from ..tasks.phases import resolve_phases
    from ..vision.tokenizer import tokenizer_of

    tokenizer, vocab_size = tokenizer_of(recipe.model, recipe.run.get("trust_remote_code", False))
    phases = resolve_phases(recipe.train, recipe.data)
    shown = []
    losses = {}
    notes = {}
    missing = set(numbers)

    for phase in phases:
        rows, reader = _mask_reader(phase, tokenizer, vocab_size)
        chosen: Iterable[int] = range(min(_MASKED, len(rows)))
        if numbers:
            chosen = rows.numbered(numbers)
            missing -= {*chosen.values()}
        shown += reader.shown(rows, chosen)
        losses[reader.loss_on] = None
        of_phase = template_notes(rows, reader.format, reader.columns, reader.tokenizer)
        notes |= dict.fromkeys(of_phase)

    if numbers and not shown:
        fault = "no training example has this number (a line may be blank or held out)."
        raise PackError(f"--rows {min(numbers)}: {fault}", "not-found", "rows")

    loss_on = ", ".join(losses)
    if any(phase.train.task in tasks_of("loss_on") for phase in phases):
        loss_on += "; --loss-on all, completion or assistant"
    if wants_json():
        print_report({"loss_on": loss_on, "examples": shown, "missing": sorted(missing)}, [])
        return

    print_masked(shown)
    display.line("mask", f"loss on {loss_on}")
    if missing:
        display.line("data", f"no training examples: {', '.join(map(str, sorted(missing)))}")
    for note in notes:
        display.line("data", note)


def _mask_reader(phase: "RunPhase", tokenizer: Any, vocab_size: int) -> tuple["Rows", "Reader"]:
    """Return the training rows of a phase, and what reads them as its run does."""
    from ..bases.chat_template import reads_clock
    from ..bases.tokenizer import with_template
    from ..data.encoding import checked_format
    from ..data.formats import formats_of, own_formats
    from ..data.overview import Reader
    from ..data.rows import load_rows
    from ..tasks.tokens import encoding_options

    train = phase.train
    columns = replace(phase.columns, on_bad_row="skip")
    splits = load_rows(columns, formats_of(train.task))
    rows = splits.rows["train"]
    tokenizer = with_template(tokenizer, columns.chat_template)
    if columns.template_date is None and reads_clock(tokenizer):
        columns = replace(columns, template_date=date.today().isoformat())

    row_format = splits.format
    if TASKS[train.task].sequences == 2:  # rows may have other columns too
        (row_format,) = own_formats(train.task)
    else:
        checked_format(rows, columns, row_format)

    options = encoding_options(train, "train", row_format, vocab_size)
    return rows, Reader(row_format, columns, tokenizer, options)


def print_masked(masked: list[dict]) -> None:
    """Print examples as `Reader.shown` returns them; targets are green, or between ⟦ and ⟧."""
    for example in masked:
        if "reason" in example:
            print_spans(f"{example['where']}: {example['message']}", [(example["text"], False)])
            continue

        targets = f"{example['learned']} of {example['total']} tokens are trained on"
        spans = [(span["text"], span["learned"]) for span in example["spans"]]
        print_spans(f"{example['where']}: {targets}", spans)
