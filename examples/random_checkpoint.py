"""Write a checkpoint of a real model's geometry with random weights; nothing is downloaded.

Shapes, bytes and flops are the real ones, so memory and speed of a run can be tried before the
model is there, and a machine too small for the whole of it can try one block:

    python examples/random_checkpoint.py --geometry qwen3-4b --blocks 1 --out qwen3-4b-block
    packs train --model qwen3-4b-block --data tiny --iters 20 --out packs/trial

The tokenizer is that of the tiny base, so the rows of `--data tiny` can be used.
"""

import argparse
import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

import mlx_packs as mp

# hidden, FFN, blocks, heads, KV heads, tied head; head_dim is 128 throughout
GEOMETRIES = {
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, True),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, True),
    "qwen3-4b": (2560, 9728, 36, 32, 8, True),
    "qwen3-8b": (4096, 12288, 36, 32, 8, False),
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def write_checkpoint(
    out: Path, geometry: str, blocks: int | None, vocab: int, seed: int, dense: bool = False
) -> None:
    """An mlx-lm checkpoint folder in bfloat16: affine 4 bit, group 64, or ``dense``."""
    from mlx_lm.models import qwen3

    hidden, ffn, all_blocks, heads, kv_heads, tied = GEOMETRIES[geometry]
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": blocks or all_blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocab,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": tied,
    }
    if not dense:
        config["quantization"] = {"group_size": 64, "bits": 4, "mode": "affine"}
    mx.random.seed(seed)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    if not dense:
        nn.quantize(model, group_size=64, bits=4)
    out.mkdir(parents=True)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(out / "model.safetensors"), weights, {"format": "mlx"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tiny = mp.load_base("tiny", lazy=True).path
    for name in TOKENIZER_FILES:
        shutil.copy(tiny / name, out / name)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a checkpoint of a real model's geometry.")
    parser.add_argument("--geometry", choices=GEOMETRIES, default="qwen3-4b")
    parser.add_argument("--blocks", type=int, help="number of blocks, by default all")
    parser.add_argument(
        "--vocab",
        type=int,
        default=8192,
        help="rows of the embedding [8192]; the real ones have 151936",
    )
    parser.add_argument("--dense", action="store_true", help="bfloat16 weights instead of 4-bit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.out.exists():
        parser.error(f"--out {options.out}: is there already")
    write_checkpoint(
        options.out, options.geometry, options.blocks, options.vocab, options.seed, options.dense
    )
    size = (options.out / "model.safetensors").stat().st_size / 1e9
    print(f"{options.out}: {options.geometry}, {options.blocks or 'all'} blocks, {size:.2f} GB")


if __name__ == "__main__":
    main()
