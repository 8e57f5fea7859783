"""Attach what trains to a base and say so."""

from pathlib import Path

from ..adapters.method import Trainable
from ..display import VERBOSE, Display, shown_count
from ..errors import PackError
from ..packs.manifest import adapter_config_of
from ..runtime import mx


def describe(attached: Trainable, display: Display, base_weights: int) -> None:
    """Show what is trained, and which share of the base's weights that is."""
    count = attached.parameter_count()
    share = f"{100 * count / base_weights:.3g} % of {shown_count(base_weights)} weights"
    display.line(attached.method, f"{count:,} trainable parameters, {share} · {attached.details}")
    for note in attached.notes:
        display.line("note", note)
    if attached.specs and adapter_config_of(attached.specs) is None:
        display.line(
            "note",
            "ranks or scales differ between projections: stock mlx-lm cannot open this pack",
        )
    for group in attached.groups:
        for geometry in group.members:
            display.line("", geometry.describe(), VERBOSE)


def load_adapters(attached: Trainable, file: Path) -> None:
    """Start from the tensors of a file; they must be exactly those of this run."""
    try:
        tensors = mx.load(str(file))
    except (RuntimeError, ValueError) as error:
        raise PackError(f"--resume-adapter-file {file}: {error}", "unreadable") from None
    attached.load(tensors, str(file))
