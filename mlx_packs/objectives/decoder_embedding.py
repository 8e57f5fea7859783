"""Vectors of texts by a decoder: a state of its last block, pooled as the base's files say.

Attention is causal: padding on the right changes no state of a text, and none needs a mask.
Qwen3-Embedding: https://arxiv.org/abs/2506.05176
"""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import mlx.nn as nn

from ..bases.encoder import Embedder, pooled
from ..bases.files import context_of
from ..bases.geometry import Heads
from ..bases.model import BaseModel
from ..bases.sentence_config import read_sentence_config
from ..errors import PackError
from ..runtime import mx
from .causal_lm import forward
from .reader import hidden_states


class DecoderVectors(nn.Module):
    """Computes one vector per text by a decoder, as `bases.encoder.Encoder` does.

    Semantics: pool(states[tokens]) in float32, / its length if ``normalize``.

    Args:
        base: has the settings of pooling in its files.
        decoder: its model with adapters; None is the model itself.
    """

    def __init__(self, base: BaseModel, decoder: nn.Module | None = None) -> None:
        super().__init__()
        self.decoder = decoder or base.model
        states = hidden_states(self.decoder, base.name, "embedding")
        self._states = partial(forward, self.decoder, states)
        self.sentence_config = read_sentence_config(base.path, is_decoder=True)
        self.dims = Heads.of(base.config).hidden  # width of a vector

        # tokens of a text at most
        positions = context_of(base.config)
        self.longest = min(self.sentence_config.max_seq_length or positions, positions)

    def __call__(self, tokens: mx.array, lengths: mx.array | None = None) -> mx.array:
        return pooled(self._states(tokens), lengths, self.sentence_config)


def embedder_of(base: BaseModel) -> Embedder:
    """Return a decoder as it embeds texts."""
    vectors = DecoderVectors(base)

    tokenizer = base.tokenizer._tokenizer
    if vectors.sentence_config.adds_eos:
        tokenizer = with_eos(tokenizer, base.path)
    return Embedder(vectors, tokenizer)


def with_eos(tokenizer: Any, path: Path) -> Any:
    """Return a copy of a fast tokenizer that puts the end token after every text."""
    if tokenizer.eos_token is None:
        raise PackError(
            f"{path}: its tokenizer has no end token (eos_token), whose state is the vector of a "
            "text. Name one in tokenizer_config.json.",
            "unsupported",
        )
    if not getattr(tokenizer, "is_fast", False):
        raise PackError(
            f"{path}: has no fast tokenizer (tokenizer.json), which embeddings need.", "unsupported"
        )
    if tokenizer.encode("a")[-1:] == [tokenizer.eos_token_id]:
        return tokenizer

    from tokenizers.processors import Sequence, TemplateProcessing

    own = copy.deepcopy(tokenizer)
    end = own.eos_token

    template = TemplateProcessing(
        single=f"$A {end}", pair=f"$A $B:1 {end}:1", special_tokens=[(end, own.eos_token_id)]
    )

    backend = own.backend_tokenizer
    steps = [template]
    if backend.post_processor is not None:
        steps.insert(0, backend.post_processor)
    backend.post_processor = Sequence(steps)
    return own
