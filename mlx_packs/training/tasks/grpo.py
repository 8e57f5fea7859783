"""Completions that a reward function likes: the model generates them, and learns from the better ones.

https://arxiv.org/abs/2402.03300
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from ... import runtime
from ...adapters.trainable import Trainable
from ...config.schema import TrainConfig
from ...data.batches import make_batch
from ...data.encoding import Example
from ...data.formats import PROMPT
from ...data.left_out import template_notes
from ...data.prompts import Prompts, encode_prompts, wanted_text
from ...data.rows import Splits
from ...data.sampler import Sampler
from ...data.shapes import Shape, padded_length, padded_targets, sequence_inputs
from ...inference.generate import sample_batch, text_of
from ...objectives.causal_lm import split_head
from ...objectives.grpo import GRPO, Generated, PromptBatch
from ...objectives.score import REWARD, Score
from ...packs.base import Base
from ...runtime import mx
from ..fit import Fit
from ..held_out import sample
from ..phases import RunPhase
from ..planning import MemoryChoice
from ..precision import check_forward
from ..rewards import Reward, reward_of
from .causal_lm import SamplePrompt, add_noise, phase_reports, stored_sample
from .preference import outcome_lines, phase_start
from .task import Summary, Task

_MOST_AT_ONCE = 64  # completions that are generated together


@dataclass(frozen=True)
class RewardScore(Score):
    """The mean reward of a model's likeliest completions."""

    reward: float
    rows: int
    nll: float | None = None  # the reward with a minus, in lines of early versions
    ppl: float | None = None
    ppl_se: float | None = None
    accuracy: float | None = None
    measure: ClassVar[str] = REWARD
    numbers: ClassVar = ("valid_reward",)

    @property
    def value(self) -> float:
        """The reward."""
        return self.reward

    @property
    def entries(self) -> dict[str, float]:
        """Entries of the line in a run's metrics for validation examples."""
        return {"valid_reward": self.reward}

    @property
    def text(self) -> str:
        """The same in one line for people."""
        return f"reward {self.reward:.3f}"


@dataclass
class PromptDataset:
    """The prompts of a run by phase and split."""

    phases: tuple[RunPhase, ...]
    splits: list[dict[str, Prompts]]
    masks: ClassVar[Sequence[dict]] = ()

    def counts(self) -> dict[str, int]:
        """Return the number of prompts by split."""
        return {
            phase.manifest_key(split): len(prompts)
            for phase, splits in zip(self.phases, self.splits, strict=True)
            for split, prompts in splits.items()
        }

    def of(self, phase: RunPhase) -> dict[str, Prompts]:
        """Return the prompts of a phase by split."""
        return self.splits[self.phases.index(phase)]

    def shapes(self) -> set[Shape]:
        """Return the shape of the largest batch that may be generated."""
        return {self._largest(phase) for phase in self.phases}

    def _largest(self, phase: RunPhase) -> Shape:
        t, longest = phase.train, int(self.of(phase)["train"].lengths.max())
        inputs = sequence_inputs(t.max_seq_length)
        width = padded_length(min(longest + t.max_completion_length - 1, inputs), inputs)
        targets = min(t.max_completion_length, width) * t.sequences
        return width, padded_targets(targets, t.sequences * width)

    def sampler(self, phase: RunPhase) -> Sampler:
        """Return which prompts each batch of a phase has."""
        t, lengths = phase.train, self.of(phase)["train"].lengths
        return Sampler(lengths, t.batch_size, sequence_inputs(t.max_seq_length), t.seed)

    def batches(self, phase: RunPhase, start: int) -> Iterator[PromptBatch]:
        """Batches of a phase without end, from batch number ``start``."""
        prompts = self.of(phase)["train"]
        for number, order in enumerate(self.sampler(phase).batches(start), start):
            yield PromptBatch(prompts, number, tuple(int(i) for i in order))

    def batches_per_epoch(self) -> int:
        """Return the number of batches that have every prompt once."""
        return len(self.sampler(self.phases[-1]).epoch(0))

    def mean_inputs(self) -> None:
        """Completions, of which a batch consists, are not known before it."""

    def resized(self, phases: Sequence[RunPhase]) -> "PromptDataset":
        """Return the same prompts for phases with other numbers of batches."""
        return replace(self, phases=tuple(phases))

    def rows(self, batch: PromptBatch) -> list[str]:
        """Return the rows of a batch as messages name them."""
        return [batch.source.where(i) for i in batch.prompts]

    def validation(self, phase: RunPhase) -> list[tuple[Prompts, int]]:
        """Return a prompt each to validate on; they may be empty."""
        valid, most = self.of(phase).get("valid"), phase.train.val_batches
        return self._first(valid, most, phase) if valid is not None and most else []

    def held_out(self, phase: RunPhase) -> list[tuple[Prompts, int]]:
        """Return a prompt each to evaluate on."""
        prompts, t = self.of(phase)[self.split(phase)], phase.train
        if t.test_batches is not None:
            return self._first(prompts, t.test_batches, phase)

        completion = t.max_completion_length
        trained = self.of(phase)["train"].lengths.mean() + completion
        chosen = sample(prompts.lengths + completion, t.iters * t.sequences * trained)
        return [(prompts, int(i)) for i in np.sort(chosen)]

    def split(self, phase: RunPhase) -> str:
        """Return the split that a phase is evaluated on."""
        return "test" if "test" in self.of(phase) else "valid"

    def held_out_examples(self, phase: RunPhase) -> tuple[str, Prompts]:
        """Return the split that a phase is evaluated on, and its prompts."""
        return self.split(phase), self.of(phase)[self.split(phase)]

    def _first(self, prompts: Prompts, most: int, phase: RunPhase) -> list[tuple[Prompts, int]]:
        count = len(prompts) if most < 0 else min(len(prompts), most * phase.train.batch_size)
        return [(prompts, i) for i in range(count)]

    def typical_rows(self) -> tuple[int, int]:
        """Return the tokens of a batch, and those of them that reach the head."""
        width, targets = self._largest(self.phases[-1])
        return self.phases[-1].train.sequences * width, targets


