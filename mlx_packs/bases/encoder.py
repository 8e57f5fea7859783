"""Sentence encoders: BERT (MiniLM, bge, e5, gte) and ModernBERT.

The modules are named as transformers names them, so that a checkpoint's tensors load unchanged.
All is float32.

BERT: https://arxiv.org/abs/1810.04805
ModernBERT: https://arxiv.org/abs/2412.13663
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np

from ..errors import PackError, file_errors, library_errors
from ..kinds import check_keys
from ..ops.profile import profile
from ..runtime import mx
from .files import weight_files
from .sentence_config import QUERY, SentenceConfig, read_sentence_config
from .tokenizer import in_batches, tokens_of
from .unsupported import unreadable

ACTIVATIONS = {
    "gelu": lambda x: profile().gelu(x),
    "gelu_new": nn.gelu_approx,
    "gelu_fast": nn.gelu_approx,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "relu": nn.relu,
    "silu": nn.silu,
    "swish": nn.silu,
}
_SIZES = (  # in config.json
    "hidden_size intermediate_size max_position_embeddings num_attention_heads num_hidden_layers "
    "vocab_size"
).split()
_UNUSED = re.compile(r"(pooler|cls|classifier|head|decoder)\.|embeddings\.position_ids$")
# Kinds of attention of ModernBERT's blocks: what they call their rotary base, and its default.
_FULL = "full_attention"
_SLIDING = "sliding_attention"
_THETAS = {_FULL: ("global_rope_theta", 160_000.0), _SLIDING: ("local_rope_theta", 10_000.0)}


class _SelfAttention(nn.Module):
    def __init__(self, dims: int, heads: int) -> None:
        super().__init__()
        self.query = nn.Linear(dims, dims)
        self.key = nn.Linear(dims, dims)
        self.value = nn.Linear(dims, dims)
        self._heads = heads

    def __call__(self, x: mx.array, mask: mx.array | None) -> mx.array:
        """Attend from every token of x [B, T, D] to the keys in ``mask`` [B, 1, 1, T]."""

        def heads(y: mx.array) -> mx.array:
            return y.reshape(*y.shape[:2], self._heads, -1).swapaxes(1, 2)  # [B, H, T, D / H]

        q, k, v = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))

        scale = 1 / math.sqrt(q.shape[-1])
        attended = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
        return attended.swapaxes(1, 2).reshape(x.shape)


class _Residual(nn.Module):
    """A product, added to the residual and normalized."""

    def __init__(self, in_dims: int, dims: int, eps: float) -> None:
        super().__init__()
        self.dense = nn.Linear(in_dims, dims)
        self.LayerNorm = nn.LayerNorm(dims, eps)

    def __call__(self, x: mx.array, before: mx.array) -> mx.array:
        return self.LayerNorm(self.dense(x) + before)


class _Layer(nn.Module):
    def __init__(self, dims: int, heads: int, ffn: int, eps: float, activation: Callable) -> None:
        super().__init__()
        self.attention = nn.Module()  # these two are for the tensors' names
        self.attention.self = _SelfAttention(dims, heads)
        self.attention.output = _Residual(dims, dims, eps)
        self.intermediate = nn.Module()
        self.intermediate.dense = nn.Linear(dims, ffn)
        self.output = _Residual(ffn, dims, eps)
        self._activation = activation

    def __call__(self, x: mx.array, mask: mx.array | None) -> mx.array:
        x = self.attention.output(self.attention.self(x, mask), x)
        return self.output(self._activation(self.intermediate.dense(x)), x)


class Encoder(nn.Module):
    """Computes one vector per text from its tokens.

    Semantics: pool(layers(words[tokens] + positions + type)), / its length if ``normalize``.
    """

    def __init__(self, config: dict, sentence_config: SentenceConfig) -> None:
        super().__init__()
        dims = config["hidden_size"]
        eps = config.get("layer_norm_eps") or 1e-12
        positions = config["max_position_embeddings"]
        self.embeddings = nn.Module()  # for the tensors' names
        self.embeddings.word_embeddings = nn.Embedding(config["vocab_size"], dims)
        self.embeddings.position_embeddings = nn.Embedding(positions, dims)
        self.embeddings.token_type_embeddings = nn.Embedding(config.get("type_vocab_size", 2), dims)
        self.embeddings.LayerNorm = nn.LayerNorm(dims, eps)

        ffn = config["intermediate_size"]
        activation = ACTIVATIONS[config.get("hidden_act", "gelu")]
        self.encoder = nn.Module()
        self.encoder.layer = [
            _Layer(dims, config["num_attention_heads"], ffn, eps, activation)
            for _ in range(config["num_hidden_layers"])
        ]

        self.sentence_config = sentence_config
        self.dims = dims  # width of a vector
        # tokens of a text at most
        self.longest = min(sentence_config.max_seq_length or positions, positions)

    @property
    def layers(self) -> list[nn.Module]:
        return self.encoder.layer

    def __call__(self, tokens: mx.array, lengths: mx.array | None = None) -> mx.array:
        """Tokens [B, T] to float32 [B, D]; of row i ``lengths[i]`` are no padding, None is all."""
        mask = is_valid(tokens, lengths)[:, None, None] if lengths is not None else None

        embeddings = self.embeddings
        places = embeddings.position_embeddings.weight[: tokens.shape[1]]
        places = places + embeddings.token_type_embeddings.weight[0]  # a text has the first type
        x = embeddings.LayerNorm(embeddings.word_embeddings(tokens) + places)
        for layer in self.layers:
            x = layer(x, mask)

        return pooled(x, lengths, self.sentence_config)


class _RotaryAttention(nn.Module):
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


class _RotaryLayer(nn.Module):
    def __init__(self, config: Mapping, number: int, kind: str) -> None:
        super().__init__()
        self.attn_norm = _norm(config) if number else nn.Identity()
        self.attn = _RotaryAttention(config, _theta(config, kind))
        self.mlp_norm = _norm(config)

        dims = config["hidden_size"]
        ffn = config["intermediate_size"]
        bias = config.get("mlp_bias", False)
        self.mlp = nn.Module()  # for the tensors' names
        self.mlp.Wi = nn.Linear(dims, 2 * ffn, bias)
        self.mlp.Wo = nn.Linear(ffn, dims, bias)
        self._activation = ACTIVATIONS[config.get("hidden_activation", "gelu")]

    def __call__(self, x: mx.array, mask: mx.array | None) -> mx.array:
        """[B, T, D] to [B, T, D]; the MLP is Wo(activation(a) * b) of the halves of Wi(x)."""
        x = x + self.attn(self.attn_norm(x), mask)
        inputs, gate = mx.split(self.mlp.Wi(self.mlp_norm(x)), 2, axis=-1)
        return x + self.mlp.Wo(self._activation(inputs) * gate)


class ModernBert(nn.Module):
    """As `Encoder`, with rotary positions and blocks that mostly attend to neighbours."""

    def __init__(self, config: Mapping, sentence_config: SentenceConfig) -> None:
        super().__init__()
        dims = config["hidden_size"]
        self.embeddings = nn.Module()  # for the tensors' names
        self.embeddings.tok_embeddings = nn.Embedding(config["vocab_size"], dims)
        self.embeddings.norm = _norm(config)

        self._kinds = _kinds(config)
        self.layers = [_RotaryLayer(config, i, kind) for i, kind in enumerate(self._kinds)]
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


def pooled(x: mx.array, lengths: mx.array | None, sentence_config: SentenceConfig) -> mx.array:
    """States [B, T, D] to float32 [B, D]; of row i the first ``lengths[i]`` count, None is all."""
    vectors = _pooled(x, lengths, sentence_config.pooling).astype(mx.float32)

    return unit(vectors) if sentence_config.normalize else vectors


def _pooled(x: mx.array, lengths: mx.array | None, pooling: str) -> mx.array:
    if pooling == "cls":
        return x[:, 0]

    if lengths is None:
        lengths = mx.full((len(x),), x.shape[1])

    if pooling == "lasttoken":
        return mx.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]

    valid = is_valid(x, lengths)
    if pooling == "max":
        return mx.where(valid[..., None], x, -mx.inf).max(axis=1)

    # a product, so that no [B, T, D] is made
    summed = valid.astype(mx.float32)[:, None] @ x.astype(mx.float32)
    return summed[:, 0] / valid.sum(axis=1, keepdims=True)


def is_valid(x: mx.array, lengths: mx.array) -> mx.array:
    return mx.arange(x.shape[1])[None] < lengths[:, None]


def unit(x: mx.array) -> mx.array:
    """Scale vectors [..., D] to length 1; one of length 0 stays."""
    square = x.square().sum(axis=-1, keepdims=True)
    return x * mx.rsqrt(mx.maximum(square, 1e-24))


def tensor_name(stored: str) -> str | None:
    """The name of a checkpoint's tensor here; None if it is not used."""
    name = stored.removeprefix("bert.").removeprefix("model.")
    if _UNUSED.match(name):
        return None
    # checkpoints that came from TensorFlow
    name = name.replace("LayerNorm.gamma", "LayerNorm.weight")
    return name.replace("LayerNorm.beta", "LayerNorm.bias")


