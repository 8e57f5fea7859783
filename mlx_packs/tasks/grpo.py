"""GRPO: the model generates completions, and trains to maximize a reward.

A reward is a function of the user's, or a metric of answers.

https://arxiv.org/abs/2402.03300
"""

import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from ..bases.model import check_forward
from ..bases.tokenizer import split_thoughts
from ..config.data import FOLLOWED, DataConfig
from ..config.functions import FUNCTION, function_error, load_function, names_function, raised
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
from ..evaluation.metrics import METRICS
from ..inference.generate import text_of
from ..nn.blocks import takes_one_pass
from ..objectives.causal_lm import split_head
from ..objectives.grpo import GRPO
from ..objectives.objective import Objective
from ..objectives.score import REWARD, Score
from ..packs.base import Base
from .completions import (
    MOST_AT_ONCE,
    TokenSampler,
    completed_examples,
    completions,
    generated_collate,
    largest_batch,
    random_sampler,
)
from .phases import PhaseData, RunPhase, encode_each, sample
from .sample_prompt import SamplePrompt, stored_sample
from .task import Binding, RewardFunction, Summary, Task, Trained, summarized
from .tokens import check_trees, computes_trees, say_nothing_shared, show_shared


class Reward:
    """The rewards of completions, each a finite number, or NaN where the function returns None.

    Args:
        function: the user's own, or the name of a metric of answers.
        columns: what the columns are called.
    """

    def __init__(self, function: RewardFunction | str, columns: DataConfig) -> None:
        self._columns = columns
        # whether it compares answers, without their thoughts, with the expected ones
        self.is_metric = isinstance(function, str)
        if isinstance(function, str):
            self.name = function
            self._function = _metric_reward(function)
        else:
            self.name = function.__name__
            self._function = function

    def check(self, prompts: Prompts) -> None:
        """Check that the rows have what a metric needs."""
        for i in range(len(prompts)):
            if self.is_metric and wanted_text(prompts.row(i), self._columns) is None:
                raise PackError(
                    f"--reward {self.name} needs the expected completion in "
                    f"'{self._columns.completion_feature}'.",
                    "data",
                    "reward",
                    prompts.where(i),
                )

    def __call__(
        self, prompts: Prompts, indices: Sequence[int], completions: Sequence[str]
    ) -> np.ndarray:
        """Return the reward of each completion of the prompts at ``indices``, float32 [N]."""
        rows = [prompts.row(i) for i in indices]
        names = dict.fromkeys(name for row in rows for name in row.value)
        columns: dict[str, list] = {name: [row.value.get(name) for row in rows] for name in names}
        prompt = columns.pop(self._columns.prompt_feature)
        wanted = [wanted_text(row, self._columns) for row in rows]

        passed: list = list(completions)
        if not self.is_metric:
            passed = [_like(p, c) for p, c in zip(prompt, completions, strict=True)]

        try:
            values = self._function(prompts=prompt, completions=passed, expected=wanted, **columns)
        except Exception as error:
            first = prompts.where(indices[0])
            text = f"raised {raised(error)} for the completions of {first}."
            raise function_error("reward", self.name, text) from error

        if fault := _fault_of(values, [prompts.where(i) for i in indices]):
            raise function_error(
                "reward",
                self.name,
                f"returned {fault}, but must return a list of {len(rows)} finite numbers, one for "
                "each completion, or None for those that it does not score.",
            )
        return np.array(list(values), np.float32)  # NaN for None


def _fault_of(values: Any, places: Sequence[str]) -> str:
    """Return what is wrong with the rewards of completions at these places; empty if nothing is."""
    if inspect.isawaitable(values) or not isinstance(values, (Sequence, np.ndarray)):
        return f"a {type(values).__name__}"
    if len(values) != len(places):
        return f"{len(values)} values"
    for value, place in zip(values, places, strict=True):
        is_number = isinstance(value, numbers.Real) and np.isfinite(float(value))
        if value is not None and not is_number:
            return f"{value!r:.40} for a completion of {place}"
    return ""


def _like(prompt: Any, completion: str) -> str | list[dict[str, str]]:
    """Return a completion in the form of its prompt: a text, or messages as TRL has them."""
    if isinstance(prompt, str):
        return completion
    return [{"role": "assistant", "content": completion}]


