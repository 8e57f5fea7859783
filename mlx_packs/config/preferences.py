"""The settings of training on preferences and on rewards."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from ..errors import any_of
from .choices import ANSWER_METRICS, PREFERENCE_TASKS, TASKS
from .embedding import EmbeddingSettings
from .fields import Fault, option

_preference = partial(option, section="Preferences")
_generated = partial(option, section="Rewards", tasks=("grpo",))
_rated = partial(_preference, tasks=("kto",), metavar="WEIGHT", above=0)


@dataclass(frozen=True, repr=False)
class PreferenceSettings(EmbeddingSettings):
    """The part of `TrainConfig` that tasks of preferences and rewards have."""

    beta: float = _preference(
        0.1,
        "Weight of the distance from the reference (dpo, kto, grpo), of the odds ratio (orpo), or scale "
        "of the log-probabilities (cpo, simpo).",
        shown_default="0.1; 2 with --task simpo, 0 with --task grpo",
        tasks=(*PREFERENCE_TASKS, "grpo"),
        metavar="BETA",
        at_least=0,
    )
    simpo_gamma: float = _preference(
        0.5,
        "Margin by which the chosen completion is to be better (simpo).",
        tasks=("simpo",),
        metavar="GAMMA",
        at_least=0,
    )
    cpo_alpha: float = _preference(
        1.0,
        "Weight of the chosen completion's cross-entropy (cpo).",
        tasks=("cpo",),
        metavar="ALPHA",
        at_least=0,
    )
    desirable_weight: float = _rated(1.0, "Weight of the desirable completions (kto).")
    undesirable_weight: float = _rated(1.0, "Weight of the undesirable completions (kto).")
    center_rewards_coefficient: float = _preference(
        0.0,
        "Weight of the squared sum of both rewards of an example, which keeps them around 0 "
        "(reward).",
        tasks=("reward",),
        metavar="WEIGHT",
        at_least=0,
    )
    reward: str | None = _generated(
        None,
        "Reward of a completion: a function of your own, FILE.py:NAME, or whether it is the expected "
        f"one by a metric ({', '.join(ANSWER_METRICS)}).",
        metavar="REWARD",
    )
    num_generations: int = _generated(
        8, "Completions of each prompt, whose rewards are compared.", at_least=2, memory=True
    )
    max_completion_length: int = _generated(
        256, "Most tokens of a completion that is generated.", at_least=1, memory=True
    )
    temperature: float = _generated(
        1.0, "Sampling temperature of the completions in training.", metavar="TEMP", above=0
    )

    def _conflicts(self) -> Iterator[Fault]:
        yield from super()._conflicts()
        if self.beta == 0 and (tasks := [task for task in self.tasks if task in PREFERENCE_TASKS]):
            yield Fault("beta", f"must be above 0 with --task {any_of(tasks)}, but is 0.")
        yield from self._conflicts_of_scores()

    def _conflicts_of_scores(self) -> Iterator[Fault]:
        """Check a task that trains a head of its own."""
        order = [phase.task or self.task for phase in self.phases] or [self.task]
        scores = [task in TASKS and TASKS[task].scores for task in order]
        if not any(scores):
            return
        first = order[scores.index(True)]
        if self.trains_base:
            text = f"full does not go with --task {first}, whose head is trained beside adapters."
            yield Fault("method", text, "conflict")
        if not all(scores[scores.index(True) :]):
            text = f"have another task after {first}, whose head that would not train. Put {first} last."
            yield Fault("phases", text, "conflict")
