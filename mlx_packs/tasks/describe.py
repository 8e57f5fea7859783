"""What a data set is: its format, splits, lengths, bad rows, copies and trained tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..bases.files import TINY, check_files, resolve_checkpoint
from ..bases.sentence_config import read_sentence_config
from ..bases.tokenizer import load_encoder_tokenizer
from ..config.arguments import checked_arguments
from ..config.choices import TASKS, architecture_of
from ..config.data import Columns, DataConfig
from ..config.schema import TrainConfig
from ..data.formats import FORMATS, first_format, formats_of, own_formats, tasks_of, with_task
from ..data.in_memory import Data, columns_of
from ..data.labelled import NO_LIMIT
from ..data.labels import find_classes
from ..data.left_out import template_notes
from ..data.near_copies import row_notes
from ..data.overview import Reader, SplitOverview, look_at
from ..data.row_format import shown_counts
from ..data.rows import Splits, load_rows
from ..data.task_formats import LABEL_FORMATS, PairFormat
from ..display import Display, display_of
from ..errors import PackError, any_of
from ..objectives.embedding import with_eos
from ..report.text import TextReport
from ..vision.tokenizer import tokenizer_of
from .tokens import encoding_options

_MOST_LABELS = 8  # in a line
_BAR = 40  # characters of the longest bar of a histogram


@dataclass(frozen=True, repr=False)
class DataReport(TextReport):
    """What a data set is, and what a run of a task reads of it.

    Attributes:
        splits: The examples of each split.
        looks: Lengths, bad rows, labels and near-duplicates of each split.
        samples: Some training examples, with the tokens that are trained.
        notes: What is unusual, a line for each.
        facts: The name of the data, its format, the tasks that train on it, and the model.
    """

    splits: Splits
    looks: Mapping[str, SplitOverview]
    samples: Sequence[dict[str, Any]]
    notes: Sequence[str]
    facts: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the report as a mapping, as ``packs data --json`` prints it."""
        splits = {split: look.to_json() for split, look in self.looks.items()}
        return {**self.facts, "splits": splits, "samples": self.samples, "notes": self.notes}

    def lines(self) -> list[str]:
        facts = self.facts
        described = f"{facts['data']} · {facts['format']}"
        if facts["task"] is None and facts["trained_by"]:
            described += f", for --task {any_of(facts['trained_by'])}"
        lines = [f"data    {described}"]
        for split, look in self.looks.items():
            lines += _lines(split, look, facts["model"], facts["max_seq_length"])
        return lines + [f"note    {note}" for note in self.notes]


@checked_arguments
def describe_data(  # noqa: PLR0913 (the public face)
    data: Data | None = None,
    model: str | Path = TINY,
    task: str | None = None,
    columns: Columns | None = None,
    *,
    max_seq_length: int = TrainConfig.max_seq_length,
    loss_on: str | None = None,
    samples: int = 2,
    every_row: bool = False,
    trust_remote_code: bool = False,
    on_bad: Callable[[dict], object] | None = None,
    progress: bool | Display = True,
) -> DataReport:
    """Describe a data set, as ``packs data`` does; ``print(report)`` shows it.

    Args:
        data: As of `train_pack`.
        model: The base whose tokenizer and chat template are used, as in `load_base`.
        task: The task whose run reads the examples; None takes the format of the examples.
        columns: As of `train_pack`.
        max_seq_length: Length at which a run truncates examples.
        loss_on: As in `TrainConfig`.
        samples: Number of training examples in ``samples``.
        every_row: Whether to read splits of more than 50,000 examples wholly.
        trust_remote_code: As of `train_pack`.
        on_bad: Called with each of the first 200 examples of a split that cannot be used.
        progress: As of `train_pack`.

    Raises:
        PackError: If no example can be used, or the task does not train on them.
    """
    display = display_of(progress)
    columns = replace(columns_of(data, columns), on_bad_row="skip")
    train = TrainConfig(
        task=task or TrainConfig.task, max_seq_length=max_seq_length, loss_on=loss_on
    )
    model = str(model)
    splits, readers = _readers(train, task, columns, model, trust_remote_code)
    rows = splits.rows["train"]
    reader = readers["train"]

    looks = {}
    for split, of_split in readers.items():
        with display.working("data", f"reading {split}"):
            try:
                looks[split] = look_at(splits.rows[split], of_split, every_row, on_bad)
            except PackError as error:
                if task is not None:
                    raise
                raise with_task(error, splits.rows[split][0], columns) from None

    shown: list[dict] = []
    if reader.has_targets:
        shown = reader.shown(rows, range(min(samples, len(rows))))
    notes = [*splits.notes, *row_notes(splits.rows, splits.format, columns)]
    notes += template_notes(rows, splits.format, columns, reader.tokenizer)
    facts = {
        "data": str(columns.data),
        "format": splits.format.name,
        "task": task,
        "trained_by": tasks_of(splits.format),
        "model": model,
        "max_seq_length": max_seq_length,
    }
    return DataReport(splits, looks, shown, notes, facts)


def _readers(
    train: TrainConfig, task: str | None, columns: DataConfig, model: str, trust_remote_code: bool
) -> tuple[Splits, dict[str, Reader]]:
    """Return the rows of each split, and what reads them as a run of the task, or by their format.

    Raises a PackError for rows that the task does not train on.
    """
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


def _labels(labels: Mapping[str, int]) -> str:
    commonest = sorted(labels.items(), key=lambda each: -each[1])
    text = ", ".join(f"{label} {count:,}" for label, count in commonest[:_MOST_LABELS])
    if len(labels) > _MOST_LABELS:
        text += ", …"
    return f"labels: {text}"


def _lines(split: str, look: SplitOverview, model: str, max_seq_length: int) -> list[str]:
    """Return the overview of a split for people, with the histogram of its lengths."""
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


def _facts(split: str, look: SplitOverview, max_seq_length: int) -> list[str]:
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
            f"every example starts with the same {look.common} tokens, {share:.0%} of all: "
            "--share-prefix computes them once per batch"
        )
    if look.near_copies:
        facts.append(f"{look.near_copies:,} of {look.sampled:,} have a near-duplicate in {split}")

    if look.labels:
        facts.append(_labels(look.labels))
    return facts
