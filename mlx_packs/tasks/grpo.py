"""GRPO: the model generates completions, and trains to maximize a reward function.

https://arxiv.org/abs/2402.03300
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from ..data.dataset import Batch, Dataset, FixedOrder
from ..data.images import plain_text
from ..data.prompts import (
    PromptCollate,
    Prompts,
    SharedPrompts,
    encode_prompts,
    wanted_text,
)
from ..data.rows import Splits
from ..data.sampler import Sampler
from ..data.shapes import Shape, sequence_inputs
from ..data.sharing import least_saved, may_share
from ..errors import PackError
from ..evaluation.answers import answer_of
from ..evaluation.images import advance_of
from ..inference.generate import text_of
from ..nn.blocks import takes_one_pass
from ..objectives.causal_lm import split_head
from ..objectives.grpo import GRPO
from ..objectives.objective import Objective
from ..objectives.score import REWARD, Score
from ..packs.base import Base, check_forward
from .causal_lm import SamplePrompt, stored_sample
from .completions import (
    MOST_AT_ONCE,
    TokenSampler,
    completed_examples,
    completions,
    generated_collate,
    largest_batch,
    random_sampler,
)
from .phases import PhaseData, RunPhase, sample
from .rewards import Reward, reward_of
from .shared_prefix import check_trees, computes_trees, show_shared_prompts
from .splits import counted, show_notes
from .task import Binding, Summary, Task, Trained, summarized


@dataclass(frozen=True)
class MeanReward(Score):
    """The mean reward of a model's likeliest completions, of which ``rows`` have one."""

    value: float
    rows: int
    measure: ClassVar[str] = REWARD

    @property
    def entries(self) -> dict[str, float]:
        return {"valid_reward": self.value}

    @property
    def text(self) -> str:
        return f"reward {self.value:.3f}"

    @property
    def reported(self) -> dict[str, float | None]:
        return {REWARD: self.value}


