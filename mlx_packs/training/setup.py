"""What is trained in a run: shown before it starts, and set from a file."""

from pathlib import Path

from ..adapters.method import Trainable
from ..display import VERBOSE, Display, shown_count
from ..errors import PackError
from ..packs.manifest import adapter_config_of
from ..runtime import mx


def describe(trainable: Trainable, display: Display, base_weights: int) -> None:
    """Show what is trained, and its share of the base's weights."""
    count = trainable.parameter_count()
    share = f"{100 * count / base_weights:.3g} % of {shown_count(base_weights)} weights"
    display.line(trainable.method, f"{count:,} trainable parameters, {share} · {trainable.details}")
    for note in trainable.notes:
        display.line("note", note)
    if trainable.specs and adapter_config_of(trainable.specs) is None:
        display.line(
            "note",
            "ranks or scales differ between projections: stock mlx-lm cannot open this pack",
        )
    for group in trainable.groups:
        for geometry in group.members:
            display.line("", geometry.describe(), VERBOSE)


def load_adapters(trainable: Trainable, file: Path) -> None:
    """Set the trainable parameters from a file of exactly these tensors.

    Raises:
        PackError: if the file cannot be read, or has other tensors.
    """
    try:
        tensors = mx.load(str(file))
    except (RuntimeError, ValueError) as error:
        raise PackError(f"--resume-adapter-file {file}: {error}", "unreadable") from None
    trainable.load(tensors, str(file))
