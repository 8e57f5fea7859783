"""The projection-stack objective: a cheap proxy of the full forward pass, for comparison.

The proxy, ``projection-stack``, is a base without attention, feed-forwards, norms and residuals:
rows of the embedding table go through the attention's output projections, one after another, to
the head. It needs no block's other weights, and it is no language model. It is here to be compared
with the true forward, so a run under it is evaluated on the true forward all the same.
"""

import copy
import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.nn as nn
from mlx.utils import tree_unflatten

from ..adapters.attach import attach, check_bare
from ..bases.files import weight_files
from ..bases.geometry import GeometryError, check_num_layers, probe
from ..config.lora import LoRAConfig
from ..data.dataset import Batch
from ..errors import PackError
from ..evaluation.perplexity import Scorer
from ..memory.matmul_path import choose_matmul_path
from ..nn.frozen_weight import frozen_weight
from ..nn.quantized import EMBEDDINGS, LINEARS
from ..nn.surgery import block_prefixes
from ..nn.tables_on_disk import EMBEDDINGS as TABLES
from ..nn.tables_on_disk import put_table_on_disk
from ..nn.wrapped import FrozenBlock, Injection
from ..objectives.causal_lm import Head, Preparation, frozen_head, split_head
from ..objectives.objective import Objective
from ..offload.tables import StoredArray, StoredTable
from ..packs.base import Base
from ..reading import read_header
from ..runtime import mx
from ..tasks.causal_lm import CausalLMTask, Outcome
from ..tasks.task import Binding, Task, Trained

if TYPE_CHECKING:
    from ..bases.model import BaseModel

STACK = "projection-stack"

# The attention's output projection in a block: of the Llama family, of GPT-2.
_PROJECTIONS = ("self_attn.o_proj", "attn.c_proj")
_TABLES = ("embed_tokens", "wte")
_HEAD = "lm_head"
_PROXY = (
    "a cheap proxy, not the full transformer: no attention, feed-forward, norm, residual or "
    "position; no token sees another"
)


class _Part(nn.Module):
    """A node in the tree of paths."""


class _NoTable(nn.Module):
    """Replaces an embedding table that is not in memory; its rows are injected as states."""

    def __call__(self, tokens: mx.array) -> mx.array:
        """Raise: without injected rows there is nothing to return."""
        raise ValueError("rows of the embedding table must be injected: it is not in memory")


class ProjectionStack(nn.Module):
    """Embedding rows, square projections one after the other, and the head.

    Semantics: x = embedding[tokens]; for P in projections: x = P(x); logits = head(x)
    """

    def __init__(
        self,
        blocks: Sequence[str],  # paths of all, with a projection in the stack or without
        projections: Sequence[tuple[str, nn.Module]],  # path and module, in the order of blocks
        embedding: tuple[str, nn.Module] | None,  # None where its rows are injected instead
        head: tuple[str, nn.Module] | None,  # None where it is the table
    ) -> None:
        super().__init__()
        modules = [*projections]
        modules += [pair for pair in (embedding, head) if pair is not None]
        empty = [
            (block, _Part())
            for block in blocks
            if not any(path.startswith(f"{block}.") for path, _ in modules)
        ]

        for name, child in tree_unflatten([*modules, *empty]).items():
            self[name] = _as_modules(child)

        self._blocks = tuple(blocks)
        self._projections = tuple(path for path, _ in projections)
        self._embedding = embedding and embedding[0]
        self._head = head and head[0]

        if embedding is None:
            self["table"] = FrozenBlock(_NoTable(), Injection(), is_last=True)

    @property
    def layers(self) -> list[nn.Module]:
        return [self.at(path) for path in self._blocks]

    def at(self, path: str) -> nn.Module:
        node = self
        for part in path.split("."):
            node = node[int(part)] if isinstance(node, list) else node[part]
        return node

    def hidden(self, tokens: mx.array, cache: object = None) -> mx.array:
        """Map tokens [B, T] to states [B, T, D]; packed examples need no mask here."""
        x = self.at(self._embedding)(tokens) if self._embedding else self["table"](tokens)
        for path in self._projections:
            x = self.at(path)(x)
        return x

    @property
    def head(self) -> nn.Module:
        """The linear that makes logits, or the table that does where they are tied."""
        return self.at(self._head or self._embedding)

    def logits(self, states: mx.array) -> mx.array:
        """Map states [..., D] to [..., V]."""
        head = self.head
        if self._head:
            return head(states)
        return head.as_linear(states)

    def __call__(self, tokens: mx.array, cache: object = None) -> mx.array:
        """Map tokens [B, T] to logits [B, T, V]."""
        return self.logits(self.hidden(tokens, cache))


