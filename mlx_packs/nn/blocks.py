"""Attention and MLP of the Llama family, whose q, k, v (and gate, up) share one pass over x.

They have the modules and the call of those that they replace, so that `mlx_lm.generate` works.
Attention is `ops.attention` in training, and on CPUs if scores without a KV cache would be more
than one block; otherwise it is bit-identical to mlx-lm's. Kernels for decoding: ops/lora_qmv.py.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..ops.attention import attention, has_fused_gradient
from ..ops.profile import profile
from ..ops.span_attention import Spans, row_of, span_attention, tree_attention
from ..ops.watchdog import is_watched, product_calls
from .frozen_weight import frozen_weight
from .images import ShiftedRoPE
from .lora import GroupedLoRA
from .prefix import PrefixCache, PrefixKeys, PrefixLevels
from .recompute import recomputed
from .segments import SegmentCache
from .surgery import ATTENTION, MLP, GroupedBlock, block_kind


class GroupedAttention(GroupedBlock):
    """Self-attention whose q, k, v are one projection group and whose o is another.

    With ``recompute``, what is between the groups is computed again, but not where MLX has a fused
    gradient, which keeps what enters and leaves attention, and no scores.
    """

    takes_levels = True  # nn/prefix.py

    def __init__(
        self, attention: nn.Module, qkv: GroupedLoRA | None, o: GroupedLoRA | None
    ) -> None:
        super().__init__()
        for name, child in attention.items():
            self[name] = child
        self.n_heads = attention.n_heads
        self.n_kv_heads = attention.n_kv_heads
        self.scale = attention.scale
        self.qkv_lora = qkv
        self.o_lora = o

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """Map x [B, T, D] to [B, T, D]; mask and cache are as in mlx-lm."""
        projections = [self.q_proj, self.k_proj, self.v_proj]
        norms = [self.q_norm, self.k_norm, None] if "q_norm" in self else []
        if (decoded := _decoded(x, projections, self.qkv_lora, norms=norms)) is not None:
            attended = self._attended(*decoded, mask, cache, normed=True)
            return _projected(attended, [self.o_proj], self.o_lora)[0]

        projected = _projected(x, projections, self.qkv_lora)
        width = projected[0].shape[-1] // self.n_heads
        fused = _has_fused_gradient(x.dtype, width, mask, cache)

        if self.training and self.recompute and not fused:
            trainable = [self[name] for name in ("q_norm", "k_norm") if name in self]
            attended = recomputed(
                lambda *qkv, cache: self._attended(*qkv, mask, cache),
                trainable,
                *projected,
                cache=cache,
            )
        else:
            attended = self._attended(*projected, mask, cache)

        if self.training and isinstance(cache, PrefixLevels):
            return recomputed(self._out, _present(self.o_proj, self.o_lora), attended)
        return self._out(attended)

    def _out(self, attended: mx.array | list[mx.array]) -> mx.array:
        """Map [B, T, heads * head_dim], or what `tree_attention` returns, to [B, T, D].

        The row of a tree is put together again for the gradient: attention keeps its parts.
        """
        if isinstance(attended, list):
            attended = row_of(attended)
        return _projected(attended, [self.o_proj], self.o_lora)[0]

    def _attended(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        mask: Any,
        cache: Any,
        normed: bool = False,
    ) -> mx.array | list[mx.array]:
        """Return what `_out` takes of the three projections, [B, T, ...] each."""
        batch, inputs, _ = queries.shape
        spans = _spans_of(cache, mask)
        rows = batch
        length = inputs
        if spans:  # all sequences are one row
            rows = 1
            length = batch * inputs

        queries = queries.reshape(rows, length, self.n_heads, -1)
        keys = keys.reshape(rows, length, self.n_kv_heads, -1)
        values = values.reshape(rows, length, self.n_kv_heads, -1).transpose(0, 2, 1, 3)
        if "q_norm" in self and not normed:
            queries = self.q_norm(queries)
            keys = self.k_norm(keys)
        queries = queries.transpose(0, 2, 1, 3)
        keys = keys.transpose(0, 2, 1, 3)

        seen = length
        if isinstance(cache, PrefixKeys):
            seen += cache.offset
        ours = cache is None or isinstance(cache, SegmentCache | PrefixCache)
        ours = ours and (self.training or profile().cuts_scores(rows * self.n_heads, seen))

        if isinstance(cache, PrefixLevels):
            rope = self.rope
            if isinstance(rope, ShiftedRoPE):  # parts of a tree are turned by their places alone
                queries = rope.shifted(queries)
                keys = rope.shifted(keys)
                rope = rope.rope
            return tree_attention(queries, keys, values, self.scale, rope, mask.size, spans)
        if spans:  # positions run on, as they may: what counts is how far two of them are apart
            queries = self.rope(queries, offset=cache.offset)
            keys = self.rope(keys, offset=cache.offset)
            attended = span_attention(queries, keys, values, self.scale, spans)
        else:
            attend = self._attend if ours else self._attend_as_mlx_lm
            attended = attend(queries, keys, values, mask, cache)

        return attended.transpose(0, 2, 1, 3).reshape(batch, inputs, -1)

    def _attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, mask: Any, cache: Any
    ) -> mx.array:
        """Attend by blocks; a cache has the segments of packed examples, or keys of a prefix."""
        if isinstance(cache, PrefixKeys):
            queries = self.rope(queries, offset=cache.offset)
            keys = self.rope(keys, offset=cache.offset)
            keys, values = cache.update_and_fetch(keys, values)
            return attention(queries, keys, values, self.scale, mask)

        segments = None
        if cache is not None and mask is cache.unwindowed:
            mask = "causal"
            segments = cache.segments
        return attention(self.rope(queries), self.rope(keys), values, self.scale, mask, segments)

    def _attend_as_mlx_lm(
        self, queries: mx.array, keys: mx.array, values: mx.array, mask: Any, cache: Any
    ) -> mx.array:
        """Attend bit-identically to mlx-lm's module; its caches may be quantized."""
        from mlx_lm.models.base import scaled_dot_product_attention

        if cache is None:
            queries = self.rope(queries)
            keys = self.rope(keys)
        else:
            queries = self.rope(queries, offset=cache.offset)
            keys = self.rope(keys, offset=cache.offset)
            keys, values = cache.update_and_fetch(keys, values)

        return scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=self.scale, mask=mask
        )


