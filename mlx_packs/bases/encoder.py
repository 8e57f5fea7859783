"""Sentence encoders of the BERT family: MiniLM, bge, e5 and gte share this architecture.

The modules are named as transformers names them, so that a checkpoint's tensors load as they lie. A
folder of sentence-transformers is read as it is: how tokens become one vector stands in its
``modules.json`` and ``1_Pooling/config.json``, how long a text may be in
``sentence_bert_config.json`` (or with the tokenizer). All is float32.

BERT: https://arxiv.org/abs/1810.04805. Sentence-BERT: https://arxiv.org/abs/1908.10084
"""

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ..config.choices import ENCODERS
from ..errors import PackError
from ..ops.exponential import gelu
from ..runtime import mx
from .files import weight_files

POOLING = ("mean", "cls", "max")
MODULES = "modules.json"
_SETTINGS = "sentence_bert_config.json"
_TOKENIZER = "tokenizer_config.json"
_PROMPTS = "config_sentence_transformers.json"
_ACTIVATIONS = {
    "gelu": gelu,
    "gelu_new": nn.gelu_approx,
    "gelu_fast": nn.gelu_approx,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "relu": nn.relu,
    "silu": nn.silu,
    "swish": nn.silu,
}
# Encoders of other families that people train with sentence-transformers, by model_type.
_OTHERS = (
    "albert camembert deberta deberta-v2 distilbert electra gte_new jina_bert modernbert mpnet "
    "new nomic_bert roberta t5 xlm-roberta"
).split()
_UNUSED = re.compile(r"(pooler|cls|classifier)\.|embeddings\.position_ids$")


@dataclass(frozen=True)
class Reading:
    """How texts become vectors: pooling of the tokens' states, and whether to length 1.

    max_seq_length: tokens of a text with [CLS] and [SEP]; None is all that there are positions for.
    """

    pooling: str = "mean"
    normalize: bool = False
    max_seq_length: int | None = None
    lower_case: bool = False

    def to_json(self) -> dict:
        """What a pack's manifest says of it."""
        return {"pooling": self.pooling, "normalize": self.normalize}


def is_encoder(path: Path, config: dict) -> bool:
    """Whether a checkpoint is an encoder that is read here.

    Raises: PackError for one of another family.
    """
    kind = config.get("model_type")
    if kind in _OTHERS:
        raise PackError(
            f"{path}: is an encoder of model_type '{kind}'; of encoders only "
            f"{', '.join(ENCODERS)} is read here."
        )
    return kind in ENCODERS


def read_reading(path: Path) -> Reading:
    """What the files of sentence-transformers in a folder say; without them mean pooling.

    Raises: PackError naming the module or setting that is not done here.
    """
    settings = _read_json(path / _SETTINGS, dict)
    prompts = _read_json(path / _PROMPTS, dict)
    if name := prompts.get("default_prompt_name"):
        raise PackError(
            f"{path / _PROMPTS}: puts the prompt '{name}' before every text; set "
            "default_prompt_name to null and write it into your texts."
        )
    longest = settings.get("max_seq_length")
    if longest is None:
        longest = _read_json(path / _TOKENIZER, dict).get("model_max_length")
        longest = int(longest) if isinstance(longest, (int, float)) and longest < 2**31 else None
    if longest is not None and not (type(longest) is int and longest > 2):
        raise PackError(
            f"{path / _SETTINGS}: max_seq_length must be an integer above 2, but is {longest!r}."
        )
    found = {"max_seq_length": longest, "lower_case": settings.get("do_lower_case") is True}
    kinds = []
    for module in _read_json(path / MODULES, list):
        if not isinstance(module, dict) or not isinstance(module.get("type"), str):
            raise PackError(f"{path / MODULES}: every module must have a 'type', but got {module}.")
        kind, place = module["type"].rpartition(".")[2], str(module.get("path") or "")
        kinds.append(kind)
        if kind == "Transformer" and place:
            raise PackError(
                f"{path / MODULES}: its Transformer lies in the folder '{place}'; move "
                "what is in it up, and set its path to ''."
            )
        if kind == "Pooling":
            found["pooling"] = _pooling(path / place / "config.json")
        elif kind == "Normalize":
            found["normalize"] = True
        elif kind != "Transformer":
            raise PackError(
                f"{path / MODULES}: the module {kind} ('{place}') is not done here; "
                "known are Transformer, Pooling and Normalize."
            )
    if kinds and kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise PackError(
            f"{path / MODULES}: must be Transformer, Pooling and at most Normalize, in "
            f"this order, but is {', '.join(kinds)}."
        )
    return Reading(**found)