def _as_modules(node: Any) -> nn.Module | list:
    if isinstance(node, nn.Module):
        return node
    if isinstance(node, list):
        return [_as_modules(child) for child in node]
    part = _Part()
    for name, child in node.items():
        part[name] = _as_modules(child)
    return part


@dataclass(frozen=True)
class Graph:
    """The stack of which a run's loss is computed."""

    base: "BaseModel"  # its model is the graph, under the base's own paths
    lora: LoRAConfig  # of its modules with adapters
    preparation: Preparation
    facts: dict  # for the manifest

    def head(self) -> Head:
        """Return it once adapters are attached."""
        stack = self.base.model
        return Head(stack.hidden, stack.logits, frozen_head(stack.head))


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
    stack = _square(base, modules, blocks, table)
    left_out = f"the output projection of {len(blocks) - len(stack)} blocks, which is not square"

    trained = blocks[-lora.num_layers :] if lora.num_layers > 0 else blocks
    adapted = [path for path, _ in stack if path.startswith(tuple(f"{b}." for b in trained))]
    if head:
        adapted.append(head[0])

    if not adapted:
        raise PackError(
            f"--objective {STACK}: {base.name} has nothing to train in it: no square output "
            "projection, and a head that is the frozen embedding table. Train --objective "
            "transformer.",
            "unsupported",
        )

    rows: StoredTable | str = f"the head is this table ({table_path})"
    if head:
        rows = _stored_rows(base, table_path, table)
    in_memory = isinstance(rows, str)

    embedding = (table_path, table) if in_memory else None
    model = ProjectionStack(blocks, stack, embedding, head)
    model.freeze()
    mx.eval(model.parameters())

    note = _PROXY
    if len(stack) < len(blocks):
        note += f"; without {left_out}"

    facts = {
        "graph": STACK,
        "note": note,
        "stack": [path for path, _ in stack],
        "blocks": len(blocks),
        "head": head[0] if head else f"{table_path}, tied and frozen",
        "embedding": f"in memory: {rows}" if in_memory else "frozen, read from its file",
    }

    lora = dataclasses.replace(lora, target_modules=tuple(adapted), num_layers=-1)
    preparation = Preparation() if in_memory else _StoredStates(table, rows)
    return Graph(dataclasses.replace(base, model=model, is_lazy=False), lora, preparation, facts)


class _StoredStates(Preparation):
    """Rows of an embedding table that stays in its file, in the place of tokens."""

    def __init__(self, table: nn.Module, rows: StoredTable) -> None:
        self._table = copy.copy(table)
        put_table_on_disk(self._table, rows)

    def prepare(self, batch: Batch) -> Batch:
        return batch.having(states=self._table(mx.array(batch.inputs["tokens"])))


def _stored_rows(base: "BaseModel", path: str, table: nn.Module) -> StoredTable | str:
    """Return the rows of a table in the checkpoint's files, or why it must be in memory."""
    if type(table) not in TABLES:
        return f"rows of a {type(table).__name__} are not read from a file"
    source = base.weight_map.get(f"{path}.weight")
    if not isinstance(source, str):
        return "its tensor in the files is not known"

    files = {name: file for file in weight_files(base.path) for name in read_header(file)[0]}
    stored = {}
    for part, array in table.parameters().items():
        name = f"{source.removesuffix('weight')}{part}"
        if name not in files:
            return f"it was quantized while it was loaded: the files have no {name}"
        stored[part] = StoredArray.find(files[name], name, array.dtype)
        if stored[part].shape != array.shape:
            return f"{name} is stored in the files as {list(stored[part].shape)}"
    return StoredTable(stored, [], lambda _: None)


