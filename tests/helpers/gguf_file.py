"""Tiny GGUF files of every architecture that is read, written by the package gguf."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

WORDS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HIDDEN, HEADS, KV_HEADS, WIDTH, FFN, BLOCKS = 64, 2, 1, 32, 96, 2
_NORMS = {
    "gemma2": ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"),
    "gemma3": ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"),
}
_HEAD_NORMS = ("qwen3", "gemma3")


def byte_tokens() -> list[str]:
    """The 256 bytes as byte-level BPE writes them."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def add_byte_level(writer: gguf.GGUFWriter, pre: str = "gpt-2") -> int:
    """Add a byte-level tokenizer with one merge; return how many tokens it has."""
    tokens = [*WORDS, *byte_tokens(), "he", "hello"[:1] + "i"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    control = gguf.TokenType.CONTROL
    writer.add_token_types([control] * len(WORDS) + [gguf.TokenType.NORMAL] * (len(tokens) - 5))
    writer.add_token_merges(["h e", "h i"])
    return len(tokens)


def add_sentence_piece(writer: gguf.GGUFWriter) -> int:
    """Add a SentencePiece tokenizer with bytes; return how many tokens it has."""
    pieces = ["▁", "h", "e", "l", "o", "w", "r", "d", "he", "ll", "hell", "hello", "▁hello"]
    tokens = [*WORDS, *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    kinds = [gguf.TokenType.CONTROL] * 5 + [gguf.TokenType.BYTE] * 256
    kinds += [gguf.TokenType.NORMAL] * len(pieces)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 261 + [-float(i) for i in range(len(pieces))][::-1])
    writer.add_token_types(kinds)
    writer.add_add_space_prefix(False)
    return len(tokens)


def shapes_of(architecture: str, vocab: int, times: int = 1) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors by llama.cpp's names."""
    hidden, width, ffn = times * HIDDEN, times * WIDTH, times * FFN
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (vocab, hidden), "output_norm": (hidden,)}
    q, kv = HEADS * width, KV_HEADS * width
    biases: dict[str, tuple[int, ...]] = {}

    for i in range(BLOCKS):
        block = {"attn_output": (hidden, q), "ffn_down": (hidden, ffn)}
        block |= dict.fromkeys(_NORMS.get(architecture, ("attn_norm", "ffn_norm")), (hidden,))

        if architecture == "phi3":
            block |= {"attn_qkv": (q + 2 * kv, hidden), "ffn_up": (2 * ffn, hidden)}
        else:
            block |= {"attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden)}
            block |= {"ffn_gate": (ffn, hidden), "ffn_up": (ffn, hidden)}

        if architecture == "qwen2":
            biases |= {f"blk.{i}.attn_{n}.bias": (w,) for n, w in (("q", q), ("k", kv), ("v", kv))}
        if architecture in _HEAD_NORMS:
            block |= {"attn_q_norm": (width,), "attn_k_norm": (width,)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}

    return shapes | biases


# Where the float16 numbers of a block are, and which they are: weights become like 0.1.
_K_SCALES = {
    "Q2_K": (80, (0.006, 0.004)),
    "Q3_K": (108, (0.002,)),
    "Q4_K": (0, (3e-4, 2e-3)),
    "Q5_K": (0, (1.5e-4, 2e-3)),
    "Q6_K": (208, (6e-5,)),
}


def k_blocks(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Rows of random blocks of a K-quant, which the package gguf does not write."""
    _, size = gguf.constants.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rows, columns = shape
    blocks = rng.integers(0, 256, (rows * columns // 256, size), dtype=np.uint8)
    start, scales = _K_SCALES[kind]
    blocks[:, start : start + 2 * len(scales)] = np.float16(scales).view(np.uint8)
    return blocks.reshape(rows, -1)


def write_tiny(
    file: Path,
    architecture: str = "llama",
    kind: str = "Q4_1",
    kinds: Mapping[str, str] = {},
    template: str | None = TEMPLATE,
    tokenizer: str = "gpt2",
    change=lambda writer: None,
    times: int = 1,
) -> dict[str, np.ndarray]:
    """Write a model with random weights and return them by llama.cpp's names, as gguf dequantizes them.

    Args:
        file: what is written.
        architecture: of llama.cpp.
        kind: type of matrices.
        kinds: types of single tensors.
        template: the chat template.
        tokenizer: ``gpt2``, ``llama`` or nothing.
        change: called with the writer before the tensors are added.
        times: widths are multiplied by it; 8 makes rows of whole blocks of K-quants.
    """
    writer = gguf.GGUFWriter(file, architecture)
    vocab = 270
    if tokenizer:
        vocab = add_byte_level(writer) if tokenizer == "gpt2" else add_sentence_piece(writer)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        if template is not None:
            writer.add_chat_template(template)

    writer.add_context_length(256)
    writer.add_embedding_length(times * HIDDEN)
    writer.add_block_count(BLOCKS)
    writer.add_feed_forward_length(times * FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(times * WIDTH)
    writer.add_value_length(times * WIDTH)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)

    if architecture == "gemma3":
        writer.add_sliding_window_pattern(2)
    change(writer)

    rng, stored = np.random.default_rng(7), {}
    for name, shape in shapes_of(architecture, vocab, times).items():
        weight = rng.normal(0, 0.1, shape).astype(np.float32)
        type_name = kinds.get(name, kind if len(shape) == 2 else "F32")
        if len(shape) == 1:
            weight += 1
        quantized_type = gguf.GGMLQuantizationType[type_name]
        if type_name.endswith("_K"):
            data = k_blocks(rng, shape, type_name)
        else:
            data = gguf.quants.quantize(weight, quantized_type)
        raw = None if type_name in ("F32", "F16") else quantized_type
        full_name = name if name.endswith(".bias") else f"{name}.weight"
        writer.add_tensor(full_name, data, raw_dtype=raw)
        stored[name] = gguf.quants.dequantize(data, quantized_type).astype(np.float32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored
