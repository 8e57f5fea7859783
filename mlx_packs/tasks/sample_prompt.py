"""Prompts of the data that are answered for people to see what a run changes."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self

from ..config.data import FOLLOWED
from ..config.schema import TrainConfig
from ..data.conversations import Content
from ..data.formats import Row
from ..data.rows import Splits
from ..evaluation.answers import answer_of, expected_answer
from ..inference.generate import complete
from ..objectives.reference import PhaseReference
from ..packs.base import Base

SAMPLE_TOKENS = 40
STORED_CHARACTERS = 1000  # of each text of a sample in a manifest


@dataclass(frozen=True)
class SamplePrompt:
    """A held-out prompt that is completed before and after a run, so that people see the change."""

    text: str
    tokens: list[int]
    wanted: str | None = None  # the answer that the examples have
    is_raw: bool = False  # whether it is the beginning of a text, rather than a question
    thoughts: int = 0  # tokens of the thoughts before the answer

    @classmethod
    def of(cls, content: Content, base: Base, is_raw: bool = False) -> Self:
        """Return the prompt of an example with the answer that it has."""
        text, tokens = content.prompt()
        wanted, thoughts = expected_answer(content, base, tokens)
        return cls(text, tokens, wanted, is_raw, thoughts)

    def answer(self, base: Base, tokens: int = SAMPLE_TOKENS) -> str:
        """Return the base's answer as it is now: greedy, as `packs generate` gives it."""
        text = complete(base, self.tokens, self.thoughts + tokens)
        return answer_of(base, self.tokens, text) or text  # thoughts, if they did not end

    def complete(self, base: Base) -> str | None:
        """Return the answer on one line; None if the base is on disk: each token would read it."""
        if base.blocks_on_disk is not None:
            return None
        return " ".join(self.answer(base).split())

    def report(self, initial: PhaseReference, base: Base) -> dict[str, Any]:
        """Return it with the completions of what the run started from, and of the base as it is."""
        with initial.active():
            before = self.complete(base)
        after = self.complete(base)
        return self.entry(before=before, after=after)

    def entry(self, **texts: str | None) -> dict[str, Any]:
        """Return the prompt with texts that complete it."""
        return {"prompt": self.text, "wanted": self.wanted, **texts}


def followed_rows(train: TrainConfig, splits: Splits) -> list[Row]:
    """Return the validation examples that are answered during a run, with --sample-every."""
    if train.sample_every is None:
        return []
    return list(islice(splits.usable("valid"), FOLLOWED))


def stored_sample(sample: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of a sample that a manifest has, each of a limited length; no image."""
    texts = {key: text for key, text in sample.items() if isinstance(text, str)}
    return {key: text[:STORED_CHARACTERS] for key, text in texts.items()}