def encoder_class(config: Mapping) -> type[Encoder] | type[ModernBert]:
    return ModernBert if config.get("model_type") == "modernbert" else Encoder


def check_config(config: dict, where: Path) -> dict:
    def unsupported(fault: str) -> PackError:
        return PackError(f"{where}: {fault}", "unsupported")

    with file_errors(where):
        check_keys(config, dict.fromkeys(_SIZES, "an integer above 0"))

    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    if hidden % heads:
        raise PackError(
            f"{where}: hidden_size {hidden} cannot be cut into {heads} heads.", "unreadable"
        )

    if (kind := config.get("position_embedding_type", "absolute")) != "absolute":
        raise unsupported(f"position_embedding_type '{kind}' is not supported, only absolute.")

    key = "hidden_activation" if "hidden_activation" in config else "hidden_act"
    if (name := config.get(key, "gelu")) not in ACTIVATIONS:
        names = ", ".join(ACTIVATIONS)
        raise unsupported(f"{key} '{name}' is not supported. Known are {names}.")

    if config.get("is_decoder"):
        raise unsupported("is_decoder is set, but a BERT that decodes is no sentence encoder.")
    if config.get("quantization") or config.get("quantization_config"):
        raise unsupported("is quantized. An encoder is read only in float32.")
    return config


