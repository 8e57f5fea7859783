"""The splits of a phase: encoding them, their batches, and what a run says about it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from ..config.data import DataConfig
from ..data.dataset import ExampleSet
from ..data.left_out import template_notes
from ..data.row_format import BadRows
from ..data.rows import Splits
from ..data.sampler import Draw
from ..display import Display
from ..evaluation.images import advance_of
from .phases import PhaseData, RunPhase


class EncodedSplit(ExampleSet, Protocol):
    """The examples of a split, and what became of its rows."""

    fingerprint: str | None
    bad: BadRows
    cut: int


E = TypeVar("E", bound=EncodedSplit)


def encode_each(
    read: Splits,
    encode: Callable[[str, Callable[[], None]], E],
    display: Display,
    steps: Mapping[str, int] | None = None,
    unit: str = "splits",
    tokenizer: Any = None,
) -> dict[str, E]:
    """Return the examples of every split that has rows, and note its bad rows.

    ``encode`` takes a split and what counts a step. Each split has ``steps``, by default one; with
    a tokenizer the progress shows how many images were computed.
    """
    encoded = {}
    steps = steps or dict.fromkeys(read.present(), 1)
    with display.task("data", sum(steps.values()), unit) as bar:
        advance = bar.advance if tokenizer is None else advance_of(bar, tokenizer)
        for split, count in steps.items():
            done = bar.done
            encoded[split] = encode(split, advance)
            read.note_encoded(split, encoded[split].fingerprint, encoded[split].bad)
            for _ in range(done + count - bar.done):  # what was cached, or is not counted
                bar.advance()

    return encoded


def phase_data(
    task: Any, phases: Sequence[RunPhase], splits: Sequence[Mapping[str, Any]]
) -> list[PhaseData]:
    """Return the data of phases, each of which may draw from the examples of all.

    ``task.training`` gives the training batches of a phase, of all examples and a `Draw`.
    """
    parts = [each["train"] for each in splits]
    joined = type(parts[0]).joined(parts)

    data = []
    start = 0
    for phase, own in zip(phases, splits, strict=True):
        stop = start + len(own["train"])
        train = task.training(phase, joined, Draw(start, stop, phase.replay))
        data.append(PhaseData(task, phase, own, train))
        start = stop
    return data


def show_phase(phase: RunPhase, display: Display) -> None:
    """Show what a phase trains, unless the run has no phases."""
    if not phase.name:
        return
    line = f"{phase.name}: {phase.train.iters:,} batches"
    if phase.replay:
        line += f", {phase.replay:.0%} of its examples from earlier phases"
    display.line("phase", line)


def counted(splits: Mapping[str, ExampleSet]) -> str:
    return " / ".join(f"{part.count:,} {split}" for split, part in splits.items())


def show_cut(splits: Mapping[str, EncodedSplit], limit: int, what: str, display: Display) -> None:
    """Show how many texts, which are ``what``, had more than ``limit`` tokens; nothing if none."""
    if cut := sum(part.cut for part in splits.values()):
        text = f"longer than {limit} tokens (--max-seq-length): {cut} {what} cut"
        display.line("data", text)


def show_notes(read: Splits, columns: DataConfig, tokenizer: Any, display: Display) -> None:
    """Show what was decided about rows, what of them is not used, and which were left out."""
    lost = template_notes(read.rows["train"], read.format, columns, tokenizer)
    for note in (*read.notes, *lost, *read.bad_lines()):
        display.line("data", note)