def _pooling(file: Path) -> str:
    """The one kind of pooling that a config of the Pooling module turns on."""
    config = _read_json(file, dict)
    on = config.get("pooling_mode")
    if on is None:  # before sentence-transformers 5 a switch for each
        names = {"mean_tokens": "mean", "cls_token": "cls", "max_tokens": "max"}
        switches = {k.removeprefix("pooling_mode_"): v for k, v in config.items()}
        on = [names.get(key, key) for key, value in switches.items() if value is True]
        on = [name for name in on if name != "include_prompt"]
    on = [on] if isinstance(on, str) else list(on or [])
    if len(on) != 1 or on[0] not in POOLING:
        raise PackError(
            f"{file}: pools by {' and '.join(map(str, on)) or 'nothing'}; one of "
            f"{', '.join(POOLING)} is done here."
        )
    return on[0]


def _read_json(file: Path, kind: type):
    """What a file holds; an empty ``kind`` where there is none."""
    if not file.is_file():
        return kind()
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise PackError(f"{file}: is not valid JSON: {error}.") from None
    if not isinstance(found, kind):
        raise PackError(f"{file}: must hold a {kind.__name__}, but is a {type(found).__name__}.")
    return found


class _Embeddings(nn.Module):
    def __init__(self, vocab: int, positions: int, types: int, dims: int, eps: float):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, dims)
        self.position_embeddings = nn.Embedding(positions, dims)
        self.token_type_embeddings = nn.Embedding(types, dims)
        self.LayerNorm = nn.LayerNorm(dims, eps)

    def __call__(self, tokens: mx.array) -> mx.array:
        """[B, T] to [B, T, D]; a text is all of the first type."""
        places = self.position_embeddings.weight[: tokens.shape[1]]
        places = places + self.token_type_embeddings.weight[0]
        return self.LayerNorm(self.word_embeddings(tokens) + places)


class _SelfAttention(nn.Module):
    def __init__(self, dims: int, heads: int):
        super().__init__()
        self.query = nn.Linear(dims, dims)
        self.key = nn.Linear(dims, dims)
        self.value = nn.Linear(dims, dims)
        self._heads = heads

    def __call__(self, x: mx.array, mask: mx.array | None) -> mx.array:
        """x: [B, T, D].   mask: [B, 1, 1, T], which keys are there; it is never [T, T]."""

        def heads(y: mx.array) -> mx.array:
            return y.reshape(*y.shape[:2], self._heads, -1).swapaxes(1, 2)  # [B, H, T, D / H]

        q, k, v = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        scale = 1 / math.sqrt(q.shape[-1])
        attended = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
        return attended.swapaxes(1, 2).reshape(x.shape)


class _Residual(nn.Module):
    """A product added to what went in before, and normed."""

    def __init__(self, in_dims: int, dims: int, eps: float):
        super().__init__()
        self.dense = nn.Linear(in_dims, dims)
        self.LayerNorm = nn.LayerNorm(dims, eps)

    def __call__(self, x: mx.array, before: mx.array) -> mx.array:
        return self.LayerNorm(self.dense(x) + before)


class _Attention(nn.Module):
    def __init__(self, dims: int, heads: int, eps: float):
        super().__init__()
        self.self = _SelfAttention(dims, heads)
        self.output = _Residual(dims, dims, eps)

    def __call__(self, x: mx.array, mask: mx.array | None) -> mx.array:
        return self.output(self.self(x, mask), x)


class _Intermediate(nn.Module):
    def __init__(self, dims: int, ffn: int, activation: Callable[[mx.array], mx.array]):
        super().__init__()
        self.dense = nn.Linear(dims, ffn)
        self._activation = activation

    def __call__(self, x: mx.array) -> mx.array:
        return self._activation(self.dense(x))


class _Layer(nn.Module):
    def __init__(self, dims: int, heads: int, ffn: int, eps: float, activation: Callable):
        super().__init__()
        self.attention = _Attention(dims, heads, eps)
        self.intermediate = _Intermediate(dims, ffn, activation)
        self.output = _Residual(ffn, dims, eps)

    def __call__(self, x: mx.array, mask: mx.array | None) -> mx.array:
        x = self.attention(x, mask)
        return self.output(self.intermediate(x), x)


class _Layers(nn.Module):
    def __init__(self, layers: list[_Layer]):
        super().__init__()
        self.layer = layers


