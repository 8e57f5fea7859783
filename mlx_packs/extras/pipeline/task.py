"""``--pipeline``: the next token by ranks that have some blocks of the base each.

Ranks call the same methods in the same order. Steps are in the order of GPipe
(https://arxiv.org/abs/1811.06965): the states of all pieces of a batch go forward; then the
gradients of one piece after the other go back. A rank keeps what enters its blocks and computes
them again for their gradients, so that the activations of one piece are in memory at a time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.nn as nn
import mlx.optimizers as optimizers
from mlx.utils import tree_flatten, tree_map

from ...adapters.trainable import compiled
from ...config.lora import LoRAConfig
from ...data.dataset import Batch, Layout
from ...distributed.group import group
from ...evaluation.perplexity import Scorer
from ...objectives.causal_lm import CausalLM, LossOptions
from ...objectives.objective import Inputs, Loss, Objective, arrays_of
from ...objectives.score import Score
from ...packs.base import Base
from ...runtime import mx
from ...tasks.causal_lm import CausalLMTask
from ...tasks.task import Binding
from ...training.step import StartedStep, Stepper
from .adapters import check_in_blocks, check_splittable, join_stages, of_stage
from .stage import Stage


class PipelineStepper(Stepper):
    """Steps over batches of one run, by all ranks: each updates what it trains.

    ``stage`` is this rank's; ``loss`` is of what enters the blocks of the last rank.
    """

    def __init__(
        self, stage: Stage, loss: Loss, optimizer: optimizers.Optimizer, *others: Any
    ) -> None:
        super().__init__(stage.model, loss, optimizer, *others)
        self._stage = stage
        self.wait_for_each()

        own = tree_flatten(stage.model.trainable_parameters())
        trains = stage.stages.gathered(b"1" if own else b"")
        # whether a gradient comes from the next rank, and whether one goes back from here
        self._goes_back = any(trains[: stage.stages.rank + 1])
        self._passes_back = any(trains[: stage.stages.rank])

        def weighted(entering: mx.array, gradient: mx.array) -> mx.array:
            return (stage.output(entering) * gradient).sum()

        def loss_of(
            entering: mx.array, inputs: Inputs, layout: Layout
        ) -> tuple[mx.array, mx.array]:
            return self.loss({**inputs, "states": entering}, layout)

        self._output = self._compiled(stage.output)
        self._gradients = self._compiled(self._differentiated(weighted))
        self._loss_and_gradients = self._compiled(self._differentiated(loss_of))

    def start(self, batch: Batch, last: bool, alone: bool) -> StartedStep:
        return self.start_pieces([batch], last)

    def start_pieces(self, pieces: Sequence[Batch], last: bool) -> StartedStep:
        """Take a step on the pieces of a batch, as `Stepper.start_pieces`."""
        stage = self._stage
        arrays: list[Inputs] = []
        entered: list[mx.array] = []
        for piece in pieces:
            arrays.append(self.arrays(piece))
            entered.append(stage.entering(arrays[-1]["tokens"]))
            if not stage.stages.is_last:
                stage.pass_on(self._output(entered[-1]))

        sums = mx.zeros(2)  # of the losses, and what they are divided by
        gradients = self._pending[1] if self.waiting else None
        for piece, inputs, entering in zip(pieces, arrays, entered, strict=True):
            of_piece, added = self._go_back(entering, inputs, piece.layout)
            sums = sums + of_piece
            gradients = added if gradients is None else tree_map(mx.add, gradients, added)
            mx.eval(sums, gradients)

        total, number = stage.stages.from_last(sums)
        if self.waiting:
            number = self._pending[0] + number
        self._pending = number, gradients
        self.waiting += 1
        mx.eval(self._pending, total)

        denominator = sum(piece.denominator for piece in pieces)
        updated = self._update_waiting() if last else None
        return StartedStep(total, denominator, updated)

    def _go_back(self, entering: mx.array, inputs: Inputs, layout: Layout) -> tuple[mx.array, dict]:
        """Return loss and count of a piece, zeros before the last rank, and the own gradients."""
        stage = self._stage
        sums = mx.zeros(2)
        if stage.stages.is_last:
            values, gradients = self._loss_and_gradients(entering, inputs, layout)
            if self.scaled:
                values = values[1]
            sums = mx.stack([mx.array(value, mx.float32) for value in values])
        elif self._goes_back:
            _, gradients = self._gradients(entering, stage.gradient(entering))
        else:
            return sums, self.model.trainable_parameters()

        if not self._passes_back:
            return sums, gradients
        of_parameters, of_entering = gradients
        stage.pass_back(of_entering)
        return sums, of_parameters

    def _differentiated(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function's value, and the gradients of the parameters and of what enters."""

        def of_parameters(parameters: dict, *arrays: mx.array) -> Any:
            self.model.update(parameters)
            return function(*arrays)

        both = [0, 1] if self._passes_back else 0
        gradients = mx.value_and_grad(of_parameters, argnums=both)
        return lambda *arrays: gradients(self.model.trainable_parameters(), *arrays)


class PipelinedCausalLM(CausalLM):
    """The next token of each input, by the ranks of a pipeline.

    On the last rank `loss` reads the states that enter in the place of tokens.
    """

    def __init__(self, stage: Stage, score: Callable[..., Score], options: LossOptions) -> None:
        super().__init__(stage.model, stage.head, None, score, options)
        self.stage = stage

    def make_stepper(self, optimizer: optimizers.Optimizer, *others: Any) -> PipelineStepper:
        return PipelineStepper(self.stage, self.loss, optimizer, *others)


class PipelinedScorer(Scorer):
    """Scores batches by all ranks; each of them has the scores."""

    def __init__(self, model: nn.Module, stage: Stage) -> None:
        super().__init__(model, stage.head)
        self._stage = stage
        self._output = compiled(model, stage.output)

    def batch_values(self, batch: Batch) -> list[mx.array]:
        """Return NLL [M] and whether the target ranks first [M], both in float32."""
        stage = self._stage
        inputs = arrays_of(batch)
        entering = stage.entering(inputs["tokens"])
        if stage.stages.is_last:
            values = self._forward({**inputs, "states": entering}, batch.layout)
        else:
            stage.pass_on(self._output(entering))
            values = [mx.zeros(inputs["targets"].shape)] * 2
        return [stage.stages.from_last(value.astype(mx.float32)) for value in values]


class PipelinedTask(CausalLMTask):
    """``--task lm`` on a rank of a pipeline, which completes no sample."""

    lazy_base = True
    completes_text = False
    join_ranks = staticmethod(join_stages)
    trained_here = staticmethod(of_stage)

    def target(self, base: Base) -> tuple[Base, LoRAConfig]:
        check_splittable(base, group().size)
        check_in_blocks(base, self.lora)
        return super().target(base)

    def bind(self, binding: Binding) -> list[Objective]:
        stage = Stage(binding.trainable.model, group())
        self.scorer = PipelinedScorer(binding.trainable.model, stage)
        objective = PipelinedCausalLM(stage, self.scorer.score, self.loss_options())
        return [objective] * len(binding.data)
