"""Kinds whose subject is the checkpoint of a base model, which a stranger made."""

from mlx_packs.bases.loading import lazy_base
from tests.fuzz.kind import SUBJECT, Call, Kind, command, library

PLAN = command("plan", "--model", SUBJECT, "--memory", "1", "--batch-size", "1")
GENERATE = ("generate", "--model", SUBJECT, "--prompt", "a", "--max-tokens", "1", "--raw")


def open_lazily() -> None:
    """Load the subject without reading its weights, as `packs import` does."""
    lazy_base(SUBJECT)


class CheckpointKind(Kind):
    """A base: planned, loaded, and now and then generated from, quantized or trained on."""

    def cheap(self) -> list[Call]:
        """Return the plan, and loading it lazily."""
        return [PLAN, library(open_lazily, "lazy_base")]

    def whole(self) -> list[Call]:
        """Return commands that read the weights."""
        return [command(*GENERATE)]