class GRPOTask(Task):
    """``--task grpo``."""

    validated = RewardScore.numbers

    base: Base
    dataset: PromptDataset
    reward: Reward
    sample: SamplePrompt
    sample_before: str | None = None

    @property
    def train(self) -> TrainConfig:
        """The settings of the last phase, whose task is this one."""
        return self.run.goal.train

    def check(self, name: str, model_type: str) -> None:
        """Check the base, and that there is a reward."""
        super().check(name, model_type)
        if not hasattr(self, "reward"):  # its file is executed once
            function = reward_of(self.run.reward, self.run.train.reward)
            self.reward = Reward(function, self.run.goal.sources[0])

    def encode(self, base: Base, splits: Sequence[Splits]) -> PromptDataset:
        """Return the tokens of the prompts of every phase."""
        self.base, display = base, self.run.display
        encoded: list[dict[str, Prompts]] = []
        for phase, read in zip(self.run.phases, splits, strict=True):
            columns, length = phase.sources[0], phase.train.max_seq_length
            of_phase = {}
            for split in read.present():
                prompts = encode_prompts(read.rows[split], base.tokenizer, columns, length)
                read.note_encoded(split, prompts.fingerprint, prompts.bad)
                self.reward.check(prompts)
                of_phase[split] = prompts
            counts = " / ".join(f"{len(part):,} {split}" for split, part in of_phase.items())
            display.line("data", f"{read.source} · {counts} prompts · reward {self.reward.name}")
            lost = template_notes(read.rows["train"], PROMPT, columns, base.tokenizer)
            for note in (*read.notes, *lost, *read.bad_lines()):
                display.line("data", note)
            encoded.append(of_phase)
        self.dataset = PromptDataset(self.run.phases, encoded)
        goal = self.run.goal
        prompts = self.dataset.held_out_examples(goal)[1]
        row, columns = prompts.row(0), goal.sources[0]
        text = row.value[columns.prompt_feature]
        shown = text if isinstance(text, str) else str(text[-1].get("content", ""))
        self.sample = SamplePrompt(shown, prompts.tokens[0], wanted_text(row, columns))
        return self.dataset

    def objective(self, trainable: Trainable, memory: MemoryChoice) -> GRPO:
        """Return the loss of generated completions. The sample prompt is completed before training."""
        head = split_head(trainable.model)
        check_forward(self.base, self.sample.tokens)
        with trainable.disabled():
            self.sample_before = self.sample.complete(self.base)
        if self.train.neftune_noise_alpha:
            add_noise(trainable, self.train.neftune_noise_alpha)
        start = phase_start(self.run, trainable)
        return GRPO(trainable.model, head, self.train, self._generate, start, self._score)

    def _generate(self, batch: PromptBatch) -> Generated:
        """Generate the completions of a batch and ask for their rewards."""
        train, prompts = self.train, batch.source
        indices = [i for i in batch.prompts for _ in range(train.num_generations)]
        keys = _keys(train.seed, batch.number)

        def sampler(log_probs: mx.array) -> mx.array:
            return mx.random.categorical(log_probs / train.temperature, key=next(keys))

        completions = self._completed(prompts, indices, sampler)
        rewards = self._rewards(prompts, indices, completions)
        examples = [
            Example(
                np.array([*prompts.tokens[i], *tokens], np.int32),
                np.arange(len(prompts.tokens[i]) + len(tokens)) >= len(prompts.tokens[i]),
                prompts.where(i),
            )
            for i, tokens in zip(indices, completions, strict=True)
        ]
        shapes = None
        if runtime.COMPILES:
            shapes = few_shapes(self.dataset._largest(self.run.goal), train.sequences)
        inputs = sequence_inputs(train.max_seq_length)
        tokens = make_batch(examples, range(len(examples)), len(examples), inputs, shapes)
        return Generated(tokens, rewards.reshape(len(batch.prompts), -1))

    def _completed(
        self,
        prompts: Prompts,
        indices: Sequence[int],
        sampler: Callable[[mx.array], mx.array] | None,
    ) -> list[list[int]]:
        """Return the tokens of a completion of each prompt, at least one."""
        train = self.train
        asked = [prompts.tokens[i] for i in indices]
        room = [train.max_seq_length - len(tokens) for tokens in asked]
        limits = [min(train.max_completion_length, each) for each in room]
        at_once = min(len(asked), _MOST_AT_ONCE)
        return sample_batch(self.base, asked, limits, at_once, sampler)

    def _rewards(
        self, prompts: Prompts, indices: Sequence[int], completions: Sequence[Sequence[int]]
    ) -> np.ndarray:
        """Return the reward of each completion, whose text is without the token that ends it."""
        ends = set(self.base.tokenizer.eos_token_ids)
        texts = [text_of(self.base, [t for t in tokens if t not in ends]) for tokens in completions]
        return self.reward(prompts, indices, texts)

    def _score(
        self, batches: Sequence[tuple[Prompts, int]], advance: Callable[[], None] | None = None
    ) -> RewardScore:
        """Return the mean reward of the likeliest completions of some prompts."""
        prompts, indices = batches[0][0], [i for _, i in batches]
        rewards = []
        for start in range(0, len(indices), _MOST_AT_ONCE):
            part = indices[start : start + _MOST_AT_ONCE]
            rewards.append(self._rewards(prompts, part, self._completed(prompts, part, None)))
            for _ in part if advance is not None else ():
                advance()
        mean = float(np.concatenate(rewards).mean())
        return RewardScore(mean, len(indices))

    def summary(
        self, trainable: Trainable, objective: GRPO, fit: Fit, sources: Sequence[str]
    ) -> Summary:
        """Return the reward on held-out prompts before and after, and the sample again."""
        goal = self.run.goal
        before, after = fit.scores[0][goal.name], fit.scores[-1][goal.name]
        texts = {"before": self.sample_before, "after": self.sample.complete(self.base)}
        sample = {"prompt": self.sample.text, "wanted": self.sample.wanted, **texts}
        phases = phase_reports(self.dataset, sources, fit)
        named = {"task": "grpo", "reward": self.reward.name, "beta": self.train.beta}
        return Summary(
            eval={
                "split": self.dataset.split(goal),
                "rows": after.rows,
                "available": len(self.dataset.held_out_examples(goal)[1]),
                "reward_before": before.reward,
                "reward_after": after.reward,
            },
            objective=named,
            facts={**({"phases": phases} if phases else {}), "samples": [stored_sample(sample)]},
            report={"task": "grpo", "phases": phases, "objective": named, "sample": sample},
        )

    @staticmethod
    def report_lines(report: dict) -> list[str]:
        """Return the reward, phases, speed, the sample and the pack."""
        return outcome_lines(report)


def few_shapes(largest: Shape, sequences: int) -> set[Shape]:
    """Return shapes up to the largest, of which any batch has one; each costs a compilation."""
    widths, width = [largest[0]], 32
    while width < largest[0]:
        widths.append(width)
        width *= 2
    return {(w, max(1, sequences * w * k // 4)) for w in widths for k in (1, 2, 3, 4)}


def _keys(seed: int, number: int) -> Iterator[mx.array]:
    """Yield the keys of the random numbers of a batch."""
    key = mx.random.split(mx.random.key(seed), number + 1)[number]
    while True:
        key, one = mx.random.split(key)
        yield one
