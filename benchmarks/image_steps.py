"""Steps on rows with images: with features from the cache, the same rows as text, and mlx-vlm's.

A model of random weights has the geometry of SmolVLM-256M, whose language model is SmolLM2-135M's.
mlx-vlm computes the tower in each step, as its trainer does; the adapters are the same.

    python -m benchmarks image_steps --rows 2 --words 40
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np
from mlx.utils import tree_flatten

from mlx_packs import runtime
from mlx_packs.adapters.attach import attach
from mlx_packs.bases.files import tiny_checkpoint
from mlx_packs.config.lora import LoRAConfig
from mlx_packs.data.batches import TokenCollate
from mlx_packs.data.dataset import Batch
from mlx_packs.data.token_store import Example
from mlx_packs.objectives.causal_lm import CausalLM, split_head
from mlx_packs.packs.base import Base, load_base
from mlx_packs.runtime import mx
from mlx_packs.training.step import Stepper
from mlx_packs.vision.images import Images
from mlx_packs.vision.pictures import ImageSource

from . import history
from .history import Environment, Record, record

CACHED, TEXT, MLX_VLM = "mlx_packs images", "mlx_packs text", "mlx-vlm"
RANK = 16
ANSWER = 8  # targets of a row
# Of a loss, before the adapters have changed anything: in float32, and in bfloat16 on a GPU.
_TOLERANCE, _TOLERANCE_ON_GPU = 1e-4, 1e-2
_SPECIAL = ("<fake_token_around_image>", "<global-img>", "<image>", "<end_of_utterance>")
_FILES = ("tokenizer_config.json", "generation_config.json")
_TEXT = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000.0,
    "vocab_size": 49_280,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
_VISION = {
    "model_type": "smolvlm_vision",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "patch_size": 16,
    "image_size": 512,
}
_PROCESSOR = {
    "image_processor_type": "SmolVLMImageProcessor",
    "processor_class": "SmolVLMProcessor",
    "do_image_splitting": False,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_pad": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "max_image_size": {"longest_edge": 512},
    "size": {"longest_edge": 512},
    "resample": 1,
}


def write_base(folder: Path, blocks: int) -> None:
    """Write a checkpoint of random weights, by mlx-vlm's names, with the tokenizer of ``tiny``."""
    from mlx_vlm.models import smolvlm
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny_checkpoint() / "tokenizer.json"))
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    for name in _FILES:
        if (tiny_checkpoint() / name).is_file():
            (folder / name).write_bytes((tiny_checkpoint() / name).read_bytes())

    config = {
        "model_type": "smolvlm",
        "image_token_id": tokenizer.token_to_id("<image>"),
        "scale_factor": 4,
        "text_config": {**_TEXT, "num_hidden_layers": blocks},
        "vision_config": _VISION,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR))
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_len": 64}))

    parts = {
        "text_config": smolvlm.TextConfig.from_dict(config["text_config"]),
        "vision_config": smolvlm.VisionConfig.from_dict(config["vision_config"]),
    }
    model = smolvlm.Model(
        smolvlm.ModelConfig(
            **parts, image_token_id=config["image_token_id"], scale_factor=config["scale_factor"]
        )
    )
    model.set_dtype(mx.float32 if runtime.on_cpu() else mx.bfloat16)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})


def batches(base: Base, rows: int, words: int) -> tuple[Batch, Batch, list[Any]]:
    """Return a batch of rows with an image each, the same lengths as text, and the pictures."""
    from PIL import Image

    random = np.random.default_rng(0)
    pictures = [
        Image.fromarray(random.integers(0, 255, (512, 512, 3), dtype=np.uint8)) for _ in range(rows)
    ]
    images: Images = base.tokenizer._images
    with_images = []
    as_text = []
    for picture in pictures:
        text = base.tokenizer.encode(" word" * words, add_special_tokens=False)[:words]
        tokens = np.array(
            images.prompt(base.tokenizer, "<image>", [ImageSource(picture)]), np.int32
        )
        tokens = np.concatenate([tokens, np.array(text, np.int32)])
        target = np.arange(len(tokens)) >= len(tokens) - ANSWER
        with_images.append(Example(tokens, target, ""))
        as_text.append(Example(np.where(tokens < 0, 7, tokens).astype(np.int32), target, ""))

    images.close_tower()
    collate = TokenCollate(rows, 4096)
    order = range(rows)
    return collate(with_images, order), collate(as_text, order), pictures


def our_step(base: Base) -> Callable[[Batch], float]:
    """Return the step that `packs train` takes."""
    attach(base, LoRAConfig(rank=RANK), matmul_path="dense")
    optimizer = optimizers.Adam(learning_rate=1e-4)
    optimizer.init(base.model.trainable_parameters())
    objective = CausalLM(base.model, split_head(base.model))
    stepper = Stepper(base.model, objective.loss, optimizer, max_grad_norm=None)
    base.model.train()
    return lambda batch: stepper(batch, last=True, alone=True)[0]


