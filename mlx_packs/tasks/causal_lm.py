"""The next token of text, of completions and of chats, by a causal language model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from .. import runtime
from ..adapters.trainable import Trainable
from ..bases.model import check_forward
from ..config.choices import ANSWER_METRICS, answer_metric_of
from ..config.data import MOST_QUESTIONS, DataConfig, metric_of
from ..config.lora import LoRAConfig
from ..data.batches import evaluation_set
from ..data.dataset import Batch, Dataset
from ..data.encoding import Examples
from ..data.formats import TEXT, TOKEN_FORMATS, Row, format_of
from ..data.rows import Splits
from ..data.sampler import Draw, Sampler
from ..data.shapes import sequence_inputs
from ..data.sharing import plan_trees, training_batches
from ..errors import PackError
from ..evaluation.answers import Exam, questions_of
from ..evaluation.metrics import METRICS, Metric
from ..evaluation.perplexity import VALIDATED, PerplexityScore, Scorer
from ..evaluation.throughput import cut_prompts, measure_throughput
from ..memory.matmul_path import generation_path
from ..nn.blocks import attends_by_spans
from ..objectives.causal_lm import CausalLM, Head, LossOptions, Preparation, split_head
from ..objectives.frozen_activations import FrozenActivations, open_frozen_activations
from ..objectives.objective import Objective
from ..objectives.score import Score
from ..packs.base import Base
from ..packs.pack import Pack
from .phases import PhaseData, RunPhase
from .sample_prompt import SAMPLE_TOKENS, SamplePrompt, followed_rows, stored_sample
from .task import Binding, Summary, Trained, summarized
from .tokens import TokenTask, encode_phases

_PROMPT_TOKENS = 64  # of the prompt that the throughput gate completes


@dataclass(frozen=True)
class Outcome:
    """What the run has changed on the held-out examples of its last phase."""

    before: PerplexityScore
    after: PerplexityScore
    texts: dict[str, str | None]  # that complete the sample, ``before`` and ``after``
    answers: list[list[str] | None]  # the same, of the exam
    graph: dict  # the forward pass of the loss, for the manifest


class CausalLMTask(TokenTask):
    """``--task lm``."""

    validated = (*VALIDATED, *(f"valid_{metric}" for metric in ANSWER_METRICS))

    completes_text: ClassVar[bool] = True  # whether this process has all of the base
    shares_prefixes: ClassVar[bool] = True  # whether batches may be trees

    sample: SamplePrompt
    scorer: Scorer
    frozen: FrozenActivations | None = None
    exam: Exam | None = None  # with a metric
    validation_exam: Exam | None = None  # where --best is a number of answers

    def target(self, base: Base) -> tuple[Base, LoRAConfig]:
        """Keep the base for its samples, and adapt it as it is."""
        self.base = base
        return base, self.lora

    def encode(
        self, base: Base, phases: Sequence[RunPhase], splits: Sequence[Splits]
    ) -> list[PhaseData]:
        encoded = encode_phases(phases, splits, base, self.train, self.display)
        data = self.phase_data(phases, encoded)

        split = data[-1].held_out_split
        columns = phases[-1].columns
        self.sample = self._prompt_of(splits[-1].first_usable(split), columns)
        rows = followed_rows(self.train, splits[-1])
        self.followed = [self._prompt_of(row, columns) for row in rows]

        metric = self.calls.metric
        if metric is None and (name := metric_of(self.train.metric, columns)):
            metric = METRICS[name]
        if metric is not None and self.completes_text:
            self.exam = self._exam(metric, columns, splits[-1], split, self.train.test_batches)
        if name := answer_metric_of(self.train.best):
            self.validation_exam = self._validation_exam(METRICS[name], columns, splits[-1])
        return data

    def _prompt_of(self, row: Row, columns: DataConfig) -> SamplePrompt:
        tokenizer = self.base.tokenizer
        row_format = format_of(row, columns, TOKEN_FORMATS)
        is_raw = row_format is TEXT or not tokenizer.has_chat_template
        return SamplePrompt.of(row_format.read(row, columns, tokenizer), self.base, is_raw)

    def training(self, phase: RunPhase, examples: Examples, draw: Draw) -> Dataset:
        """Packed batches are aligned if the attention of the model allows it."""
        t = phase.train
        inputs = sequence_inputs(t.max_seq_length)
        aligned = t.packing and not draw.replay and attends_by_spans(self.base.model)
        sampler = Sampler(examples.lengths, t.batch_size, inputs, t.seed, t.packing, draw, aligned)
        trees = self._plan_trees(phase, examples, sampler) if self.shares_prefixes else None
        return training_batches(trees, examples, sampler)

    def evaluation(self, phase: RunPhase, examples: Examples, chosen: np.ndarray) -> Dataset:
        """Return examples by length."""
        t = phase.train
        if self.trees:  # for which the model is checked
            trees = plan_trees(t, self.lora, examples, chosen)
            if trees is not None:
                return trees.held_out(examples, t.max_seq_length, chosen)
        return evaluation_set(examples, t.batch_size, t.max_seq_length, chosen, runtime.COMPILES)

    def _exam(
        self, metric: Metric, columns: DataConfig, splits: Splits, split: str, batches: int | None
    ) -> Exam:
        """Ask about the first examples of a split of the last phase, as many as ``batches`` have.

        None is the sample that is evaluated, in its order.
        """
        train = self.train
        most = MOST_QUESTIONS
        rows = list(splits.usable(split))
        if batches is None:
            rows = [rows[i] for i in np.random.RandomState(0).permutation(len(rows))]
        elif batches > 0:
            most = min(most, batches * train.batch_size)

        row_format = format_of(splits.first_usable(split), columns, TOKEN_FORMATS)
        length = train.max_seq_length
        questions = questions_of(rows, row_format, columns, self.base, metric, length, most)
        return Exam(self.base, metric, questions, train.batch_size * length)

    def _validation_exam(self, metric: Metric, columns: DataConfig, splits: Splits) -> Exam:
        try:
            return self._exam(metric, columns, splits, "valid", self.train.val_batches)
        except PackError as error:
            text = error.message.replace("--metric ", "--best valid_")
            raise PackError(text, error.code, "best") from None

    def _validation_score(self, batches: Sequence[Batch]) -> Score:
        """Score validation examples, with answers if --best asks for them."""
        score = self.scorer.score(batches)
        if self.validation_exam is None:
            return score
        return self.validation_exam.validated(score)

    def bind(self, binding: Binding) -> list[Objective]:
        """Return the loss of the targets, which is one for all phases."""
        head = split_head(self.base.model)
        check_forward(self.base, self.sample.tokens)

        self.prepare_rows(binding.trainable, head)
        if self.exam is not None and self.train.test_batches is None:
            # no more questions than there are examples evaluated
            self.exam = self.exam.first(len(self.sampled(binding.data[-1])))
        if not self.trees:
            self.frozen = self._frozen_activations(binding, head)

        self.scorer = self.scorer_of(binding.trainable, head)
        return [self.objective_of(binding.trainable, head, self.frozen)] * len(binding.data)

    def _frozen_activations(self, binding: Binding, head: Head | None) -> FrozenActivations | None:
        """The cache of what is below the adapters, of all phases; None if there is none."""
        last = binding.data[-1]
        memory = binding.memory
        return open_frozen_activations(
            binding.trainable,
            head,
            replace(last.phase.train, iters=last.phase.stop),
            last.train.examples,
            memory.plan.peak_bytes if memory.plan else None,
            self.display,
        )

    def scorer_of(self, trainable: Trainable, head: Head | None) -> Scorer:
        """Return what scores held-out examples."""
        return Scorer(trainable.model, head)

    def objective_of(
        self, trainable: Trainable, head: Head | None, preparation: Preparation | None
    ) -> CausalLM:
        """Return the loss of the targets, which ``scorer`` scores."""
        return CausalLM(
            trainable.model,
            head,
            preparation,
            self.scorer.score,
            self.loss_options(),
            self._validation_score,
        )

    def loss_options(self) -> LossOptions:
        """Return what the loss of a target is; a task that only has another loss overrides this."""
        train = self.train
        return LossOptions(train.z_loss, train.label_smoothing, custom=self.calls.loss)

    def outcome(self, trained: Trained) -> Outcome:
        texts: dict[str, str | None] = {"before": None, "after": None}
        answers = []

        if self.completes_text:
            with trained.initial.active():
                texts["before"] = self.sample.complete(self.base)
                answers.append(self._answers())
            texts["after"] = self.sample.complete(self.base)
            answers.append(self._answers())

        return Outcome(*trained.ends(), texts, answers, {"graph": "transformer"})

    def summary(self, trained: Trained) -> Summary:
        last = trained.last
        outcome = self.outcome(trained)
        sample = self.sample.entry(**outcome.texts)
        samples = [sample] if any(outcome.texts.values()) else []

        report = {
            "objective": outcome.graph,
            "eval_traces": self.scorer.traces,
            "cache_frozen": self.frozen.to_json() if self.frozen else None,
            "shared_prefix": self.shared_report(last),
            "sample": sample,
            "raw_prompt": self.sample.is_raw,
        }

        answers = {}
        if self.exam is not None:
            answers["answers"] = self.exam.report(*outcome.answers).to_json()
            samples = self.exam.samples(*outcome.answers)
            report["samples"] = samples

        objective: dict = {
            "loss_on": last.splits["train"].loss_on,
            "ce_last_k": self.train.ce_last_k,
        }
        if self.calls.loss:
            objective["loss"] = self.calls.loss_name
        objective |= outcome.graph

        facts: dict = {}
        if samples:
            facts["samples"] = [stored_sample(each) for each in samples]
        return summarized(
            trained, objective, facts, report, answers, ends=(outcome.before, outcome.after)
        )

    def gate_values(
        self, gates: Mapping[str, float], pack: Pack, summary: Summary, held_out: Examples
    ) -> dict[str, float]:
        """The ratio of perplexities, and of decoding throughput only if a gate asks for it."""
        values = {"max_ppl_ratio": summary.eval["ppl_after"] / summary.eval["ppl_before"]}
        if "min_tps_ratio" in gates:
            prompts = cut_prompts([e.tokens for e in held_out.items], 1, _PROMPT_TOKENS)
            path = generation_path(self.base.model)
            with self.display.working("gates", "measuring decoding throughput"):
                _, with_pack = measure_throughput(
                    self.base, [None, pack], prompts, SAMPLE_TOKENS, matmul_path=path
                )
            values["min_tps_ratio"] = with_pack.tps_ratio

        return values

    def _answers(self) -> list[str] | None:
        """Return the base's answers as it is now; None without a metric."""
        if self.exam is None:
            return None

        with self.display.task("eval", len(self.exam.questions), "answers") as bar:
            return self.exam.answers(bar.advance)
