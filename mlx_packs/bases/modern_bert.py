"""ModernBERT, a sentence encoder with rotary positions whose blocks mostly attend to neighbours.

The modules are named as transformers names them. All is float32.

ModernBERT: https://arxiv.org/abs/2412.13663
"""

from collections.abc import Mapping

import mlx.nn as nn

from ..errors import PackError
from ..runtime import mx
from .encoder import ACTIVATIONS, is_valid, pooled
from .sentence_config import SentenceConfig

_FULL = "full_attention"
_SLIDING = "sliding_attention"
_THETAS = {_FULL: ("global_rope_theta", 160_000.0), _SLIDING: ("local_rope_theta", 10_000.0)}


class _Attention(nn.Module):
    def __init__(self, config: Mapping, theta: float) -> None:
        super().__init__()
        dims = config["hidden_size"]
        bias = config.get("attention_bias", False)
        self.Wqkv = nn.Linear(dims, 3 * dims, bias)
        self.Wo = nn.Linear(dims, dims, bias)
        self._heads = config["num_attention_heads"]
        self._theta = theta

    def __call__(self, x: mx.array, mask: mx.array | None) -> mx.array:
        """Attend from every token of x [B, T, D] to the keys in ``mask``, [B or 1, 1, T, T]."""
        rows, length, dims = x.shape
        qkv = self.Wqkv(x).reshape(rows, length, 3, self._heads, -1)
        q, k, v = (qkv[:, :, i].swapaxes(1, 2) for i in range(3))  # [B, H, T, D / H]

        width = q.shape[-1]
        rotate = {"traditional": False, "base": self._theta, "scale": 1.0, "offset": 0}
        q = mx.fast.rope(q, width, **rotate)
        k = mx.fast.rope(k, width, **rotate)

        attended = mx.fast.scaled_dot_product_attention(q, k, v, scale=width**-0.5, mask=mask)
        return self.Wo(attended.swapaxes(1, 2).reshape(rows, length, dims))


class _FeedForward(nn.Module):
    def __init__(self, config: Mapping) -> None:
        super().__init__()
        dims = config["hidden_size"]
        ffn = config["intermediate_size"]
        bias = config.get("mlp_bias", False)
        self.Wi = nn.Linear(dims, 2 * ffn, bias)
        self.Wo = nn.Linear(ffn, dims, bias)
        self._activation = ACTIVATIONS[config.get("hidden_activation", "gelu")]

    def __call__(self, x: mx.array) -> mx.array:
        """[B, T, D] to [B, T, D]. Semantics: Wo(activation(a) * b) of the halves of Wi(x)."""
        inputs, gate = mx.split(self.Wi(x), 2, axis=-1)
        return self.Wo(self._activation(inputs) * gate)


class _Layer(nn.Module):
    def __init__(self, config: Mapping, number: int, kind: str) -> None:
        super().__init__()
        self.attn_norm = _norm(config) if number else nn.Identity()
        self.attn = _Attention(config, _theta(config, kind))
        self.mlp_norm = _norm(config)
        self.mlp = _FeedForward(config)

    def __call__(self, x: mx.array, mask: mx.array | None) -> mx.array:
        x = x + self.attn(self.attn_norm(x), mask)
        return x + self.mlp(self.mlp_norm(x))


class ModernBert(nn.Module):
    """Computes one vector per text from its tokens, as `encoder.Encoder` does."""

    def __init__(self, config: Mapping, sentence_config: SentenceConfig) -> None:
        super().__init__()
        dims = config["hidden_size"]
        self.embeddings = nn.Module()  # for the tensors' names
        self.embeddings.tok_embeddings = nn.Embedding(config["vocab_size"], dims)
        self.embeddings.norm = _norm(config)

        self._kinds = _kinds(config)
        self.layers = [_Layer(config, i, kind) for i, kind in enumerate(self._kinds)]
        self.final_norm = _norm(config)
        self._reach = config.get("local_attention", 128) // 2

        self.sentence_config = sentence_config
        self.dims = dims  # width of a vector
        positions = config["max_position_embeddings"]
        # tokens of a text at most
        self.longest = min(sentence_config.max_seq_length or positions, positions)

    def __call__(self, tokens: mx.array, lengths: mx.array | None = None) -> mx.array:
        """Tokens [B, T] to float32 [B, D]; of row i ``lengths[i]`` are no padding, None is all."""
        places = mx.arange(tokens.shape[1])
        near = (mx.abs(places[:, None] - places) <= self._reach)[None, None]
        masks = {_FULL: None, _SLIDING: near}
        if lengths is not None:
            valid = is_valid(tokens, lengths)[:, None, None]
            masks = {_FULL: valid, _SLIDING: near & valid}

        embeddings = self.embeddings
        x = embeddings.norm(embeddings.tok_embeddings(tokens))
        for kind, layer in zip(self._kinds, self.layers, strict=True):
            x = layer(x, masks[kind])
        return pooled(self.final_norm(x), lengths, self.sentence_config)


def _norm(config: Mapping) -> nn.LayerNorm:
    eps = config.get("norm_eps", 1e-5)
    return nn.LayerNorm(config["hidden_size"], eps, bias=config.get("norm_bias", False))


def _kinds(config: Mapping) -> list[str]:
    """Which attention each block has: every third is full, unless the config says otherwise."""
    every = config.get("global_attn_every_n_layers", 3)
    blocks = config["num_hidden_layers"]
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [_SLIDING if i % every else _FULL for i in range(blocks)]

    if len(kinds) != blocks or set(kinds) - {_FULL, _SLIDING}:
        text = f"config.json: layer_types must name {blocks} of {_FULL} and {_SLIDING}."
        raise PackError(text, "unreadable")
    return kinds


def _theta(config: Mapping, kind: str) -> float:
    key, default = _THETAS[kind]
    own = (config.get("rope_parameters") or {}).get(kind) or {}
    if own.get("rope_type", "default") != "default" or config.get("rope_scaling"):
        text = "config.json: scaled rotary positions of a ModernBERT are not supported."
        raise PackError(text, "unsupported")

    return own.get("rope_theta") or config.get(key) or default
