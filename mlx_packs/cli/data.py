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

from ..config.choices import TASKS, architecture_of
from ..config.data import COLUMN_SETTINGS, DataConfig
from ..config.recipe import Recipe
from ..config.schema import TrainConfig
from ..config.tasks import tasks_of
from ..display import Display
from ..errors import PackError, any_of, flag_of
from ..terminal import echo
from . import options
from .options import option
from .output import print_report, print_spans, wants_json

if TYPE_CHECKING:
    from ..data.overview import Reader, SplitOverview
    from ..data.rows import Rows, Splits
    from ..tasks.phases import RunPhase

_MOST_LABELS = 8  # in a line
_BAR = 40  # characters of the longest bar of a histogram
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
    from ..data.formats import tasks_of as tasks_of_format
    from ..data.formats import with_task
    from ..data.left_out import template_notes
    from ..data.near_copies import row_notes
    from ..data.overview import look_at, write_splits

    if overwrite and out is None:
        raise PackError("--overwrite: applies to --out DIR only.", "conflict", "overwrite")

    loss_on = settings.pop("loss_on")
    every_row = settings.pop("every_row")
    on_bad = partial(print_bad, Display()) if settings.pop("bad_rows") else None
    train = TrainConfig(
        task=task or TrainConfig.task, max_seq_length=max_seq_length, loss_on=loss_on
    )
    columns = DataConfig(data=path, on_bad_row="skip", **settings)
    splits, readers = _readers(train, task, columns, model, trust_remote_code)
    looks = {}
    for split, reader in readers.items():
        with Display().working("data", f"reading {split}"):
            try:
                looks[split] = look_at(splits.rows[split], reader, every_row, on_bad)
            except PackError as error:
                if task is not None:
                    raise
                raise with_task(error, splits.rows[split][0], columns) from None

    tokenizer = readers["train"].tokenizer
    notes = [*splits.notes, *row_notes(splits.rows, splits.format, columns)]
    rows = splits.rows["train"]
    notes += template_notes(rows, splits.format, columns, tokenizer)
    shown: list[dict] = []
    if readers["train"].has_targets:
        shown = readers["train"].shown(rows, range(min(samples, len(rows))))
    written = None if out is None else write_splits(splits, columns, Path(out), overwrite)
    report = {
        "data": path,
        "format": splits.format.name,
        "task": task,
        "trained_by": tasks_of_format(splits.format),
        "model": model,
        "max_seq_length": max_seq_length,
        "splits": {split: look.to_json() for split, look in looks.items()},
        "samples": shown,
        "notes": notes,
        "out": out,
        "written": written,
    }

    described = f"{path} · {splits.format.name}"
    if task is None and report["trained_by"]:
        described += f", for --task {any_of(report['trained_by'])}"
    lines = [f"data    {described}"]
    for split, look in looks.items():
        lines += _lines(split, look, model, max_seq_length)
    lines += [f"note    {note}" for note in notes]
    if written is not None:
        lines.append(_written_line(out, written, columns, task))

    print_report(report, lines)
    if not wants_json():
        print_masked(shown)


def print_bad(display: Display, bad: Mapping[str, Any]) -> None:
    if wants_json():
        echo(json.dumps(bad), err=True)
    else:
        display.line("bad", f"{bad['where']}: {bad['message']}")


def _readers(
    train: TrainConfig, task: str | None, columns: DataConfig, model: str, trust_remote_code: bool
) -> tuple["Splits", dict[str, "Reader"]]:
    """Return the rows of each split, and what reads them as a run of the task, or by their format.

    Raises a PackError for rows that the task does not train on.
    """
    from ..data.formats import FORMATS, first_format, formats_of, own_formats
    from ..data.labels import find_classes
    from ..data.overview import Reader
    from ..data.rows import load_rows
    from ..data.task_formats import LABEL_FORMATS, PairFormat
    from ..tasks.tokens import encoding_options
    from ..vision.tokenizer import tokenizer_of

    formats = formats_of(task) if task is not None else FORMATS
    splits = load_rows(columns, formats)
    rows = splits.rows["train"]
    classes = None
    if task is not None and own_formats(task) is LABEL_FORMATS:
        classes = find_classes(rows, columns, splits.source)
    elif task is not None:
        first_format(rows, columns, own_formats(task))

    if isinstance(splits.format, PairFormat):
        tokenizer, longest = _text_tokenizer_of(model, trust_remote_code)
        train = replace(train, max_seq_length=min(train.max_seq_length, longest))
        vocab_size = len(tokenizer)
    else:
        tokenizer, vocab_size = tokenizer_of(model, trust_remote_code)

    is_scored = task is not None and TASKS[task].sequences == 2 and TASKS[task].heads == ("score",)
    return splits, {
        split: Reader(
            splits.format,
            columns,
            tokenizer,
            encoding_options(train, split, splits.format, vocab_size),
            classes,
            scores_whole=is_scored,
        )
        for split in splits.present()
    }