def their_step(folder: Path, pictures: list[Any], batch: Batch) -> Callable[[], float]:
    """Return a step of mlx-vlm's model on the same rows, with adapters of the same size."""
    from mlx_vlm.trainer.peft.utils import get_peft_model
    from mlx_vlm.utils import load

    model, processor = load(str(folder))
    names = [name.rpartition(".")[2] for name, _ in model.language_model.named_modules()]
    targets = [name for name in dict.fromkeys(names) if name.endswith("_proj")]
    model = get_peft_model(model, targets, rank=RANK, alpha=2 * RANK, dropout=0.0, legacy=False)

    texts = ["<image>" for _ in pictures]
    arrays = dict(processor(text=texts, images=[[picture] for picture in pictures]))
    length = max(len(example.tokens) for example in batch.source)
    tokens = np.zeros((len(pictures), length), np.int32)
    token = model.config.image_token_index
    for row, example in enumerate(batch.source):
        tokens[row, : len(example.tokens)] = np.where(example.tokens < 0, token, example.tokens)
    tokens = mx.array(tokens)
    pixels = mx.array(arrays["pixel_values"])

    def loss(model: nn.Module) -> mx.array:
        logits = model(tokens[:, :-1], pixels, mask=None).logits
        losses = nn.losses.cross_entropy(logits, tokens[:, 1:])
        return losses[:, -ANSWER:].mean()

    value_and_grad = nn.value_and_grad(model, loss)
    optimizer = optimizers.Adam(learning_rate=1e-4)

    def step() -> float:
        value, gradients = value_and_grad(model)
        optimizer.update(model, gradients)
        mx.eval(model.trainable_parameters(), optimizer.state, value)
        return value.item()

    return step


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of the steps of each side, which take turns."""
    seconds: dict[str, list[float]] = {CACHED: [], TEXT: [], MLX_VLM: []}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MLX_PACKS_CACHE"] = f"{folder}/cache"
        base_folder = Path(folder) / "base"
        base_folder.mkdir()
        write_base(base_folder, options.blocks)

        base = load_base(base_folder)
        images, text, pictures = batches(base, options.rows, options.words)
        ours = our_step(base)
        theirs = their_step(base_folder, pictures, images)
        steps = {CACHED: lambda: ours(images), TEXT: lambda: ours(text), MLX_VLM: theirs}

        losses = {name: step() for name, step in steps.items()}  # which are no samples
        tolerance = _TOLERANCE if runtime.on_cpu() else _TOLERANCE_ON_GPU
        if abs(losses[MLX_VLM] / losses[CACHED] - 1) > tolerance:
            raise SystemExit(f"benchmarks: losses differ: {losses}")

        for number in range(options.rounds):
            for name in steps if number % 2 else reversed(steps):
                start = time.perf_counter()
                steps[name]()
                seconds[name].append(time.perf_counter() - start)
    return seconds


def records(here: Environment, options: argparse.Namespace, seconds: dict) -> list[Record]:
    """Return a record of each side, against the rows as text."""
    shape = f"{options.rows} rows of 67 + {options.words} tokens, rank {RANK}"
    text = float(np.median(seconds[TEXT]))
    fields = {
        "dtype": "float32" if runtime.on_cpu() else "bfloat16",
        "baseline": TEXT,
        "note": f"{options.blocks} blocks, random weights.",
    }

    return [
        record(
            here,
            "image steps smolvlm-256m",
            name,
            shape,
            "step",
            "s",
            samples,
            ratio=float(np.median(samples)) / text,
            **fields,
        )
        for name, samples in seconds.items()
    ]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(
        "python -m benchmarks image_steps", description=__doc__.split("\n")[0]
    )
    p.add_argument("--rows", type=int, default=2, metavar="N", help="of a batch [2]")
    p.add_argument("--words", type=int, default=40, metavar="N", help="text tokens of a row [40]")
    p.add_argument("--blocks", type=int, default=30, metavar="N", help="of the language model [30]")
    p.add_argument("--rounds", type=int, default=6, metavar="N", help="that are timed [6]")
    history.add_option(p)
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the steps, print and record them."""
    options = parser().parse_args(arguments)
    here = Environment.here()
    seconds = measure(options)
    new_records = records(here, options, seconds)
    for each in new_records:
        print(f"{each.implementation:18} {each.p50:8.3f} s   {each.ratio:.2f}x of text")
    history.append(new_records, options.history)
    return 0


if __name__ == "__main__":
    sys.exit(main())