class Encoder(nn.Module):
    """Tokens to one vector a text.

    Semantics: pool(layers(words[tokens] + positions + type)), / its length if ``normalize``.
    """

    def __init__(self, config: dict, reading: Reading):
        super().__init__()
        dims, ffn = config["hidden_size"], config["intermediate_size"]
        eps = config.get("layer_norm_eps", 1e-12)
        activation = _ACTIVATIONS[config.get("hidden_act", "gelu")]
        positions, types = config["max_position_embeddings"], config.get("type_vocab_size", 2)
        self.embeddings = _Embeddings(config["vocab_size"], positions, types, dims, eps)
        self.encoder = _Layers(
            [
                _Layer(dims, config["num_attention_heads"], ffn, eps, activation)
                for _ in range(config["num_hidden_layers"])
            ]
        )
        self._reading, self._dims, self._positions = reading, dims, positions

    @property
    def layers(self) -> list[nn.Module]:
        """The transformer blocks, in order."""
        return self.encoder.layer

    @property
    def reading(self) -> Reading:
        return self._reading

    @property
    def dims(self) -> int:
        """Width of a vector."""
        return self._dims

    @property
    def longest(self) -> int:
        """Tokens of a text at most."""
        return min(self._reading.max_seq_length or self._positions, self._positions)

    def __call__(self, tokens: mx.array, lengths: mx.array | None = None) -> mx.array:
        """One vector a row, float32 [B, D].

        Args:
            tokens: [B, T].   lengths: [B], how many of each row are there; None is all.
        """
        there = None
        if lengths is not None:
            there = mx.arange(tokens.shape[1])[None] < lengths[:, None]  # [B, T]
        mask = None if there is None else there[:, None, None]
        x = self.embeddings(tokens)
        for layer in self.encoder.layer:
            x = layer(x, mask)
        pooled = self._pooled(x, there)
        return unit(pooled) if self._reading.normalize else pooled

    def _pooled(self, x: mx.array, there: mx.array | None) -> mx.array:
        """[B, T, D] to [B, D]."""
        if self._reading.pooling == "cls":
            return x[:, 0]
        if there is None:
            return x.max(axis=1) if self._reading.pooling == "max" else x.mean(axis=1)
        if self._reading.pooling == "max":
            return mx.where(there[..., None], x, -mx.inf).max(axis=1)
        # a product, so that no [B, T, D] is made
        return (there.astype(x.dtype)[:, None] @ x)[:, 0] / there.sum(axis=1, keepdims=True)


def unit(x: mx.array) -> mx.array:
    """Vectors of length 1, [..., D]; one of length 0 stays."""
    square = x.square().sum(axis=-1, keepdims=True)
    return x * mx.rsqrt(mx.maximum(square, 1e-24))


def tensor_name(stored: str) -> str | None:
    """What a checkpoint's tensor is called here; None if it plays no part."""
    name = stored.removeprefix("bert.")
    if _UNUSED.match(name):
        return None
    # checkpoints that came from TensorFlow
    return re.sub(r"LayerNorm\.(gamma|beta)$", _of_norm, name)


def _of_norm(match: re.Match) -> str:
    return "LayerNorm." + {"gamma": "weight", "beta": "bias"}[match[1]]


def make_encoder(path: Path, config: dict) -> Encoder:
    """The encoder of a folder with random weights.

    Raises: PackError for what its config asks for and is not done here.
    """
    return Encoder(check_config(config, path / "config.json"), read_reading(path))


def check_config(config: dict, where: Path) -> dict:
    """The config itself. Raises: PackError for what it asks for and is not done here."""
    needed = (
        "hidden_size intermediate_size max_position_embeddings num_attention_heads "
        "num_hidden_layers vocab_size"
    ).split()
    for key in needed:
        if not (type(config.get(key)) is int and config[key] > 0):
            raise PackError(
                f"{where}: {key} must be an integer above 0, but is {config.get(key)!r}."
            )
    if config["hidden_size"] % config["num_attention_heads"]:
        raise PackError(
            f"{where}: hidden_size {config['hidden_size']} cannot be cut into "
            f"{config['num_attention_heads']} heads."
        )
    if (kind := config.get("position_embedding_type", "absolute")) != "absolute":
        raise PackError(
            f"{where}: position_embedding_type '{kind}' is not done here, only absolute."
        )
    if (name := config.get("hidden_act", "gelu")) not in _ACTIVATIONS:
        raise PackError(
            f"{where}: hidden_act '{name}' is not done here; known are {', '.join(_ACTIVATIONS)}."
        )
    if config.get("is_decoder"):
        raise PackError(f"{where}: is_decoder: a BERT that decodes is no sentence encoder.")
    if config.get("quantization") or config.get("quantization_config"):
        raise PackError(f"{where}: is quantized; an encoder is read in float32 alone.")
    return config


