"""How the metadata of a GGUF of llama.cpp become a config.json, and what its tensors are called.

To add an architecture: an entry in `ARCHITECTURES`, with a function for what only its config has.
"""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import pi
from typing import Any

import numpy as np

from ..families import FAMILIES, Family
from .blocks import read_dense
from .header import GgufFile, TensorInfo

Config = dict[str, Any]

_log = logging.getLogger("mlx_packs")
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# Tensors that describe rotary embeddings; the config has what they say.
_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")
_ROPE_TENSORS = ("rope_freqs.weight", *_FACTORS)
# Prefixes of the vision model that Ollama puts into the same file.
VISION = ("v.", "mm.")


@dataclass(frozen=True)
class Architecture:
    """One architecture of llama.cpp that is read; the names of its linears are the family's."""

    model_type: str  # in config.json
    norms: Mapping[str, str]  # modules of a block by the name of their tensors
    extend: Callable[[Config, GgufFile], None] | None = None  # adds what only this config has
    norm_offset: float = 0.0  # what llama.cpp has added to the weights of norms
    needs_bfloat16: bool = False  # whether its activations overflow float16
    scalings: tuple[str, ...] = ("linear",)  # kinds of rope scaling that are read
    rope_tensors: tuple[str, ...] = ()  # the ones of `_ROPE_TENSORS` that are read

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @cached_property
    def names(self) -> dict[str, str]:
        return {theirs: ours for ours, theirs in self.family.gguf_names.items()} | self.norms


def _llama(config: Config, file: GgufFile) -> None:
    rope_dims = file.size("%.rope.dimension_count", config["head_dim"])
    if rope_dims != config["head_dim"]:
        raise file.fault(
            f"rotates {rope_dims} of {config['head_dim']} dimensions of a head, which llama in "
            "mlx-lm does not.",
            "unsupported",
        )

    config |= {"attention_bias": "blk.0.attn_q.bias" in file.tensors, "mlp_bias": False}
    if (factors := file.tensors.get("rope_freqs.weight")) is not None:
        config["rope_scaling"] = _llama3_scaling(config, file, factors)


def _llama3_scaling(config: Config, file: GgufFile, tensor: TensorInfo) -> Config:
    """The published settings, with the largest of the file's factors for the factor."""
    factors = read_dense(file, tensor).astype(np.float64).reshape(-1)
    factor = float(factors.max())
    low = 1.0
    high = 4.0
    context = 8192

    dims = config["head_dim"]
    wavelengths = 2 * pi * config["rope_theta"] ** (np.arange(0, dims, 2) / dims)
    smooth = np.clip((context / wavelengths - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)

    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise file.fault(
            "rope_freqs.weight is not the scaling of Llama 3, and no other is known. Use the "
            "safetensors of the same model.",
            "unsupported",
        )

    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }


def _gemma2(config: Config, file: GgufFile) -> None:
    config |= {
        "attn_logit_softcapping": file.get("%.attn_logit_softcapping", float, 50.0),
        "final_logit_softcapping": file.get("%.final_logit_softcapping", float, 30.0),
        "query_pre_attn_scalar": _attention_scalar(config, blocks_of_largest=46),
        "sliding_window": file.size("%.attention.sliding_window", 4096),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _gemma3(config: Config, file: GgufFile) -> None:
    config |= {
        "query_pre_attn_scalar": _attention_scalar(config, blocks_of_largest=62),
        "sliding_window": file.size("%.attention.sliding_window", 512),
        "sliding_window_pattern": _window_pattern(file),
        "rope_local_base_freq": file.get("%.rope.freq_base_swa", float, 10_000.0),
        "hidden_activation": "gelu_pytorch_tanh",
    }

    if file.get("%.final_logit_softcapping", float, 0.0):
        raise file.fault("caps its logits, which gemma3 in mlx-lm does not.", "unsupported")


def _window_pattern(file: GgufFile) -> int:
    """N if each N-th block attends to everything; it may be written as flags of the blocks."""
    flags = file.metadata.get("gemma3.attention.sliding_window_pattern")
    if not isinstance(flags, (list, np.ndarray)):
        return file.size("%.attention.sliding_window_pattern", 6)

    slides = [bool(flag) for flag in flags]
    pattern = slides.index(False) + 1 if False in slides else 0
    if not pattern or any(s == ((i + 1) % pattern == 0) for i, s in enumerate(slides)):
        raise file.fault("has sliding windows in no regular pattern.", "unsupported")
    return pattern


def _attention_scalar(config: Config, blocks_of_largest: int) -> int:
    """The number whose root divides attention scores; as in llama.cpp, 27B has its own."""
    if config["num_hidden_layers"] == blocks_of_largest:
        return config["hidden_size"] // config["num_attention_heads"]
    return config["head_dim"]


def _phi3(config: Config, file: GgufFile) -> None:
    tensors = file.tensors
    original = file.size(
        "%.rope.scaling.original_context_length", config["max_position_embeddings"]
    )

    rope_dims = file.size("%.rope.dimension_count", config["head_dim"])
    config |= {
        "original_max_position_embeddings": original,
        "partial_rotary_factor": rope_dims / config["head_dim"],
    }

    if any(name in tensors for name in _FACTORS):
        if not all(name in tensors for name in _FACTORS):
            raise file.fault("has one of two lists of rope factors. Get it again.")
        long, short = (read_dense(file, tensors[name]).reshape(-1) for name in _FACTORS)

        config["rope_scaling"] = {
            "type": "longrope",
            "long_factor": long.tolist(),
            "short_factor": short.tolist(),
        }


ARCHITECTURES = {
    "llama": Architecture("llama", _NORMS, _llama, rope_tensors=("rope_freqs.weight",)),
    "qwen2": Architecture("qwen2", _NORMS),
    "qwen3": Architecture("qwen3", {**_NORMS, **_HEAD_NORMS}),
    "gemma2": Architecture(
        "gemma2", _GEMMA_NORMS, _gemma2, norm_offset=1.0, needs_bfloat16=True, scalings=()
    ),
    "gemma3": Architecture(
        "gemma3_text",
        {**_GEMMA_NORMS, **_HEAD_NORMS},
        _gemma3,
        norm_offset=1.0,
        needs_bfloat16=True,
    ),
    "phi3": Architecture(
        "phi3", _NORMS, _phi3, scalings=("linear", "longrope"), rope_tensors=_FACTORS
    ),
}


def architecture_of(file: GgufFile) -> Architecture:
    """Raises PackError for an adapter, a vision projector, and an unsupported architecture."""
    metadata = file.metadata
    kind = metadata.get("general.type", "model")
    if kind == "adapter" or "adapter.type" in metadata:
        raise file.fault(
            "is a LoRA adapter, no base model. Name the GGUF that it belongs to.", "unsupported"
        )

    name = file.architecture
    if kind == "mmproj" or name == "clip" or "clip.has_vision_encoder" in metadata:
        raise file.fault(
            "is a vision projector (mmproj), no language model. Name the GGUF next to it.",
            "unsupported",
        )

    if kind != "model":
        raise file.fault(f"is of the type {str(kind)[:40]!r}, no model.", "unsupported")

    if name not in ARCHITECTURES:
        raise file.fault(
            f"has the architecture {name[:40]!r}. GGUF files of {', '.join(ARCHITECTURES)} are "
            "read; of others take the safetensors.",
            "unsupported",
        )

    return ARCHITECTURES[name]


def config_of(file: GgufFile, architecture: Architecture) -> Config:
    """The config.json of a file, without tokens, dtype and quantization."""
    hidden = file.size("%.embedding_length")
    heads = file.size("%.attention.head_count")

    if file.size("%.expert_count", 1) > 1:
        raise file.fault(
            "is a mixture of experts, which is not read from GGUF. Use the safetensors.",
            "unsupported",
        )

    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise file.fault("has no token_embd.weight. Is it a whole model?")

    config: Config = {
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": file.size("%.block_count"),
        "intermediate_size": file.size("%.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.size("%.attention.head_count_kv", heads),
        "head_dim": file.size("%.attention.key_length", max(1, hidden // heads)),
        "rms_norm_eps": file.get("%.attention.layer_norm_rms_epsilon", float),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": file.size("%.context_length"),
        "rope_theta": file.get("%.rope.freq_base", float, 10_000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }

    if config["num_hidden_layers"] > len(file.tensors):
        raise file.fault(
            f"claims {config['num_hidden_layers']} blocks, but has {len(file.tensors)} tensors."
        )

    _add_scaling(config, file, architecture)
    if architecture.extend:
        architecture.extend(config, file)
    return config


def _add_scaling(config: Config, file: GgufFile, architecture: Architecture) -> None:
    """Add linear scaling; raises PackError if mlx-lm would leave out what the file says."""
    unread = [n for n in _ROPE_TENSORS if n in file.tensors and n not in architecture.rope_tensors]
    if unread:
        raise file.fault(
            f"has {unread[0]}, and {file.architecture} in mlx-lm has no such rope scaling. Use "
            "another model.",
            "unsupported",
        )

    older_key = file.get("%.rope.scale_linear", float, None)
    factor = file.get("%.rope.scaling.factor", float, older_key)
    is_scaled = factor not in (None, 0, 1)
    without_type = "linear" if is_scaled else "none"  # as in llama.cpp
    kind = file.get("%.rope.scaling.type", str, without_type)
    if kind == "none":
        return

    if kind not in architecture.scalings:
        raise file.fault(
            f"has the rope scaling {kind[:40]!r}, which is not read for {file.architecture}, only "
            f"{', '.join(architecture.scalings) or 'none'}. Use the safetensors.",
            "unsupported",
        )
    if kind == "longrope":  # by tensors
        return

    if factor is None or factor <= 0:
        raise file.fault(f"has a rope scaling by {factor}. Copy or download it again.")
    config["rope_scaling"] = {"type": kind, "rope_type": kind, "factor": factor}


def names_of(file: GgufFile, architecture: Architecture, blocks: int) -> dict[str, str]:
    """Tensors by the names of MLX's model, in the order of the file; PackError for any other."""
    names: dict[str, str] = {}

    left_out = [tensor for tensor in file.tensors if tensor.startswith(VISION)]
    if left_out:
        _log.warning("%s: tensors of its vision model are left out (%d).", file.path, len(left_out))

    for tensor in file.tensors:
        if tensor in _ROPE_TENSORS or tensor.startswith(VISION):
            continue

        stem, _, kind = tensor.rpartition(".")
        path = _OUTSIDE.get(stem)
        if match := re.fullmatch(r"blk\.(\d{1,5})\.(\w+)", stem):
            module = architecture.names.get(match[2])
            path = module and int(match[1]) < blocks and f"model.layers.{int(match[1])}.{module}"

        if not path or kind not in ("weight", "bias") or f"{path}.{kind}" in names:
            raise file.fault(
                f"has the tensor {tensor[:60]}, for which {file.architecture} has no place here. "
                "Use the safetensors of the same model.",
                "unsupported",
            )
        names[f"{path}.{kind}"] = tensor
    return names
