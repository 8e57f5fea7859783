"""Bases of several families, packs exported from them, and adapter folders of PEFT."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from mlx_packs import LoRAConfig, Pack, load_base
from mlx_packs.adapters.attach import attach
from mlx_packs.convert.external import CONFIG
from mlx_packs.convert.interop import export_pack
from mlx_packs.runtime import mx
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.encoders import write_vocabulary
from tests.helpers.packs import random_pack

PREFIX = "base_model.model."
WEIGHTS = "adapter_model.safetensors"
LAYER = "model.layers.{}."
Q0 = LAYER.format(0) + "self_attn.q_proj"
DOWN1 = LAYER.format(1) + "mlp.down_proj"
SIZES = {Q0: (64, 128), DOWN1: (128, 64)}
RAGGED = {
    "rank": 4,
    "target_modules": ("q_proj", "v_proj", "down_proj"),
    "rank_pattern": {"layers.0.self_attn.q_proj": 2, "down_proj": 3},
    "alpha_pattern": {"layers.0.self_attn.v_proj": 1.7},
}
KINDS = {
    "uniform": ("qwen3", {"rank": 4, "target_modules": ("q_proj", "up_proj")}),
    "last block": ("llama", {"rank": 4, "num_layers": 1, "target_modules": ("q_proj", "o_proj")}),
    "ragged": ("qwen3", RAGGED),
    "square": ("square", {"rank": 4, "target_modules": ("q_proj", "o_proj")}),
    "slices": (
        "gpt2",
        {
            "rank": 2,
            "alpha": 3.0,
            "target_modules": ("c_attn", "c_proj"),
            "rank_pattern": {"c_attn.v": 5},
        },
    ),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    """Checkpoint folders by family; ``tied`` is a Qwen3 whose head is its embedding."""
    folder = tmp_path_factory.mktemp("bases")
    return {
        "qwen3": write_checkpoint(folder / "qwen3"),
        "llama": write_checkpoint(folder / "llama", "llama"),
        "gpt2": write_checkpoint(folder / "gpt2", "gpt2"),
        "tied": write_checkpoint(folder / "tied", tie_word_embeddings=True),
        # head_dim 16 x 4 heads = hidden 64: q_proj and o_proj are square
        "square": write_checkpoint(folder / "square", head_dim=16, num_key_value_heads=4),
        "moe": write_checkpoint(folder / "moe", "qwen3_moe"),
    }


def pack_with(model: Path, folder: Path, target_modules=(), **lora) -> Pack:
    """A pack of random adapters on all that a LoRAConfig targets."""
    return random_pack(load_base(model), targets=target_modules, **lora).save(folder)


def saved_by_torch(model, folder: Path, pooling: str, normalize: bool = True) -> Path:
    """The folder of an encoder of transformers, as sentence-transformers saves it."""
    from sentence_transformers import SentenceTransformer, models
    from transformers import BertTokenizerFast

    raw = write_vocabulary(folder / "raw")
    model.save_pretrained(raw)
    BertTokenizerFast(str(raw / "vocab.txt")).save_pretrained(raw)
    transformer = models.Transformer(str(raw), max_seq_length=128)
    parts = [transformer, models.Pooling(model.config.hidden_size, pooling_mode=pooling)]
    parts += [models.Normalize()] if normalize else []
    SentenceTransformer(modules=parts, device="cpu").save(str(folder / "model"))
    return folder / "model"


def torch_model(folder: Path):
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")


def adapted(encoder: Path):
    """Our base with random adapters on all projections, and its tensors."""
    base = load_base(encoder)
    attached = attach(base, LoRAConfig(rank=4, alpha=8), None, "dense", 0)
    mx.random.seed(5)
    tensors = {
        name: mx.random.normal(a.shape) * 0.05 if name.endswith("lora_b") else a
        for name, a in attached.tensors().items()
    }
    attached.load(tensors, "test")
    return base, attached, tensors


def torch_adapted(encoder: Path, tensors: dict):
    """Theirs with the same adapters by PEFT."""
    import torch
    from peft import LoraConfig

    model = torch_model(encoder)
    paths = sorted({name.rpartition(".")[0] for name in tensors})
    model.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=paths, lora_dropout=0.0))
    result = {}
    for name, parameter in model[0].auto_model.named_parameters():
        if ".lora_" in name:
            path, _, part = name.partition(".lora_")
            ours = f"{path}.lora_{part[0].lower()}"
            result[ours] = parameter
            with torch.no_grad():
                parameter.copy_(torch.tensor(np.array(tensors[ours]).T))
    assert set(result) == set(tensors)
    return model, result


def edit_json(file: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def write_peft(folder: Path, modules: dict[str, int], sizes: dict, **config) -> Path:
    """A PEFT folder of random factors; ``modules``: path to rank, ``sizes``: path to (in, out)."""
    folder.mkdir()
    extra = config.pop("tensors", {})
    tensors = {}

    for i, (path, rank) in enumerate(modules.items()):
        width, out = sizes[path]
        key = mx.random.key(i)
        tensors[f"{PREFIX}{path}.lora_A.weight"] = 0.2 * mx.random.normal((rank, width), key=key)
        tensors[f"{PREFIX}{path}.lora_B.weight"] = 0.2 * mx.random.normal((out, rank), key=key)

    tensors |= {PREFIX + name: tensor for name, tensor in extra.items()}
    mx.save_safetensors(str(folder / WEIGHTS), tensors)

    stated = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", **config}
    (folder / CONFIG).write_text(json.dumps(stated))
    return folder


@pytest.fixture(scope="module")
def exported(bases, tmp_path_factory):
    """A pack by its kind, its base, and the folder of its export; tests copy what they change."""
    folder = tmp_path_factory.mktemp("exported")

    @cache
    def pack_of_kind(kind: str) -> tuple[Pack, Path]:
        family, lora = KINDS[kind]
        return pack_with(bases[family], folder / kind, **lora), bases[family]

    @cache
    def get(kind: str, to: str) -> tuple[Pack, Path, Path]:
        pack, base = pack_of_kind(kind)
        export_pack(pack, to, folder / f"{kind}-{to}")
        return pack, base, folder / f"{kind}-{to}"

    return get
