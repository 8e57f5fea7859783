"""Small random models of several families."""

import importlib
from pathlib import Path

from mlx_packs.packs.base import Base
from mlx_packs.runtime import mx


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
        config = {
            "model_type": "gpt2",
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 128,
            "n_ctx": 128,
            "layer_norm_epsilon": 1e-5,
            "vocab_size": 128,
            "num_attention_heads": 4,
        }
    config |= changes
    if family == "qwen2":
        config.pop("head_dim", None)
    module = importlib.import_module(f"mlx_lm.models.{family}")
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.freeze()
    model.eval()
    mx.eval(model.parameters())
    return model, config


def base_of(family: str, **changes) -> Base:
    """A Base around a small random model, without tokenizer."""
    model, config = model_of(family, **changes)
    return Base(family, Path("nowhere"), model, None, config, "0" * 64)
