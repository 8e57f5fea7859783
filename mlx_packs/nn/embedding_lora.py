"""LoRA on an embedding: a low-rank delta of its table, which the head shares where it is tied."""

import mlx.core as mx
import mlx.nn as nn

from .lora import GroupedLoRA


class EmbeddingLoRA(GroupedLoRA):
    """The adapter of one table [V, D]: A [V, R] begins at zero and B [R, D] normal, as in PEFT."""

    def __init__(self, vocab_size: int, width: int, rank: int, scale: float, key: mx.array) -> None:
        super().__init__(vocab_size, [], 0.0, [])
        self._adapted = [0]
        self._scales = [scale]
        self.lora_a = [mx.zeros((vocab_size, rank))]
        self.lora_b = [mx.random.normal((rank, width), key=key)]

    def rows(self, tokens: mx.array) -> mx.array:
        """Return what is added to the rows of tokens [...], [..., D] in float32."""
        return self._scales[0] * (self.lora_a[0][tokens] @ self.lora_b[0])

    def logits(self, x: mx.array) -> mx.array:
        """Return what is added to the product of x [..., D] with the table, [..., V]."""
        a = self.lora_a[0]
        b = self._scales[0] * self.lora_b[0]
        return (x @ b.T.astype(x.dtype)) @ a.T.astype(x.dtype)


class AdaptedEmbedding(nn.Module):
    """A frozen embedding [V, D] with an adapter on its table: y = E[x] + s A[x] B.

    No dropout acts on it, as in PEFT.

    With ``head`` the adapter acts on the output too, where the table is the head: as in mlx-lm,
    and as one merged table does. PEFT's acts on the input alone, unless its config has
    ``ensure_weight_tying``.
    """

    def __init__(self, embedding: nn.Module, lora: EmbeddingLoRA, head: bool) -> None:
        super().__init__()
        self.embedding = embedding
        self.lora = lora
        self._head = head

    def __call__(self, tokens: mx.array) -> mx.array:
        rows = self.embedding(tokens)
        return rows + self.lora.rows(tokens).astype(rows.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        y = self.embedding.as_linear(x)
        if self._head:
            y = y + self.lora.logits(x).astype(y.dtype)
        return y
