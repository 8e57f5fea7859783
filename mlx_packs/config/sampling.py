"""Settings of sampling in text generation."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from .fields import Fault, Settings, option

_sampling = partial(option, section="Sampling")


@dataclass(frozen=True, repr=False)
class Sampling(Settings):
    """Length and randomness of a generated text; the likeliest token each time by default.

    ``top_p``: nucleus sampling (Holtzman et al., 2020, arXiv:1904.09751). ``min_p``: Nguyen et al.,
    2024, arXiv:2407.01082. ``repetition_penalty``: Keskar et al., 2019, arXiv:1909.05858, over the
    last 64 tokens (`inference.generate.PENALIZED_TOKENS`).
    """

    max_tokens: int = _sampling(100, "Maximum number of tokens to generate.", at_least=1)
    temperature: float = _sampling(
        0.0,
        "Sampling temperature; 0 always takes the likeliest token.",
        metavar="T",
        flags=("--temp", "--temperature"),
        at_least=0,
    )
    top_p: float = _sampling(
        1.0,
        "Choose among the likeliest tokens whose probabilities add up to P.",
        metavar="P",
        above=0,
        at_most=1,
    )
    top_k: int = _sampling(0, "Choose among the N likeliest tokens; 0 uses all.", at_least=0)
    min_p: float = _sampling(
        0.0,
        "Choose among tokens that are at least P times as probable as the likeliest.",
        metavar="P",
        at_least=0,
        below=1,
    )
    repetition_penalty: float = _sampling(
        1.0,
        "Divide the scores of the last 64 tokens by X; 1 changes nothing.",
        metavar="X",
        above=0,
    )
    seed: int = _sampling(0, "Random seed of sampling.", at_least=0)

    def _conflicts(self) -> Iterator[Fault]:
        if self.temperature == 0:
            for name in self.changed(("top_p", "top_k", "min_p")):
                yield Fault(name, "needs a temperature: add --temp 0.7.", "conflict")
