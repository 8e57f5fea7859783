"""A GGUF of a small checkpoint of llama or qwen3, dense in float32, for llama.cpp to run."""

import json
from pathlib import Path

import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from mlx_packs import load_base
from mlx_packs.bases.families import FAMILIES
from mlx_packs.runtime import mx

_OUTSIDE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_IN_BLOCK = {
    **FAMILIES["qwen3"].gguf_names,
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(folder: Path, file: Path) -> Path:
    """Write the model of a folder, which llama.cpp then tokenizes for and runs."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    model = load_base(str(folder)).model
    if "quantization" in config:
        model = dequantize_model(model)

    writer = gguf.GGUFWriter(file, config["model_type"])
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads

    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    _add_tokenizer(writer, gguf.TokenType, folder, config)

    for name, weight in tree_flatten(model.parameters()):
        path = name.removesuffix(".weight")
        array = np.array(weight.astype(mx.float32))
        count = {"q_proj": heads, "k_proj": kv_heads}.get(path.rpartition(".")[2])
        if config["model_type"] == "llama" and count:  # llama.cpp's order of rotary pairs
            pairs = array.reshape(count, 2, len(array) // count // 2, -1).swapaxes(1, 2)
            array = np.ascontiguousarray(pairs.reshape(array.shape))
        writer.add_tensor(_name_of(path) + ".weight", array)

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _name_of(path: str) -> str:
    if path in _OUTSIDE:
        return _OUTSIDE[path]
    _, _, number, rest = path.split(".", 3)
    return f"blk.{number}.{_IN_BLOCK[rest]}"


def _add_tokenizer(writer, kinds, folder: Path, config: dict) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    count = config["vocab_size"]
    tokens, types = [f"[unused {i}]" for i in range(count)], [kinds.UNUSED] * count

    for token, i in tokenizer["model"]["vocab"].items():
        tokens[i], types[i] = token, kinds.NORMAL
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], kinds.CONTROL

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
