"""Fill-in-the-middle: a text is cut in three, and its middle comes last, after its surroundings.

The order is as in the paper's joint training: prefix, suffix, middle (PSM), or with the suffix
first, so that the middle follows its prefix (SPM). Cuts are between any two characters.

Bavarian et al.: https://arxiv.org/abs/2207.14255
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import PackError

# What is put before prefix, suffix and middle, and after the middle if not the end of text.
SPELLINGS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),  # Code Llama
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
)
# Tokens of a row that stay free for sentinels, and for what the cuts add by splitting tokens.
SPARE = 12


@dataclass(frozen=True)
class FillInTheMiddle:
    """The share of rows that are rearranged, and their order."""

    rate: float  # share of the rows
    spm_rate: float = 0.5  # share of those whose suffix comes first
    seed: int = 0  # with the number of the row, it decides which, and where they are cut
    tokens: tuple[str, ...] = ()  # sentinels; empty takes the known ones among `SPELLINGS`

    def parts(self, text: str, row: int, piece: int) -> tuple[bool, str, str, str] | None:
        """Return suffix_first, prefix, middle, suffix; None leaves the text as it is."""
        random = np.random.default_rng([self.seed, row, piece])
        chosen, suffix_first = random.random(2) < (self.rate, self.spm_rate)
        if not chosen or not text:
            return None

        a, b = sorted(random.integers(0, len(text) + 1, 2).tolist())
        return bool(suffix_first), text[:a], text[a:b], text[b:]


def sentinels(tokenizer: Any, names: Sequence[str] = ()) -> tuple[int, int, int, int]:
    """Return the ids before prefix, suffix and middle, and after the middle."""
    plain = tokenizer._tokenizer

    def ids(spelled: Sequence[str]) -> list[int] | None:
        tokens = [plain.convert_tokens_to_ids(name) for name in spelled]
        is_known = None not in tokens and plain.convert_ids_to_tokens(tokens) == list(spelled)
        return tokens if is_known else None

    if names:
        known = ids(names)
        if known is None:
            raise PackError(
                f"--fim-tokens {','.join(names)}: not all are tokens of the base.", "unknown"
            )
    else:
        candidates = (ids(spelled) for spelled in SPELLINGS)
        known = next((tokens for tokens in candidates if tokens), None)
        if known is None:
            raise PackError(
                "--fim-rate: the base's tokenizer has no tokens for prefix, suffix and middle that "
                "are known here. Name three of its tokens: --fim-tokens PREFIX,SUFFIX,MIDDLE.",
                "unsupported",
            )

    return (*known, tokenizer.eos_token_id)[:4]


def arranged(
    ids: tuple[int, int, int, int],
    suffix_first: bool,
    parts: tuple[list[int], list[int], list[int]],
    limit: int,
) -> list[int]:
    """Return the tokens with the middle last, at most ``limit`` of them.

    Excess is taken from the far ends: first of the prefix, then of the suffix, and then from the
    beginning of the middle.
    """
    prefix, middle, suffix = parts
    over = max(0, len(prefix) + len(middle) + len(suffix) + len(ids) - limit)

    from_prefix = min(over, len(prefix))
    from_suffix = min(over - from_prefix, len(suffix))
    prefix = prefix[from_prefix:]
    suffix = suffix[: len(suffix) - from_suffix]
    middle = middle[over - from_prefix - from_suffix :]

    before, after, between, end = ids
    if suffix_first:
        return [before, after, *suffix, between, *prefix, *middle, end]
    return [before, *prefix, after, *suffix, between, *middle, end]
