"""Attention and MLP of the Llama family with grouped projections, and recomputed blocks.

`GroupedAttention` and `GroupedMLP` hold the very same projection modules, norms and RoPE as the
block that they stand in for, under the same names and with the same call, so that
`mlx_lm.generate` and its KV caches work on them. What changes: q, k, v (and gate, up) share one
pass over their input.
"""

import mlx.core as mx
import mlx.nn as nn

from ..ops.attention import attention
from ..ops.exponential import swiglu
from .lora import GroupedLoRA

# Attention with q_proj, k_proj, v_proj, o_proj, rope, scale (and q_norm, k_norm), by module.
_GROUPED_MODULES = ("mlx_lm.models.qwen3", "mlx_lm.models.qwen2", "mlx_lm.models.llama")


def is_grouped_attention(module: nn.Module) -> bool:
    """Whether `GroupedAttention` computes what this attention computes."""
    return type(module).__module__ in _GROUPED_MODULES and type(module).__name__ == "Attention"


def is_grouped_mlp(module: nn.Module) -> bool:
    """Whether `GroupedMLP` computes what this feed-forward computes."""
    return type(module).__module__ in _GROUPED_MODULES and type(module).__name__ == "MLP"


class GroupedAttention(nn.Module):
    """Self-attention whose q, k, v are one projection group and whose o is another."""

    def __init__(self, attention: nn.Module, qkv: GroupedLoRA | None, o: GroupedLoRA | None):
        super().__init__()
        for name, child in attention.items():
            self[name] = child
        self.n_heads = attention.n_heads
        self.n_kv_heads = attention.n_kv_heads
        self.scale = attention.scale
        self.qkv_lora = qkv
        self.o_lora = o

    def __call__(self, x: mx.array, mask=None, cache=None) -> mx.array:
        """x [B, T, D] to [B, T, D]; mask and cache as in mlx-lm."""
        B, T, _ = x.shape
        projected = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        if self.qkv_lora is not None:
            projected = self.qkv_lora(x, projected)
        queries, keys, values = projected
        queries = queries.reshape(B, T, self.n_heads, -1)
        keys = keys.reshape(B, T, self.n_kv_heads, -1)
        values = values.reshape(B, T, self.n_kv_heads, -1).transpose(0, 2, 1, 3)
        if "q_norm" in self:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys = queries.transpose(0, 2, 1, 3), keys.transpose(0, 2, 1, 3)
        attend = self._attend if self.training else self._attend_as_mlx_lm
        attended = attend(queries, keys, values, mask, cache)
        attended = attended.transpose(0, 2, 1, 3).reshape(B, T, -1)
        output = self.o_proj(attended)
        return output if self.o_lora is None else self.o_lora(attended, [output])[0]

    def _attend(self, queries, keys, values, mask, cache) -> mx.array:
        """Attention in training, where there is no cache."""
        return attention(self.rope(queries), self.rope(keys), values, self.scale, mask)

    def _attend_as_mlx_lm(self, queries, keys, values, mask, cache) -> mx.array:
        """Attention as mlx-lm's block has it, to the bit; its caches may be quantized."""
        from mlx_lm.models.base import scaled_dot_product_attention

        if cache is None:
            queries, keys = self.rope(queries), self.rope(keys)
        else:
            queries = self.rope(queries, offset=cache.offset)
            keys = self.rope(keys, offset=cache.offset)
            keys, values = cache.update_and_fetch(keys, values)
        return scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=self.scale, mask=mask
        )


class GroupedMLP(nn.Module):
    """SwiGLU whose gate and up are one projection group and whose down is another."""

    def __init__(self, mlp: nn.Module, gate_up: GroupedLoRA | None, down: GroupedLoRA | None):
        super().__init__()
        for name, child in mlp.items():
            self[name] = child
        self.gate_up_lora = gate_up
        self.down_lora = down

    def __call__(self, x: mx.array) -> mx.array:
        """x [B, T, D] to [B, T, D]."""
        gated = [self.gate_proj(x), self.up_proj(x)]
        if self.gate_up_lora is not None:
            gated = self.gate_up_lora(x, gated)
        # in training ours, else mlx-lm's, so that attaching changes no bit of a logit
        inner = swiglu(*gated) if self.training else nn.silu(gated[0]) * gated[1]
        output = self.down_proj(inner)
        return output if self.down_lora is None else self.down_lora(inner, [output])[0]


class RecomputedBlock(nn.Module):
    """A block whose inside is computed again in the backward instead of being kept."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "block":
                raise
            return getattr(self["block"], name)

    def __call__(self, *args, **kwargs):
        block = self["block"]
        if not self.training:
            return block(*args, **kwargs)
        dropouts = [m.dropout for m in block.modules() if isinstance(m, GroupedLoRA)]
        # drawn here, once: the inside runs again in the backward and must drop the same inputs
        keys = [_fresh_key() if dropout.p else None for dropout in dropouts]

        def inner(parameters, *inner_args):
            block.update(parameters)
            for dropout, key in zip(dropouts, keys, strict=True):
                dropout.key = key
            output = block(*inner_args, **kwargs)
            for dropout in dropouts:
                dropout.key = None
            return output

        return mx.checkpoint(inner)(block.trainable_parameters(), *args)


def _fresh_key() -> mx.array:
    """A random key, drawn from MLX's own random state (which follows the seed of the run)."""
    return mx.random.randint(0, 2**31 - 1, (2,)).astype(mx.uint32)
