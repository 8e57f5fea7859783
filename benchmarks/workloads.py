"""Workloads of the training benchmarks: a base, the rows of a batch, and the implementations it suits.

Random bases have the geometry of a real model and 4-bit weights that are random from the start: no
dense weight ever exists, so even a whole model is built in little more than its own bytes.
"""

import importlib
from dataclasses import dataclass
from pathlib import Path

import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_packs import runtime
from mlx_packs.bases.files import TINY
from mlx_packs.config.choices import MATMUL_PATHS
from mlx_packs.nn.quantized import quantized_modules
from mlx_packs.packs.base import Base, load_base
from mlx_packs.runtime import mx

# Chats of the King James Bible, which the tiny base has not read.
PASSAGES = Path(__file__).resolve().parent / "passages"
_WEIGHT_STD = 0.02
_CODE_STD = (255 / 12) ** 0.5  # of the whole numbers 0 to 15, all as likely
_CODE_MEAN = 7.5

QWEN3_4B = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
QWEN3_0_6B = QWEN3_4B | {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
}
LLAMA3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
CONFIGS = {"qwen3_4b": QWEN3_4B, "qwen3_0_6b": QWEN3_0_6B, "llama3_8b": LLAMA3_8B}


@dataclass(frozen=True)
class Workload:
    """A base, the shape of its batches, and the defaults that suit both.

    config: of a random model, None loads one.   matmul_paths: of ours.   mlx_lm_rows: of mlx-lm's
    batch where speed is measured, None is as many as ours.   mlx_lm_steps: timed each turn.
    """

    config: dict | None
    batch_size: int
    length: int
    matmul_paths: tuple[str, ...]
    mlx_lm_rows: int | None = None
    mlx_lm_steps: int = 1


WORKLOADS = {
    "tiny": Workload(None, 4, 128, ("quantized", "transient", "dense"), mlx_lm_steps=3),
    "tiny_long": Workload(None, 1, 4096, ("transient", "dense")),
    "qwen3_4b_block": Workload(
        QWEN3_4B | {"num_hidden_layers": 1, "vocab_size": 8192},
        4,
        128,
        ("transient", "dense"),
        mlx_lm_rows=1,
    ),
    # for a GPU
    "qwen3_4b": Workload(QWEN3_4B, 4, 2048, tuple(MATMUL_PATHS)),
    "qwen3_0_6b": Workload(QWEN3_0_6B, 4, 2048, tuple(MATMUL_PATHS)),
}


def load(workload: Workload, model: str, seed: int) -> Base:
    """The base of a workload: ``model`` loaded, or a random one from its config."""
    return load_base(model) if workload.config is None else random_base(workload.config, seed)


def random_base(config: dict, seed: int) -> Base:
    """A frozen model of a config with random affine 4-bit weights in groups of 64.

    MLX is lazy: the dense weights that its modules begin with are replaced before anything is
    computed. Scales and norms are float32 on a CPU, as `load_base` has them there, else bfloat16.
    """
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    dtype = mx.float32 if runtime.on_cpu() else mx.bfloat16
    model.set_dtype(dtype)
    nn.quantize(model, group_size=64, bits=4)
    packed = [m for _, m in quantized_modules(model)]
    for m, key in zip(packed, mx.random.split(mx.random.key(seed), len(packed)), strict=True):
        scale = _WEIGHT_STD / _CODE_STD
        # the halves of a split key are the only raw random bits that MLX gives out
        m.weight = mx.random.split(key, m.weight.size // 2).reshape(m.weight.shape)
        m.biases = mx.full(m.scales.shape, -_CODE_MEAN * scale, dtype)
        m.scales = mx.full(m.scales.shape, scale, dtype)
        mx.eval(m.parameters())
    model.freeze()
    model.eval()
    mx.eval(model.parameters())
    mx.clear_cache()
    quantization = {"group_size": 64, "bits": 4, "mode": "affine"}
    return Base("random", Path(), model, None, config, "", quantization)


def base_bytes(base: Base) -> int:
    """Bytes of a base's tensors, as they are in memory."""
    return sum(a.nbytes for _, a in tree_flatten(base.model.parameters()))


def activation_dtype(base: Base) -> str:
    """The dtype that hidden states have, without the ``mlx.core.`` before its name."""
    return str(base.model.layers[0].input_layernorm.weight.dtype).rsplit(".", 1)[-1]


def base_name(workload: str, model: str) -> str:
    """What records call a workload: its name, or the folder of another checkpoint."""
    return workload if model == TINY else Path(model).name