def _metric_reward(name: str) -> RewardFunction:
    """Return the reward of a metric: 1 for a right answer, and else 0."""
    score = METRICS[name].score

    def reward(completions: Sequence[str], expected: Sequence[str], **_: Any) -> list[float]:
        answers = [split_thoughts(None, text)[1] for text in expected]
        return [float(score(c, a)) for c, a in zip(completions, answers, strict=True)]

    return reward


def reward_of(given: RewardFunction | None, setting: str | None) -> RewardFunction | str:
    """Return the reward of a run: the function given in Python, or what ``--reward`` names."""
    if given is not None and setting is not None:
        raise PackError(
            "reward: is given twice, as a function and by --reward.", "conflict", "reward"
        )
    if given is None and setting is None:
        raise PackError(
            "--reward: --task grpo needs one: FILE.py:NAME, or the expected completion by "
            f"{', '.join(METRICS)}."
        )
    if setting is None or setting in METRICS:
        return given or setting
    if not names_function(setting):
        text = f"must be {FUNCTION}, or one of {', '.join(METRICS)}."
        raise function_error("reward", setting, text, "unknown")
    return load_function("reward", setting)


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
    cut_parts = ""

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
        t = self.train
        if may_share(t, self.lora) and computes_trees(t, base, self.display):
            limit = sequence_inputs(t.max_seq_length)
            least = least_saved(t)
            self.shared = SharedPrompts(t.num_generations, t.max_completion_length, limit, least)

        data = super().encode(base, phases, splits)
        if self.shared is not None:
            facts = self.shared.to_json(data[-1].train.examples)
            if facts["saved"]:
                what = f"the {t.num_generations} completions of a prompt"
                show_shared(facts, what, self.display)
            else:
                say_nothing_shared(t, self.display)

        columns = phases[-1].columns
        self.sample = _prompt_of(data[-1].held_out_examples, 0, columns)
        if t.sample_every is not None:
            valid = data[-1].splits["valid"]
            count = min(FOLLOWED, len(valid))
            self.followed = [_prompt_of(valid, i, columns) for i in range(count)]
        return data

    def encoded(self, phase: RunPhase, read: Splits) -> dict[str, Prompts]:
        tokenizer = self.base.tokenizer
        length = phase.train.max_seq_length

        def encode(split: str, advance: Callable[[], None]) -> Prompts:
            prompts = encode_prompts(read.rows[split], tokenizer, phase.columns, length, advance)
            self.reward.check(prompts)
            return prompts

        steps = {split: len(read.rows[split]) for split in read.present()}
        return encode_each(read, encode, self.display, steps, "prompts")

    def described(self, examples: Mapping[str, Prompts]) -> str:
        return f"prompts · reward {self.reward.name}"

    def phase_data(
        self, phases: Sequence[RunPhase], encoded: Sequence[Mapping[str, Prompts]]
    ) -> list[PhaseData]:
        """Return the data of phases, none of which replays another's."""
        data = []
        for phase, splits in zip(phases, encoded, strict=True):
            t = phase.train
            prompts = splits["train"]
            inputs = sequence_inputs(t.max_seq_length)
            sampler = Sampler(prompts.lengths, t.batch_size, inputs, t.seed)
            collate = PromptCollate(_largest(phase, prompts), self.shared)
            data.append(PhaseData(self, phase, splits, Dataset(prompts, collate, sampler)))
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
        for data in binding.data:
            train = data.phase.train
            initial = binding.references[data.phase.name]
            generate = partial(self._generate, data.train.collate)
            objectives.append(GRPO(model, head, train, generate, initial, self._score))
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


def _prompt_of(prompts: Prompts, i: int, columns: DataConfig) -> SamplePrompt:
    row = prompts.row(i)
    prompt = row.value[columns.prompt_feature]
    if not isinstance(prompt, str):  # the last message
        prompt = plain_text(prompt[-1].get("content"))
    return SamplePrompt(prompt, prompts.tokens[i], wanted_text(row, columns))


def _largest(phase: RunPhase, prompts: Prompts) -> Shape:
    return largest_batch(phase.train, int(prompts.lengths.max()))