def load_encoder(path: Path, config: dict, lazy: bool = False) -> Encoder:
    """The encoder of a folder, frozen; in float32, or ``lazy`` as stored with no weight read.

    Raises: PackError if its tensors do not fit its config.
    """
    model = make_encoder(path, config)
    found: dict[str, mx.array] = {}
    for file in weight_files(path):
        for stored, tensor in mx.load(str(file)).items():
            if name := tensor_name(stored):
                found[name] = tensor if lazy else tensor.astype(mx.float32)
    wanted = {name: tuple(a.shape) for name, a in tree_flatten(model.parameters())}
    faults = [
        f"{name}: is {tuple(found[name].shape) if name in found else 'missing'}, must be "
        f"{wanted.get(name, 'absent')}"
        for name in sorted(set(wanted) | set(found))
        if name not in found or tuple(found[name].shape) != wanted.get(name)
    ]
    if faults:
        more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
        raise PackError(
            f"{path}: tensors and config.json do not fit: {'; '.join(faults[:3])}{more}."
        )
    model.load_weights(list(found.items()))
    model.freeze()
    model.eval()
    if not lazy:
        mx.eval(model.parameters())
    return model


def load_tokenizer(path: Path, config: dict, lower_case: bool, trust_remote_code: bool) -> object:
    """The checkpoint's own WordPiece, from tokenizer.json or vocab.txt.

    Raises: PackError if there is none, or it has more tokens than the encoder.
    """
    from huggingface_hub.errors import StrictDataclassError

    # as mlx-lm does: that there is no torch is no news
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    if not (path / "tokenizer.json").is_file() and not (path / "vocab.txt").is_file():
        raise PackError(f"{path}: has neither tokenizer.json nor vocab.txt.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        works = tokenizer.is_fast and tokenizer.encode("a")
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())[:300]
        raise PackError(f"{path}: the tokenizer cannot be loaded: {reason}") from None
    if not works:
        raise PackError(f"{path}: the tokenizer cannot be loaded: it is no fast WordPiece.")
    if len(tokenizer) > config["vocab_size"]:
        raise PackError(
            f"{path}: the tokenizer has {len(tokenizer)} tokens, but the encoder "
            f"{config['vocab_size']} rows for them."
        )
    if lower_case:
        from tokenizers.normalizers import Lowercase, Sequence

        backend = tokenizer.backend_tokenizer
        steps = [Lowercase(), *([backend.normalizer] if backend.normalizer else [])]
        backend.normalizer = Sequence(steps)
    return tokenizer


def tokens_of(tokenizer, texts: Sequence[str], limit: int) -> list[np.ndarray]:
    """Tokens of each text with [CLS] and [SEP], cut to ``limit``."""
    if not texts:
        return []
    found = tokenizer(
        list(texts),
        truncation=True,
        max_length=limit,
        return_attention_mask=False,
        return_token_type_ids=False,
    )
    return [np.array(ids, dtype=np.int32) for ids in found["input_ids"]]


def padded(rows: Sequence[np.ndarray], width: int | None = None) -> np.ndarray:
    """Rows of tokens as one int32 [B, T], zeros behind each."""
    laid = np.zeros((len(rows), width or max(map(len, rows))), dtype=np.int32)
    for at, row in enumerate(rows):
        laid[at, : len(row)] = row
    return laid


def embedded(model: Encoder, rows: Sequence[np.ndarray], batch_size: int) -> np.ndarray:
    """Vectors of rows of tokens, float32 [N, D]; rows of like length go together, long ones first.

    The model must not be in training.
    """
    lengths = np.array([len(row) for row in rows], dtype=np.int32)
    order = np.argsort(-lengths, kind="stable")
    vectors = np.zeros((len(rows), model.dims), dtype=np.float32)
    for start in range(0, len(rows), batch_size):
        chosen = order[start : start + batch_size]
        alike = lengths[chosen].min() == lengths[chosen].max()
        tokens = mx.array(padded([rows[i] for i in chosen]))
        vectors[chosen] = np.array(model(tokens, None if alike else mx.array(lengths[chosen])))
    return vectors
