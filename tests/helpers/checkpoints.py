"""Small checkpoints on disk, and what a model computes with or without a pack."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlx_packs import Pack
from mlx_packs.bases.files import tiny_checkpoint
from mlx_packs.bases.model import BaseModel
from mlx_packs.bases.nf4 import NF4Format
from mlx_packs.bases.quantization import QuantizeOptions
from mlx_packs.bases.weight_formats import MLXFormat
from mlx_packs.bases.writer import quantize, verify
from mlx_packs.convert.merge import merge_pack
from mlx_packs.packs.base import load_base_for
from mlx_packs.reading import read_header
from mlx_packs.runtime import mx
from tests.helpers.models import model_of

TOKENS = mx.arange(1, 33)[None]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SIZES = {"vocab_size": 4096, "intermediate_size": 128}
SIZES_OF = {
    "gpt2": {"vocab_size": 4096, "n_positions": 2048},
    "qwen3_moe": {
        **SIZES,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
}


def write_checkpoint(
    folder: Path, family: str = "qwen3", dtype: mx.Dtype = mx.float32, **changes
) -> Path:
    """Write a small dense checkpoint with a tokenizer; GPT-2's is transposed, as transformers does."""
    model, config = model_of(family, **{**SIZES_OF.get(family, SIZES), **changes})
    tensors = {n: t.astype(dtype) for n, t in tree_flatten(model.parameters())}
    if family == "gpt2":
        transposed = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
        tensors = {
            n.removeprefix("model."): mx.contiguous(t.T) if n.endswith(transposed) else t
            for n, t in tensors.items()
        }
    return write_files(folder, tensors, config)


def write_dense(folder: Path, dtype: mx.Dtype = mx.bfloat16, family="qwen3", **changes) -> Path:
    """Write a small dense checkpoint in half precision, of widths that every format divides."""
    model, config = model_of(family, **{"hidden_size": 128, "intermediate_size": 192} | changes)
    model.set_dtype(dtype)
    return write_files(folder, dict(tree_flatten(model.parameters())), config)


def write_files(folder: Path, tensors: dict[str, mx.array], config: dict) -> Path:
    """Write the files of a checkpoint, with the tokenizer of the tiny base."""
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    for file in TOKENIZER_FILES:
        shutil.copy(tiny_checkpoint() / file, folder)
    return folder


def write_quantized(folder: Path, source: Path, bits: int = 4, mode: str = "affine") -> Path:
    """Quantize a checkpoint as `packs quantize` does."""
    weight_format = NF4Format() if mode == "nf4" else MLXFormat(mode, bits, 32)
    quantize(source, folder, QuantizeOptions(weight_format))
    return folder


def layout(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """Return the dtype and shape of every tensor of a checkpoint."""
    return {
        name: (t["dtype"], t["shape"])
        for file in folder.glob("model*.safetensors")
        for name, t in read_header(file)[0].items()
    }


def logits(base: BaseModel) -> np.ndarray:
    """Return the logits [1, 32, V] of fixed tokens."""
    base.model.eval()
    return np.array(base.model(TOKENS))


def attached_logits(pack: Pack, model: Path) -> np.ndarray:
    """Return the logits of a pack's base with the pack applied."""
    base = load_base_for(pack, model)
    with base.applied(pack):
        return logits(base)


def merged(pack: Pack, model: Path, out: Path, **options) -> dict:
    """Merge a pack on few rows and verify what was written; the report."""
    report = merge_pack(pack, model, out, **{"rows": 2, "max_drift": 10.0, **options})
    assert report["passed"] and verify(out)["merged"]["kl_mean"] == report["kl_mean"]
    return report


def write_stored(
    folder: Path,
    bits: int | None = None,
    finer: Sequence[str] = (),
    dtype: mx.Dtype = mx.float32,
    shards: int = 1,
    **changes,
) -> Path:
    """Write a Qwen3 as mlx-lm stores it: dense or in ``bits``, ``finer`` modules in 8, in shards."""
    model, config = model_of("qwen3", **SIZES | changes)
    model.set_dtype(dtype)
    if bits:
        chosen = {"group_size": 32, "bits": bits}
        of_finer = {path: {"group_size": 64, "bits": 8} for path in finer}

        def how(path, module):
            return of_finer.get(path, chosen) if hasattr(module, "to_quantized") else False

        nn.quantize(model, class_predicate=how)
        config["quantization"] = chosen | of_finer
    write_files(folder, dict(tree_flatten(model.parameters())), config)
    if shards > 1:
        split(folder, shards)
    return folder


def split(folder: Path, shards: int) -> None:
    """Split the weights of a checkpoint into shards with an index."""
    tensors, where = mx.load(str(folder / "model.safetensors")), {}
    for i in range(shards):
        name = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[i::shards]}
        mx.save_safetensors(str(folder / name), part, {"format": "mlx"})
        where |= dict.fromkeys(part, name)
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