def load_encoder(path: Path, config: dict, lazy: bool = False) -> Encoder | ModernBert:
    """Frozen: in float32, or ``lazy`` as stored, unread."""
    checked = check_config(config, path / "config.json")
    model = encoder_class(config)(checked, read_sentence_config(path))
    tensors: dict[str, mx.array] = {}

    with library_errors(partial(unreadable, path, config)):
        for file in weight_files(path):
            for stored, tensor in mx.load(str(file)).items():
                if name := tensor_name(stored):
                    tensors[name] = tensor if lazy else tensor.astype(mx.float32)
        model.load_weights(list(tensors.items()))

    model.freeze()
    model.eval()

    if not lazy:
        mx.eval(model.parameters())
    return model


# A module that maps tokens to vectors, with ``sentence_config``, ``dims`` and ``longest``, as
# `Encoder` and `objectives.embedding.DecoderVectors`.
Vectors = Any


@dataclass(frozen=True)
class Embedder:
    """A base as it embeds texts: what computes their vectors, and the tokenizer of these texts."""

    vectors: Vectors
    tokenizer: Any

    @property
    def query_prompt(self) -> str:
        """The base's own text before a query; empty if it has none."""
        config = self.vectors.sentence_config
        if QUERY not in config.prompts:
            return ""
        return config.prompt(QUERY)

    def encode(
        self, texts: Sequence[str], batch_size: int, limit: int, prompt: str = ""
    ) -> np.ndarray:
        """Return the vectors of texts, float32 [N, D], of which ``limit`` tokens are read.

        ``prompt`` is put before each of them.
        """
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise PackError("encode: texts must be a list of texts.", flag="texts")

        prompted = [prompt + text for text in texts]
        tokens = tokens_of(self.tokenizer, prompted, min(limit, self.vectors.longest))
        return embedded(self.vectors, tokens, batch_size)


def embedded(model: Vectors, rows: Sequence[np.ndarray], batch_size: int) -> np.ndarray:
    """The vectors of rows of tokens, float32 [N, D], in batches of similar lengths.

    The model must not be in training.
    """
    if not rows:
        return np.zeros((0, model.dims), np.float32)

    def vectors(tokens: np.ndarray, lengths: np.ndarray) -> mx.array:
        is_padded = lengths.min() != lengths.max()
        return model(mx.array(tokens), mx.array(lengths) if is_padded else None)

    return in_batches(vectors, rows, batch_size)