class GroupedMLP(GroupedBlock):
    """SwiGLU whose gate and up are one projection group and whose down is another."""

    def __init__(
        self, mlp: nn.Module, gate_up: GroupedLoRA | None, down: GroupedLoRA | None
    ) -> None:
        super().__init__()
        for name, child in mlp.items():
            self[name] = child
        self.gate_up_lora = gate_up
        self.down_lora = down

    def __call__(self, x: mx.array) -> mx.array:
        if not (ends := self._ends(x)):
            return self._forward(x)
        return mx.concatenate([self._forward(part) for part in mx.split(x, ends, 1)], axis=1)

    def _ends(self, x: mx.array) -> list[int]:
        """Return where tokens are cut, so that no product keeps a display waiting."""
        if not (is_watched() and self.training):
            return []

        tokens = x.size // x.shape[-1]
        calls = product_calls(tokens, frozen_weight(self.gate_proj).shape[0], x.shape[-1])
        length = -(-x.shape[1] // calls)
        return list(range(length, x.shape[1], length))

    def _forward(self, x: mx.array) -> mx.array:
        projections = [self.gate_proj, self.up_proj]
        if (decoded := _decoded(x, projections, self.gate_up_lora, gated=True)) is not None:
            return _projected(decoded[0], [self.down_proj], self.down_lora)[0]

        gated = _projected(x, projections, self.gate_up_lora)
        if self.training and self.recompute:
            return recomputed(self._down, _present(self.down_proj, self.down_lora), *gated)
        return self._down(*gated)

    def _down(self, gate: mx.array, up: mx.array) -> mx.array:
        if self.training:
            inner = profile().swiglu(gate, up)
        else:  # as in mlx-lm, so that attaching changes no bit of a logit
            inner = nn.silu(gate) * up
        return _projected(inner, [self.down_proj], self.down_lora)[0]


def _projected(
    x: mx.array, projections: Sequence[nn.Module], lora: GroupedLoRA | None
) -> list[mx.array]:
    if lora is None:
        return [projection(x) for projection in projections]
    return lora.project(x, projections)


def _present(*modules: nn.Module | None) -> list[nn.Module]:
    return [module for module in modules if module is not None]


GROUPED_BLOCKS = {ATTENTION: GroupedAttention, MLP: GroupedMLP}  # by what they replace


def _decoded(
    x: mx.array, projections: Sequence[nn.Module], lora: GroupedLoRA | None, **then: Any
) -> list[mx.array] | None:
    """Return the outputs of a decoding kernel with what ``then`` asks for; None without one."""
    if lora is None:
        return None
    return lora.decoded(x, projections, **then)


def _spans_of(cache: Any, mask: Any) -> Spans | None:
    """Return the segments that attention is computed for one after the other, if it is."""
    if isinstance(cache, PrefixLevels):
        return cache.levels
    if isinstance(cache, SegmentCache) and mask is cache.unwindowed:
        return cache.spans
    return None


def _has_fused_gradient(dtype: mx.Dtype, width: int, mask: Any, cache: Any) -> bool:
    """Return whether MLX's attention keeps no scores for its gradient, wherever it is called."""
    if isinstance(cache, PrefixLevels):
        whole = mask.size is None
        return whole and has_fused_gradient(dtype, width, "causal", fewer=True)

    follows = isinstance(cache, PrefixKeys) and cache.offset > 0
    return bool(_spans_of(cache, mask)) or has_fused_gradient(dtype, width, mask, follows)


def takes_one_pass(model: nn.Module, inputs: int) -> bool:
    """Return whether a tree of so many inputs takes one pass, also before adapters are attached.

    It does if the attention of every block is, or will be, `GroupedAttention`.
    """
    return inputs <= profile().tree_inputs and len(_attentions(model)) == len(model.layers)


def _attentions(model: nn.Module) -> list[nn.Module]:
    return [
        module
        for module in model.modules()
        if isinstance(module, GroupedAttention) or block_kind(module) is ATTENTION
    ]


def attends_by_spans(model: nn.Module) -> bool:
    """Return whether a model's attention should be computed segment by segment when packed.

    It is so for grouped projections on a device where MLX's own attention has a fused gradient.
    """
    attentions = _attentions(model)
    return bool(attentions) and all(
        has_fused_gradient(mx.bfloat16, round(each.scale**-2), "causal") for each in attentions
    )
