"""Small random models of several families."""

import copy
import importlib
from pathlib import Path

import mlx.nn as nn

from mlx_packs.nn.nf4 import NF4Embedding
from mlx_packs.ops import nf4
from mlx_packs.packs.base import Base
from mlx_packs.runtime import mx

# Settings of small models of several families, besides those of `model_of`.
SMALL_FAMILIES = {
    "qwen3": {},
    "llama": {},
    "smollm3": {"no_rope_layers": [1, 0]},  # a block without positions
    "gpt2": {},  # learned positions
    "gpt_bigcode": {
        **{"n_embd": 64, "n_layer": 2, "n_inner": 96, "n_head": 4, "n_positions": 128},
        "layer_norm_epsilon": 1e-5,
    },
    "gemma2": {
        **{"query_pre_attn_scalar": 32, "attn_logit_softcapping": 50.0},
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        **{"sliding_window": 6, "sliding_window_pattern": 2, "query_pre_attn_scalar": 32}
    },
    "phi": {"num_key_value_heads": 4, "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5},
    "olmo2": {},
    "qwen3_moe": {
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        **{"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
    },
}


def model_of(family: str, **changes):
    """A small random model of a family of mlx-lm, and its config."""
    config = {
        "model_type": family,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "vocab_size": 128,
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }

    if family == "gpt2":
        sizes = dict.fromkeys(("n_positions", "n_ctx", "vocab_size"), 128)
        heads = dict.fromkeys(("n_head", "num_attention_heads"), 4)
        config = {"n_embd": 64, "n_layer": 2, "layer_norm_epsilon": 1e-5, **sizes, **heads}
        config["model_type"] = "gpt2"

    config |= changes
    if family == "qwen2":
        config.pop("head_dim", None)
    return _random_model(config), config


def _random_model(config: dict) -> nn.Module:
    """A frozen model of a config.json, in float32."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict(copy.deepcopy(config)))
    model.freeze()
    model.eval()
    mx.eval(model.parameters())
    return model


def base_of(family: str, **changes) -> Base:
    """A Base around a small random model, without tokenizer."""
    model, config = model_of(family, **changes)
    return Base(family, Path("nowhere"), model, None, config, "0" * 64)


def base_of_config(config: dict) -> Base:
    """A Base around a random model of a config.json, without tokenizer."""
    model = _random_model(config)
    return Base(config["model_type"], Path("nowhere"), model, None, config, "0" * 64)


def nf4_embedding(
    embedding: nn.Embedding, group_size: int = 64, double_quant: bool = True
) -> NF4Embedding:
    weight = nf4.quantize(embedding.weight, group_size, double_quant)
    return NF4Embedding(weight, embedding.weight.dtype)
