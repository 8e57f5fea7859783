"""The ranks of a run as stages of a pipeline: what that needs, and what a rank trains."""

from ...adapters.trainable import Trainable
from ...config.lora import LoRAConfig
from ...display import Display
from ...distributed.group import group, join
from ...errors import PackError, flag_of
from .adapters import PipelinedAdapters
from .stages import Stages


def join_stages(lora: LoRAConfig) -> None:
    """Let the ranks be the stages of a pipeline from here on.

    Raises a PackError if this process is alone, or a setting needs the whole base on one rank.
    """
    ranks = group()
    if ranks.is_alone:
        raise PackError(
            "--pipeline: splits a base over several machines. Pass --hosts too, or leave it out.",
            "conflict",
            "pipeline",
        )

    for name in lora.changed(("dropout", "modules_to_save")):
        raise PackError(
            f"{flag_of(name)}: does not go with --pipeline. Leave one of them out.",
            "conflict",
            name,
        )

    join(Stages(ranks))


def of_stage(trainable: Trainable, display: Display) -> Trainable:
    """Return what a rank trains: what is in its own blocks."""
    with display.working("pipeline", "reading the blocks of this rank"):
        pipelined = PipelinedAdapters(trainable, group())
    for line in pipelined.lines():
        display.line("pipeline", line)
    return pipelined
