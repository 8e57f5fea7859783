"""`packs data`: what a data set is, before an hour is spent on it."""

import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..config.data import COLUMN_SETTINGS, DataConfig
from ..config.schema import TrainConfig
from ..display import Display
from ..errors import PackError, flag_of
from . import options
from .options import option
from .output import print_report, wants_json

if TYPE_CHECKING:
    from ..data.overview import SplitOverview

_BAR = 40  # characters of the longest bar of a histogram


@click.command()
@click.argument("path", metavar="PATH", type=click.Path())
@options.setting(
    "model", default="tiny", help="Base model whose tokenizer and chat template are used."
)
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
@option("--out", metavar="DIR", help="Folder to write train, valid and test to, as JSONL files.")
@options.overwrite
@options.trust_remote_code
@options.as_json
def data(
    path: str,
    model: str,
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
    examples.
    """
    from ..data.left_out import template_notes
    from ..data.near_copies import row_notes
    from ..data.overview import look_at, write_splits
    from ..data.pair_formats import PairFormat
    from ..data.preferences import encode_tokens
    from ..data.rows import load_rows
    from ..data.token_store import masked
    from ..tasks.tokens import encoding_options
    from . import mask

    if overwrite and out is None:
        raise PackError("--overwrite: applies to --out DIR only.", "conflict", "overwrite")

    train = TrainConfig(max_seq_length=max_seq_length, loss_on=settings.pop("loss_on"))
    columns = DataConfig(data=path, on_bad_row="skip", **settings)
    tokenizer, vocab_size = mask.tokenizer_of(model, trust_remote_code)
    splits = load_rows(columns)
    looks = {}

    encoding = {
        split: encoding_options(train, split, splits.format, vocab_size)
        for split in splits.present()
    }
    for split, encoded_so in encoding.items():
        with Display().working("data", f"reading {split}"):
            looks[split] = look_at(
                splits.rows[split], splits.format, columns, tokenizer, encoded_so
            )

    notes = [*splits.notes, *row_notes(splits.rows, splits.format, columns)]
    notes += template_notes(splits.rows["train"], splits.format, columns, tokenizer)

    shown = []
    if samples and not isinstance(splits.format, PairFormat):
        split = splits.present()[0]
        rows = splits.rows[split][:samples]
        with suppress(PackError):  # the overview says why none of these can be used
            examples = encode_tokens(rows, tokenizer, columns, encoding[split], splits.format)
            shown = [masked(example, tokenizer) for example in examples.items]

    written = None if out is None else write_splits(splits, columns, Path(out), overwrite)
    report = {
        "data": path,
        "format": splits.format.name,
        "model": model,
        "max_seq_length": max_seq_length,
        "splits": {split: look.to_json() for split, look in looks.items()},
        "notes": notes,
        "out": out,
        "written": written,
    }

    lines = [f"data    {path} · {splits.format.name}"]
    for split, look in looks.items():
        lines += _lines(split, look, model, max_seq_length)
    lines += [f"note    {note}" for note in notes]
    if written is not None:
        lines.append(_written_line(out, written, columns))

    print_report(report, lines)
    if not wants_json():
        mask.print_masked(shown)


def _written_line(out: str, written: dict[str, int], columns: DataConfig) -> str:
    """Return what was written, with the command that trains on it."""
    counts = " · ".join(f"{count:,} {split}" for split, count in written.items())
    command = ["packs", "train", "--data", out]
    for name in columns.changed(COLUMN_SETTINGS):
        command += [flag_of(name), getattr(columns, name)]
    return f"wrote   {out}: {counts}    try: {shlex.join(command)}"


def _lines(split: str, look: "SplitOverview", model: str, max_seq_length: int) -> list[str]:
    """Return the overview of a split for people, with the histogram of its lengths."""
    from ..data.bad_rows import shown_counts

    of = ""
    if look.looked_at != look.rows:
        of = f" ({look.looked_at:,} of them looked at)"
    counted_by = "characters"
    if look.unit == "tokens":
        counted_by = f"tokens of {model}"

    q = look.quantiles()
    lines = [
        f"{split:<8}{look.rows:,} examples{of} · {counted_by}: median {q['p50']:,}, 5 to 95 % "
        f"{q['p5']:,} to {q['p95']:,}, longest {q['longest']:,}"
    ]

    facts = []
    if look.cut:
        dropped = ""
        if look.dropped:
            dropped = f", {look.dropped:,} of them without any target left"
        facts.append(f"{look.cut:,} longer than {max_seq_length:,}, cut{dropped}")
    if look.beyond:
        facts.append(
            f"{look.beyond:,} have images beyond {max_seq_length:,}, which stop a run "
            "(--on-long-row drop leaves them out)"
        )
    if look.learned is not None:
        facts.append(f"{100 * look.learned:.0f} % of the tokens are trained")
    if look.repeats is not None and split == "train":
        facts += look.repeats.lines()
    elif look.common:
        share = look.common * look.looked_at / max(1, int(look.lengths.sum()))
        facts.append(
            f"{look.common} tokens begin every example, {share:.0%} of all: --share-prefix "
            "computes them once a batch"
        )
    if look.near_copies:
        facts.append(f"{look.near_copies:,} of {look.sampled:,} have a near-duplicate in {split}")

    if facts:
        lines.append(f"{'':<8}{' · '.join(facts)}")
    if look.bad:
        first = look.bad.errors[0][1]
        lines.append(
            f"{'':<8}{len(look.bad):,} cannot be used: {shown_counts(look.bad.counts())}; "
            f"the first is {first.message}"
        )

    bins = look.histogram()
    widest = max(count for _, _, count in bins)
    for low, high, count in bins:
        bar = "▇" * round(_BAR * count / widest)
        if count and not bar:
            bar = "▏"
        lines.append(f"{'':<8}{f'{low:,} to {high:,}':>16} {bar} {count:,}")

    return lines
