"""``--objective projection-stack``: a cheap proxy, evaluated by the base itself."""

from collections.abc import Sequence

from ...adapters.attach import attach
from ...adapters.trainable import Trainable
from ...config.lora import LoRAConfig
from ...evaluation.perplexity import Scorer
from ...memory.matmul_path import choose_matmul_path
from ...objectives.causal_lm import split_head
from ...objectives.objective import Objective
from ...objectives.projection_stack import Graph, graph_of
from ...packs.base import Base
from ..fit import Fit
from ..phase_data import PhaseData
from ..planning import MemoryChoice
from ..settings import Run
from .causal_lm import CausalLMTask, Outcome
from .task import Task


class ProjectionStackTask(CausalLMTask):
    """``--task lm`` on the projection stack over a base, of which few weights are read."""

    lazy_base = True
    unplanned_recompute = "none"

    graph: Graph

    def target(self, base: Base) -> tuple[Base, LoRAConfig]:
        """Return the stack over the base, and those of its modules that are adapted."""
        self.base, self.graph = base, graph_of(base, self.lora)
        for line in self.graph.lines():
            self.display.line("graph", line)
        return self.graph.base, self.graph.lora

    def bind(
        self, trainable: Trainable, data: Sequence[PhaseData], run: Run, memory: MemoryChoice
    ) -> list[Objective]:
        """Return the loss of the targets; no token sees another, so packing needs nothing."""
        head, preparation = self.graph.head(), self.graph.preparation
        self.scorer = Scorer(trainable.model, head, preparation.prepare)
        return [self.objective_of(trainable, head, preparation)] * len(data)

    def outcome(self, trainable: Trainable, goal: PhaseData, fit: Fit) -> Outcome:
        """Return what the base's own forward pass gives without and with the trained adapters."""
        own_before, own_after = fit.ends(goal.phase)
        graph = self.graph.facts | {"ppl_before": own_before.ppl, "ppl_after": own_after.ppl}

        base, display = self.base, self.display
        batches = goal.held_out().once()
        with display.working("eval", "loading the whole base model"):
            tokens, steps = batches[-1].inputs["tokens"].size, 2 * len(batches)
            matmul_path = choose_matmul_path(base.model, tokens, steps=steps).matmul_path
        fallback = self.train.train_fp16_fallback
        attached = attach(
            base, specs=trainable.specs, matmul_path=matmul_path, fp16_fallback=fallback
        )

        try:
            head = split_head(base.model)
            scores, texts, answers = [], {}, []
            with display.task("eval", steps, "held-out batches, whole base model") as bar:
                for when, tensors in (
                    ("before", attached.tensors()),
                    ("after", trainable.tensors()),
                ):
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
        graph, lines = report["objective"], super().report_lines(report)
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
