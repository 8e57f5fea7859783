"""Headers of dense bases of real geometries: no weights."""

import json
import math
from pathlib import Path

from mlx_packs.memory.headers import Headers

# hidden, FFN, blocks, heads, KV heads, vocab, tied; head_dim 128: weights and adapters at rank 16
REAL = {
    "llama-3-8b": ((4096, 14336, 32, 32, 8, 128256, False), 8.03e9, 41.94e6),
    "qwen3-0.6b": ((1024, 3072, 28, 16, 8, 151936, True), 0.60e9, 10.09e6),
    "qwen3-4b": ((2560, 9728, 36, 32, 8, 151936, True), 4.02e9, 33.03e6),
    "qwen3-8b": ((4096, 12288, 36, 32, 8, 151936, False), 8.19e9, 43.65e6),
    "qwen3-32b": ((5120, 25600, 64, 64, 8, 151936, False), 32.76e9, 134.22e6),
}
# a Llama of the size of all-MiniLM-L6-v2
SMALL = (384, 1536, 6, 3, 3, 30522, True)


def dense_headers(name: str, vocab_size: int | None = None) -> Headers:
    """A dense bfloat16 checkpoint of a real geometry, or ``small``."""
    sizes = REAL[name][0] if name in REAL else SMALL
    hidden, ffn, blocks, heads, kv_heads, vocab, tied = sizes
    vocab = vocab_size or vocab

    family = "qwen3" if name.startswith("qwen3") else "llama"
    config = {
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
    }

    q, k = heads * 128, kv_heads * 128
    shapes = {
        "self_attn.q_proj": [q, hidden],
        "self_attn.k_proj": [k, hidden],
        "self_attn.v_proj": [k, hidden],
        "self_attn.o_proj": [hidden, q],
        "mlp.gate_proj": [ffn, hidden],
        "mlp.up_proj": [ffn, hidden],
        "mlp.down_proj": [hidden, ffn],
        "input_layernorm": [hidden],
        "post_attention_layernorm": [hidden],
    }
    if family == "qwen3":
        shapes |= {"self_attn.q_norm": [128], "self_attn.k_norm": [128]}

    tensors = {"model.embed_tokens.weight": [vocab, hidden], "model.norm.weight": [hidden]}
    if not tied:
        tensors["lm_head.weight"] = [vocab, hidden]
    for i in range(blocks):
        tensors |= {f"model.layers.{i}.{n}.weight": s for n, s in shapes.items()}

    return Headers(name, config, {n: {"dtype": "BF16", "shape": s} for n, s in tensors.items()})


def write_headers(folder: Path, headers: Headers) -> Path:
    """A checkpoint folder that takes no space: the weights are a hole in the file, zeros."""
    at = 0
    header = {}
    for name, tensor in headers.tensors.items():
        end = at + 2 * math.prod(tensor["shape"])
        header[name] = {**tensor, "data_offsets": [at, end]}
        at = end

    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    (folder / "config.json").write_text(json.dumps(headers.config))
    return folder