class GRPOTask(Task):
    """``--task grpo``."""

    validated = ("valid_reward",)

    base: Base
    reward: Reward
    notes_none = False  # whether the run has said that a batch has no reward
    sample: SamplePrompt
    shared: SharedPrompts | None = None  # how the prompt of several completions is computed once

    def check(self, name: str, model_type: str) -> None:
        """Check the base, and that there is a reward."""
        super().check(name, model_type)
        if not hasattr(self, "reward"):  # its file is executed once
            function = reward_of(self.calls.reward, self.train.reward)
            self.reward = Reward(function, self.columns)

    def encode(
        self, base: Base, phases: Sequence[RunPhase], splits: Sequence[Splits]
    ) -> list[PhaseData]:
        self.base = base
        display = self.display
        t = self.train
        if may_share(t, self.lora) and computes_trees(t, base, display):
            limit = sequence_inputs(t.max_seq_length)
            least = least_saved(t)
            self.shared = SharedPrompts(t.num_generations, t.max_completion_length, limit, least)

        data: list[PhaseData] = []
        for phase, read in zip(phases, splits, strict=True):
            columns = phase.columns
            length = phase.train.max_seq_length
            of_phase = {}
            rows = {split: read.rows[split] for split in read.present()}
            with display.task("data", sum(map(len, rows.values())), "prompts") as bar:
                advance = advance_of(bar, base.tokenizer)
                for split, own in rows.items():
                    prompts = encode_prompts(own, base.tokenizer, columns, length, advance)
                    read.note_encoded(split, prompts.fingerprint, prompts.bad)
                    self.reward.check(prompts)
                    of_phase[split] = prompts

            counts = counted(of_phase)
            display.line("data", f"{read.source} · {counts} prompts · reward {self.reward.name}")
            show_notes(read, columns, base.tokenizer, display)

            t = phase.train
            prompts = of_phase["train"]
            inputs = sequence_inputs(t.max_seq_length)
            sampler = Sampler(prompts.lengths, t.batch_size, inputs, t.seed)
            collate = PromptCollate(_largest(phase, prompts), self.shared)
            data.append(PhaseData(self, phase, of_phase, Dataset(prompts, collate, sampler)))

        if self.shared is not None:
            show_shared_prompts(self.shared.to_json(data[-1].train.examples), t, display)

        prompts = data[-1].held_out_examples
        row = prompts.row(0)
        columns = phases[-1].columns
        prompt = row.value[columns.prompt_feature]
        if not isinstance(prompt, str):  # the last message
            prompt = plain_text(prompt[-1].get("content"))

        wanted = wanted_text(row, columns)
        self.sample = SamplePrompt(prompt, prompts.tokens[0], wanted)
        return data

    def evaluation(self, phase: RunPhase, examples: Prompts, chosen: np.ndarray) -> Dataset:
        """Return a prompt in each batch."""
        order = FixedOrder(np.sort(chosen)[:, None])
        return Dataset(examples, PromptCollate(_largest(phase, examples)), order)

    def sampled(self, data: PhaseData) -> np.ndarray:
        """Return held-out prompts in proportion to the tokens that the phase trains on."""
        t = data.phase.train
        trained = data.splits["train"].lengths.mean() + t.max_completion_length
        lengths = data.held_out_examples.lengths + t.max_completion_length
        return sample(lengths, t.iters * t.sequences * trained)

    def typical_rows(self, data: PhaseData) -> tuple[tuple[int, ...], int]:
        t = data.phase.train
        width, targets = data.train.collate.largest
        if self.shared is None:
            return (t.sequences * width,), targets

        prefix = int(self.shared.to_json(data.train.examples)["tokens"])
        passes = (t.batch_size * prefix, t.sequences * (width - prefix))
        if takes_one_pass(self.base.model, sum(passes)):
            passes = (sum(passes),)
        return passes, targets

    def bind(self, binding: Binding) -> list[Objective]:
        """Return the loss of generated completions, which has the reference of its phase."""
        model = binding.trainable.model
        head = split_head(model)
        check_forward(self.base, self.sample.tokens)
        if self.shared is not None:
            check_trees(binding.trainable, head)

        objectives: list[Objective] = []
        for own in binding.data:
            initial = binding.references[own.phase.name]
            generate = partial(self._generate, own.train.collate)
            objective = GRPO(model, head, own.phase.train, generate, initial, self._score)
            objectives.append(objective)
        return objectives

    def _generate(self, prompt_collate: PromptCollate, batch: Batch) -> tuple[Batch, np.ndarray]:
        """Generate the completions of a batch and ask for their rewards."""
        train = self.train
        prompts = batch.source
        indices = [i for i in batch.examples for _ in range(train.num_generations)]
        generated = self._completed(prompts, indices, random_sampler(train, batch.number))
        rewards = self._rewards(prompts, indices, generated)
        if np.isnan(rewards).all() and not self.notes_none:
            self.notes_none = True
            text = f"--reward {self.reward.name}: returned None for every completion of a batch"
            self.display.line("note", f"{text}, from which the run learns nothing")

        asked = [prompts.tokens[i] for i in indices]
        examples = completed_examples(asked, generated, prompts.where_of(indices))
        collate = generated_collate(train, prompt_collate.largest, len(examples))
        if self.shared is not None:
            collate = self.shared.collate(prompts, batch.examples, collate)

        return collate(examples, np.arange(len(examples))), rewards.reshape(len(batch.examples), -1)

    def _completed(
        self, prompts: Prompts, indices: Sequence[int], sampler: TokenSampler | None
    ) -> list[list[int]]:
        """Return the tokens of a completion of each prompt, at least one."""
        asked = [prompts.tokens[i] for i in indices]
        return completions(self.base, asked, self.train, sampler, self.shared is not None)

    def _rewards(
        self, prompts: Prompts, indices: Sequence[int], completions: Sequence[Sequence[int]]
    ) -> np.ndarray:
        """Reward each completion, whose text is without the token that ends it."""
        ends = set(self.base.tokenizer.eos_token_ids)
        texts = []
        for i, tokens in zip(indices, completions, strict=True):
            text = text_of(self.base, [t for t in tokens if t not in ends])
            if self.reward.is_metric:
                text = answer_of(self.base, prompts.tokens[i], text)
            texts.append(text)
        return self.reward(prompts, indices, texts)

    def _score(self, data: Dataset, advance: Callable[[], None] | None = None) -> MeanReward:
        """Return the mean reward of the likeliest completions of some prompts."""
        prompts = data.examples
        indices = [i for batch in data.once() for i in batch.examples]
        rewards = []
        for start in range(0, len(indices), MOST_AT_ONCE):
            part = indices[start : start + MOST_AT_ONCE]
            rewards.append(self._rewards(prompts, part, self._completed(prompts, part, None)))
            if advance is not None:
                for _ in part:
                    advance()

        scored = np.concatenate(rewards)
        scored = scored[~np.isnan(scored)]

        if not len(scored):
            raise PackError(
                f"--reward {self.reward.name}: returned None for all {len(indices)} completions of "
                "an evaluation. Return a number for some of them.",
                "data",
                "reward",
            )
        return MeanReward(float(scored.mean()), len(scored))

    def summary(self, trained: Trained) -> Summary:
        last = trained.last
        sample = self.sample.report(trained.initial, self.base)
        named = {"task": "grpo", "reward": self.reward.name, "beta": self.train.beta}
        report = {
            "shared_prefix": self.shared and self.shared.to_json(last.train.examples),
            "sample": sample,
        }
        facts = {"samples": [stored_sample(sample)]} if sample["after"] is not None else {}

        return summarized(trained, named, facts, report)


def _largest(phase: RunPhase, prompts: Prompts) -> Shape:
    return largest_batch(phase.train, int(prompts.lengths.max()))
