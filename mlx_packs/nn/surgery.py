"""Which modules of a base others replace while adapters are on it; these are imported then."""

import itertools
from dataclasses import dataclass

import mlx.nn as nn
from mlx.utils import tree_unflatten

from ..late import load
from .gated_delta import gated_delta_layer
from .lora import GroupedLoRA


class GroupedBlock(nn.Module):
    """A block whose projections of one input are a group."""

    recompute = False  # whether the backward computes the operations between its groups again


@dataclass(frozen=True)
class BlockKind:
    """A kind of block that a `GroupedBlock` replaces."""

    code: str  # the class, which takes the block and the adapters of its two groups
    shared: tuple[str, ...]  # projections that read the input of the block
    last: str  # the projection that reads what these become

    def replaced(
        self, block: nn.Module, shared: GroupedLoRA | None, last: GroupedLoRA | None
    ) -> GroupedBlock:
        return load(self.code)(block, shared, last)


ATTENTION = BlockKind("nn.blocks:GroupedAttention", ("q_proj", "k_proj", "v_proj"), "o_proj")
_KINDS = {
    "Attention": ATTENTION,
    "MLP": BlockKind("nn.blocks:GroupedMLP", ("gate_proj", "up_proj"), "down_proj"),
}
# Modules of mlx-lm whose attention has q_proj, k_proj, v_proj, o_proj, rope, scale (and q_norm,
# k_norm).
_FAMILIES = ("mlx_lm.models.qwen3", "mlx_lm.models.qwen2", "mlx_lm.models.llama")


def block_kind(module: nn.Module | None) -> BlockKind | None:
    """Return the kind of an attention or feed-forward of mlx-lm; None of other modules."""
    if type(module).__module__ not in _FAMILIES:
        return None
    return _KINDS.get(type(module).__name__)


def recurrent_layer(module: nn.Module) -> nn.Module | None:
    """Return what a gated delta layer of mlx-lm is replaced by; None of other modules."""
    if "A_log" not in module or "dt_bias" not in module:
        return None
    return gated_delta_layer(module)


def block_prefixes(model: nn.Module) -> list[str]:
    """Return the paths of the transformer blocks, in order; they are ``model.layers``."""
    paths = {id(m): path for path, m in model.named_modules()}
    return [paths[id(block)] for block in model.layers]


def replace_modules(model: nn.Module, modules: list[tuple[str, nn.Module]]) -> None:
    """Put each module at its path; one inside another goes into the new one."""

    def depth(item: tuple[str, nn.Module]) -> int:
        return item[0].count(".")

    for _, level in itertools.groupby(sorted(modules, key=depth), key=depth):
        model.update_modules(tree_unflatten(list(level)))
