"""Checkpoints in NF4 as bitsandbytes and transformers write them."""

import json
from pathlib import Path

import numpy as np

from mlx_packs.ops import nf4
from mlx_packs.ops.blockwise import dynamic_map
from mlx_packs.ops.nf4 import LEVELS, NESTED_BLOCK_SIZE, NF4Weight
from mlx_packs.runtime import mx

STATE_BYTES = 256  # more than any state takes; blanks after JSON mean nothing


# quantization_config as transformers writes it, of a checkpoint whose head is dense
CONFIG = {
    "_load_in_4bit": True,
    "_load_in_8bit": False,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "llm_int8_enable_fp32_cpu_offload": False,
    "llm_int8_has_fp16_weight": False,
    "llm_int8_skip_modules": ["lm_head"],
    "llm_int8_threshold": 6.0,
    "load_in_4bit": True,
    "load_in_8bit": False,
    "quant_method": "bitsandbytes",
}


def to_bitsandbytes(name: str, weight: NF4Weight, dtype: str) -> dict[str, mx.array]:
    """The tensors of a weight called ``name`` (with its ``.weight``), once of this dtype."""
    state = {
        "quant_type": "nf4",
        "blocksize": weight.block_size,
        "dtype": dtype,
        "shape": list(weight.shape),
    }
    tensors = {
        name: weight.weight.reshape(-1, 1),
        f"{name}.absmax": weight.absmax,
        f"{name}.quant_map": mx.array(LEVELS),
    }
    if weight.double_quant:
        state["nested_blocksize"] = NESTED_BLOCK_SIZE
        state["nested_dtype"] = "float32"
        state["nested_offset"] = weight.offset.item()
        tensors[f"{name}.nested_absmax"] = weight.nested_absmax
        tensors[f"{name}.nested_quant_map"] = dynamic_map()

    text = json.dumps(state).ljust(STATE_BYTES)
    tensors[f"{name}.quant_state.bitsandbytes__nf4"] = mx.array(
        np.frombuffer(text.encode(), np.uint8)
    )
    return tensors


def write_bitsandbytes(source: Path, folder: Path) -> Path:
    """Quantize the projections of a dense checkpoint in one file, as transformers does."""
    tensors = {}
    for name, tensor in mx.load(str(source / "model.safetensors")).items():
        if name.endswith("_proj.weight"):
            tensors |= to_bitsandbytes(name, nf4.quantize(tensor, 64, True), "bfloat16")
        else:
            tensors[name] = tensor

    folder.mkdir(exist_ok=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = CONFIG
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "pt"})
    return folder
