"""One held-out prompt that is completed before and after a run, so that people see the change."""

from dataclasses import dataclass

from ...config.schema import DataConfig
from ...data import rows as rows_of
from ...data.encoding import token_format
from ...inference.generate import complete
from ...packs.base import Base

SAMPLE_TOKENS = 40
_TEMPERATURE = 0.7


@dataclass(frozen=True)
class SamplePrompt:
    """A prompt from an example.

    Attributes:
        text: the prompt as people see it.
        tokens: the prompt as the model sees it.
    """

    text: str
    tokens: list[int]

    @classmethod
    def of(cls, row: rows_of.Row, base: Base, columns: DataConfig) -> "SamplePrompt":
        """Return the beginning of a text, a completion's prompt, or a chat up to its answer."""
        return cls(*token_format(row, columns).prompt(row, columns, base.tokenizer))

    def complete(self, base: Base) -> str:
        """Return the base's completion as it is now, sampled with a fixed seed."""
        text = complete(base, self.tokens, SAMPLE_TOKENS, temperature=_TEMPERATURE)
        return " ".join(text.split())
