"""NEFTune: noise on the embeddings of the tokens while a model is trained.

NEFTune: https://arxiv.org/abs/2310.05914
"""

import math

import mlx.core as mx
import mlx.nn as nn


class NoisyEmbedding(nn.Module):
    """A frozen or trained embedding [V, D] with uniform noise on its rows in training.

    Semantics: rows + uniform(-1, 1) * alpha / sqrt(T * D)

    T is the length of the sequences of a batch, padding included, as in transformers and TRL. The
    authors try 5 to 15 for ``alpha``.
    """

    def __init__(self, embedding: nn.Module, alpha: float) -> None:
        super().__init__()
        self.embedding = embedding
        self._alpha = alpha

    def __call__(self, tokens: mx.array) -> mx.array:
        rows = self.embedding(tokens)
        if not self.training:
            return rows

        size = self._alpha / math.sqrt(math.prod(rows.shape[-2:]))
        return rows + mx.random.uniform(-size, size, rows.shape, rows.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        return self.embedding.as_linear(x)