def _table(base: "BaseModel", modules: dict[str, nn.Module]) -> tuple[str, nn.Module]:
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
    base: "BaseModel", modules: dict[str, nn.Module], blocks: list[str], table: nn.Module
) -> list[tuple[str, nn.Module]]:
    """Return the output projections [D, D] of the blocks, D the table's width."""
    weight = frozen_weight(table) if isinstance(table, EMBEDDINGS) else table.weight
    width = weight.shape[1]

    stack = []
    for path in (f"{block}.{tail}" for block in blocks for tail in _PROJECTIONS):
        module = modules.get(path)
        if not isinstance(module, (nn.Linear, *LINEARS)):
            continue
        with suppress(GeometryError):  # its tensors contradict each other
            geometry = probe(path, module, base.config)
            if geometry.in_features == geometry.out_features == width:
                stack.append((path, module))
    return stack


class ProjectionStackTask(CausalLMTask):
    """``--task lm`` on the projection stack over a base, of which few weights are read."""

    lazy_base = True
    unplanned_recompute = "none"

    graph: Graph

    def target(self, base: Base) -> tuple[Base, LoRAConfig]:
        self.base = base
        self.graph = graph_of(base, self.lora)
        facts = self.graph.facts
        described = f"{STACK} · {len(facts['stack'])} of {facts['blocks']} blocks"
        described += f" · head {facts['head']} · embedding {facts['embedding']}"
        self.display.line("graph", described)
        self.display.line("graph", facts["note"])
        return self.graph.base, self.graph.lora

    def bind(self, binding: Binding) -> list[Objective]:
        head = self.graph.head()
        preparation = self.graph.preparation
        self.scorer = Scorer(binding.trainable.model, head, preparation.prepare)
        return [self.objective_of(binding.trainable, head, preparation)] * len(binding.data)

    def outcome(self, trained: Trained) -> Outcome:
        """Return what the base's own forward pass gives at the start of the run and after it."""
        own_before, own_after = trained.ends()
        graph = self.graph.facts | {"ppl_before": own_before.ppl, "ppl_after": own_after.ppl}

        base = self.base
        display = self.display
        batches = trained.last.held_out.once()
        with display.working("eval", "loading the whole base model"):
            tokens = batches[-1].inputs["tokens"].size
            steps = 2 * len(batches)
            matmul_path = choose_matmul_path(base.model, tokens, steps=steps).matmul_path

        fallback = self.train.train_fp16_fallback
        attached = attach(
            base, specs=trained.trainable.specs, matmul_path=matmul_path, fp16_fallback=fallback
        )

        with trained.initial.active():
            start = trained.trainable.tensors()

        try:
            head = split_head(base.model)
            scores = []
            texts = {}
            answers = []
            with display.task("eval", steps, "held-out batches, whole base model") as bar:
                for when, tensors in (("before", start), ("after", trained.trainable.tensors())):
                    attached.load(tensors, when)
                    scores.append(Scorer(base.model, head).score(batches, bar.advance))
                    texts[when] = self.sample.complete(base)
                    answers.append(self.exam and self.exam.answers())
        finally:
            attached.detach()
        return Outcome(*scores, texts, answers, graph)

    @classmethod
    def report_lines(cls, report: dict) -> list[str]:
        """Return the lines of the task, with the stack's own perplexity after the base's."""
        graph = report["objective"]
        lines = super().report_lines(report)

        at = next(number for number, line in enumerate(lines, 1) if line.startswith("done"))
        lines.insert(
            at,
            f"graph   the {graph['graph']}'s own PPL {graph['ppl_before']:,.2f} → "
            f"{graph['ppl_after']:,.2f}. The PPL above is the base model's",
        )
        return lines


def task_of(task: type[Task]) -> type[Task]:
    """Return the class of a task on the projection stack; a loss of its own stays its own."""
    if not issubclass(task, CausalLMTask):
        return task
    return type(task.__name__, (ProjectionStackTask, task), {})