def _text_tokenizer_of(model: str, trust_remote_code: bool) -> tuple[Any, int]:
    """Return the tokenizer with which a base embeds texts, and the most tokens that it reads."""
    from ..bases.files import check_files, resolve_checkpoint
    from ..bases.sentence_config import read_sentence_config
    from ..bases.tokenizer import load_encoder_tokenizer
    from ..data.labelled import NO_LIMIT
    from ..objectives.embedding import with_eos
    from ..vision.tokenizer import tokenizer_of

    path = resolve_checkpoint(model)
    config = check_files(path)
    is_decoder = architecture_of(config["model_type"]) == "decoder"
    sentences = read_sentence_config(path, is_decoder)

    if not is_decoder:
        lower_case = sentences.lower_case
        tokenizer = load_encoder_tokenizer(path, config, lower_case, trust_remote_code)
    else:
        tokenizer = tokenizer_of(model, trust_remote_code)[0]._tokenizer
        if sentences.adds_eos:
            tokenizer = with_eos(tokenizer, path)
    return tokenizer, sentences.max_seq_length or NO_LIMIT


def _written_line(out: str, written: dict[str, int], columns: DataConfig, task: str | None) -> str:
    counts = " · ".join(f"{count:,} {split}" for split, count in written.items())
    command = ["packs", "train", "--data", out]
    if task is not None:
        command += ["--task", task]
    for name in columns.changed(COLUMN_SETTINGS):
        command += [flag_of(name), getattr(columns, name)]
    return f"wrote   {out}: {counts}    try: {shlex.join(command)}"


def _labels(labels: Mapping[str, int]) -> str:
    commonest = sorted(labels.items(), key=lambda each: -each[1])
    text = ", ".join(f"{label} {count:,}" for label, count in commonest[:_MOST_LABELS])
    if len(labels) > _MOST_LABELS:
        text += ", …"
    return f"labels: {text}"


def _lines(split: str, look: "SplitOverview", model: str, max_seq_length: int) -> list[str]:
    """Return the overview of a split for people, with the histogram of its lengths."""
    from ..data.row_format import shown_counts

    of = f" ({look.looked_at:,} of them looked at)" if look.looked_at != look.rows else ""
    q = look.quantiles()
    lines = [
        f"{split:<8}{look.rows:,} examples{of} · tokens of {model}: median {q['p50']:,}, 5 to 95 % "
        f"{q['p5']:,} to {q['p95']:,}, longest {q['longest']:,}"
    ]

    if facts := _facts(split, look, max_seq_length):
        lines.append(f"{'':<8}{' · '.join(facts)}")
    if bad := look.bad_rows:
        counts = f"{len(bad):,} cannot be used: {shown_counts(bad.counts())}"
        lines.append(f"{'':<8}{counts}; the first is {bad.errors[0][1].message}")

    bins = look.histogram()
    widest = max(count for _, _, count in bins)
    for low, high, count in bins:
        bar = "▇" * round(_BAR * count / widest)
        if count and not bar:
            bar = "▏"
        lines.append(f"{'':<8}{f'{low:,} to {high:,}':>16} {bar} {count:,}")

    return lines


def _facts(split: str, look: "SplitOverview", max_seq_length: int) -> list[str]:
    """Return what is cut, trained on and repeated in a split, for people."""
    facts = []
    if look.cut:
        outcome = "cut"
        if look.dropped == look.cut:
            outcome = "dropped"
        elif look.dropped:
            outcome += f", {look.dropped:,} of them without any target left"
        facts.append(f"{look.cut:,} longer than {max_seq_length:,}, {outcome}")
    if look.images_beyond:
        facts.append(
            f"{look.images_beyond:,} have images beyond {max_seq_length:,}, which stop a run "
            "(--on-bad-row skip leaves them out)"
        )
    if look.learned is not None:
        facts.append(f"{100 * look.learned:.0f} % of the tokens are trained")
    if look.common:
        share = look.common * len(look.lengths) / max(1, int(look.lengths.sum()))
        facts.append(
            f"{look.common} tokens begin every example, {share:.0%} of all: --share-prefix "
            "computes them once a batch"
        )
    if look.near_copies:
        facts.append(f"{look.near_copies:,} of {look.sampled:,} have a near-duplicate in {split}")

    if look.labels:
        facts.append(_labels(look.labels))
    return facts


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
