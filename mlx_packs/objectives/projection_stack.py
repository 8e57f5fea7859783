"""The projection-stack objective: a cheap proxy of the full forward pass, for comparison.

The proxy, ``projection-stack``, is a base without attention, feed-forwards, norms and residuals:
rows of the embedding table go through the attention's output projections, one after another, to
the head. It needs no block's other weights, and it is no language model. It is here to be compared
with the true forward, so a run under it is evaluated on the true forward all the same.
"""

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.nn as nn

from ..adapters.attach import check_bare
from ..bases.geometry import probe
from ..bases.mapped_embedding import MappedEmbedding, map_embedding
from ..bases.shapes import GeometryError, check_num_layers
from ..config.lora import LoRAConfig
from ..data.dataset import Batch
from ..errors import PackError
from ..nn.frozen_weight import frozen_weight
from ..nn.quantized import EMBEDDINGS, LINEARS
from ..nn.stack import ProjectionStack
from ..nn.surgery import block_prefixes
from ..runtime import mx
from .causal_lm import Head, Preparation, frozen_head

if TYPE_CHECKING:
    from ..bases.model import BaseModel

STACK = "projection-stack"

# The attention's output projection in a block: of the Llama family, of GPT-2.
_PROJECTIONS = ("self_attn.o_proj", "attn.c_proj")
_TABLES = ("embed_tokens", "wte")
_HEAD = "lm_head"
_PROXY = (
    "a cheap proxy, not the full transformer: no attention, feed-forward, norm, residual or position; "
    "no token sees another"
)


@dataclass(frozen=True)
class Graph:
    """The stack of which a run's loss is computed."""

    base: "BaseModel"  # its model is the graph, under the base's own paths
    lora: LoRAConfig  # of those of its modules that have adapters
    preparation: Preparation
    facts: dict  # for the manifest

    def head(self) -> Head:
        """Return it once adapters are attached."""
        stack = self.base.model
        return Head(stack.hidden, stack.logits, frozen_head(stack.head))

    def lines(self) -> list[str]:
        """Return the facts of the stack for a run's report."""
        count, head = len(self.facts["stack"]), self.facts["head"]
        return [
            f"{STACK} · {count} of {self.facts['blocks']} blocks · head {head} · embedding "
            f"{self.facts['embedding']}",
            self.facts["note"],
        ]


def graph_of(base: "BaseModel", lora: LoRAConfig) -> Graph:
    """Return the projection stack over a base, whose other weights are not read."""
    check_bare(base)
    for flag, names in (
        ("--target-modules", lora.target_modules),
        ("--modules-to-save", lora.modules_to_save),
    ):
        if not names:
            continue
        raise PackError(
            f"{flag} {','.join(names)}: --objective {STACK} adapts the "
            "attention's output projections and the head, and nothing else is in its graph. Leave "
            "it out, or train --objective transformer.",
            "conflict",
        )
    modules = dict(base.model.named_modules())
    blocks = block_prefixes(base.model)
    check_num_layers(lora.num_layers, len(blocks))
    table_path, table = _table(base, modules)
    head = _head(base, modules)
    stack, left_out = _square(base, modules, blocks, table_path)
    trained = tuple(blocks[-lora.num_layers :] if lora.num_layers > 0 else blocks)
    adapted = [path for path, _ in stack if path.startswith(tuple(f"{b}." for b in trained))]
    adapted += [head[0]] if head else []
    if not adapted:
        raise PackError(
            f"--objective {STACK}: {base.name} has nothing to train in it: {left_out or 'no block'}"
            ", and its head is the frozen embedding table. Train --objective transformer.",
            "unsupported",
        )
    mapped: MappedEmbedding | str = f"the head is this table ({table_path})"
    if head:
        key = base.weight_map.get(f"{table_path}.weight")
        mapped = map_embedding(base.path, key if isinstance(key, str) else None, table)
    in_memory = isinstance(mapped, str)
    model = ProjectionStack(blocks, stack, (table_path, table) if in_memory else None, head)
    model.freeze()
    mx.eval(model.parameters())
    note = _PROXY
    if left_out:
        note += f"; without {left_out}" if stack else f"; the head alone, since {left_out}"
    facts = {
        "graph": STACK,
        "note": note,
        "stack": [path for path, _ in stack],
        "blocks": len(blocks),
        "head": head[0] if head else f"{table_path}, tied and frozen",
        "embedding": f"in memory: {mapped}" if in_memory else "frozen, mapped from its file",
    }
    lora = dataclasses.replace(lora, target_modules=tuple(adapted), num_layers=-1)
    preparation = Preparation() if in_memory else _MappedRows(mapped)
    return Graph(dataclasses.replace(base, model=model, is_lazy=False), lora, preparation, facts)


class _MappedRows(Preparation):
    """Rows of an embedding table that stays in its file, in the place of tokens."""

    def __init__(self, table: MappedEmbedding) -> None:
        self._table = table

    def prepare(self, batch: Batch) -> Batch:
        """Add states [B, T, D]."""
        return batch.having(states=self._table(batch.inputs["tokens"]))


def _table(base: "BaseModel", modules: dict[str, nn.Module]) -> tuple[str, nn.Module]:
    """Return path and module of the embedding table."""
    for path, module in modules.items():
        if path.rpartition(".")[2] in _TABLES and isinstance(module, (nn.Embedding, *EMBEDDINGS)):
            return path, module
    raise PackError(
        f"--objective {STACK}: {base.name} has no embedding table called {' or '.join(_TABLES)}. "
        "Train --objective transformer.",
        "unsupported",
    )


def _head(base: "BaseModel", modules: dict[str, nn.Module]) -> tuple[str, nn.Module] | None:
    """Return path and module of the head; None where the embedding table is it."""
    for path, module in modules.items():
        if path.rpartition(".")[2] == _HEAD and isinstance(module, (nn.Linear, *LINEARS)):
            return path, module
    text = base.config.get("text_config") or base.config
    if text.get("tie_word_embeddings", base.config.get("tie_word_embeddings")) is False:
        raise PackError(
            f"--objective {STACK}: {base.name} has a head of its own, but none called {_HEAD}. "
            "Train --objective transformer.",
            "unsupported",
        )
    return None


def _square(
    base: "BaseModel", modules: dict[str, nn.Module], blocks: list[str], table_path: str
) -> tuple[list[tuple[str, nn.Module]], str]:
    """Return the projections [D, D] of the blocks, D the table's width, and others' faults."""
    table = modules[table_path]
    width = (frozen_weight(table).shape if isinstance(table, EMBEDDINGS) else table.weight.shape)[1]
    stack, faults = [], []
    for block in blocks:
        paths = [f"{block}.{tail}" for tail in _PROJECTIONS]
        path = next((path for path in paths if path in modules), "")
        module = modules.get(path)
        if not isinstance(module, (nn.Linear, *LINEARS)):
            faults.append(f"no {' or '.join(tail.rpartition('.')[2] for tail in _PROJECTIONS)}")
            continue
        try:
            geometry = probe(path, module, base.config)
        except GeometryError:
            faults.append(f"{path.rpartition('.')[2]} is of a geometry that cannot be probed")
            continue
        if geometry.in_features == geometry.out_features == width:
            stack.append((path, module))
        else:
            sizes = f"{geometry.in_features} -> {geometry.out_features}"
            faults.append(f"{geometry.name} is {sizes}, not {width} -> {width}")
    counts = sorted(Counter(faults).items())
    return stack, "; ".join(f"{fault} in {n} of {len(blocks)} blocks" for fault, n in counts)
