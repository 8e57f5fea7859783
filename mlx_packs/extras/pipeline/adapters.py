"""Adapters on a base of which each rank of a pipeline has some blocks, and what that needs."""

from typing import TYPE_CHECKING

import mlx.nn as nn
from mlx.utils import tree_flatten

from ...adapters.trainable import Trainable, TrainableWrapper
from ...bases.families import SPLITTABLE
from ...bases.geometry import Heads, select_targets
from ...config.lora import LoRAConfig
from ...display import Display, size
from ...distributed.group import group, join
from ...errors import PackError, flag_of
from ...memory.pipeline import stage_blocks
from ...nn.surgery import block_prefixes
from ...nn.wrapped import Injection
from ...runtime import mx
from .stage import RemoteBlock, RemoteEmbedding, RemoteHead, Stages

if TYPE_CHECKING:
    from ...bases.model import BaseModel

_TABLE = "model.embed_tokens"
_HEAD = "lm_head"


class PipelinedAdapters(TrainableWrapper):
    """The adapters of all ranks, of which each trains those in its own blocks.

    The base must be lazy: the weights of other ranks are taken off before they are read. Those of
    the own blocks are read here, on the first rank the embedding too, on the last norm and head.
    """

    def __init__(self, adapters: Trainable, stages: Stages) -> None:
        super().__init__(adapters)
        self._stages = stages

        prefixes = block_prefixes(self.model)
        own = stage_blocks(len(prefixes), stages.size)[stages.rank]
        self.blocks = own
        self._own = tuple(f"{prefixes[number]}." for number in own)

        self.swap(_remote_modules(self.base, own, stages))
        mx.eval(self.model.parameters())

    def tensors(self) -> dict[str, mx.array]:
        """Return the adapters of all ranks in float32, by name on disk; all ranks call it."""
        tensors = self.adapters.tensors()
        own = {name: a for name, a in tensors.items() if name.startswith(self._own)}
        united = self._stages.union(own)
        return {name: united[name] for name in tensors}


def check_splittable(base: "BaseModel", stages: int) -> None:
    """Raise a PackError unless a family is known to pass one array on, and has enough blocks."""
    family = base.config["model_type"]
    if family not in SPLITTABLE:
        raise PackError(
            f"--pipeline: the blocks of {base.name}, a {family}, cannot be split over ranks. The "
            f"families {', '.join(SPLITTABLE)} can.",
            "unsupported",
            "pipeline",
        )

    blocks = len(base.model.layers)
    if blocks < stages:
        raise PackError(
            f"--pipeline: {base.name} has {blocks} blocks, too few for {stages} ranks. Launch "
            f"{blocks} at most.",
            "conflict",
            "pipeline",
        )


def check_in_blocks(base: "BaseModel", lora: LoRAConfig) -> None:
    """Raise a PackError unless all adapters are in blocks, of which each is on one rank."""
    prefixes = tuple(f"{prefix}." for prefix in block_prefixes(base.model))
    for path, _ in select_targets(base.model, lora.target_modules, lora.num_layers):
        if not path.startswith(prefixes):
            raise PackError(
                f"--target-modules: {path} is in no block, and --pipeline trains adapters only "
                "in blocks. Leave one of them out.",
                "unsupported",
                "target_modules",
            )


def _remote_modules(base: "BaseModel", own: range, stages: Stages) -> list[tuple[str, nn.Module]]:
    """Return what takes the place of the modules of other ranks, by path."""
    model = base.model
    entry = Injection()
    remote: list[tuple[str, nn.Module]] = []
    blocks = zip(block_prefixes(model), model.layers, strict=True)
    for number, (path, block) in enumerate(blocks):
        if number not in own:
            injection = entry if number < own.start else None
            remote.append((path, RemoteBlock(block, injection)))

    has_head = _HEAD in model
    if not stages.is_first and (has_head or not stages.is_last):  # else the table is the head
        remote.append((_TABLE, RemoteEmbedding(Heads.of(base.config).hidden or 1)))
    if not stages.is_last and has_head:
        remote.append((_HEAD, RemoteHead()))
    return remote


def join_stages(lora: LoRAConfig) -> None:
    """Let the ranks be stages from here on; a PackError if a setting needs the base on one rank."""
    ranks = group()
    if ranks.is_alone:
        raise PackError(
            "--pipeline: splits a base over several machines. Pass --hosts too, or leave it out.",
            "conflict",
            "pipeline",
        )

    for name in lora.changed(("dropout", "modules_to_save")):
        raise PackError(
            f"{flag_of(name)}: cannot be combined with --pipeline. Leave one of them out.",
            "conflict",
            name,
        )

    join(Stages(ranks))


def of_stage(trainable: Trainable, display: Display) -> Trainable:
    """Return what a rank trains: what is in its own blocks."""
    with display.working("pipeline", "reading the blocks of this rank"):
        pipelined = PipelinedAdapters(trainable, group())
    own = pipelined.blocks
    nbytes = sum(a.nbytes for _, a in tree_flatten(pipelined.model.parameters()))
    here = f"here blocks {own.start + 1} to {own.stop}, {size(nbytes)}"
    display.line("pipeline", f"{group().size} ranks · {here}")
    return pipelined
