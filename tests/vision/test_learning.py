"""What is learned from images alone: ten digits, whose rows have the same text."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mlx_packs import LoRAConfig, TrainConfig, evaluate, load_base, train_pack
from tests.helpers.vision_bases import write_vision_base

pytestmark = pytest.mark.nightly(seconds=150)

ROWS = {"train": (0, 1500), "valid": (1500, 1797)}
TRAIN = TrainConfig(
    iters=800,
    batch_size=32,
    max_seq_length=128,
    learning_rate=3e-3,
    lr_schedule="cosine",
    matmul_path="dense",
    val_batches=0,
    steps_per_report=100,
    save_every=1000,
)


def write_base(folder: Path) -> Path:
    """A random Qwen3-VL whose tower is wide, and whose logits are large enough to be sure."""
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    vision = {**sizes, "out_hidden_size": 128}
    write_vision_base("qwen3_vl", folder, text_config=sizes, vision_config=vision)
    weights = load_file(folder / "model.safetensors")
    table = "model.language_model.embed_tokens.weight"
    weights[table] = 20 * weights[table]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_digits(folder: Path, is_blank: bool = False) -> Path:
    """The digits of scikit-learn as pictures of 64 x 64, or black ones."""
    from PIL import Image
    from sklearn.datasets import load_digits

    folder.mkdir()
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.images))
    for split, (start, stop) in ROWS.items():
        lines = []
        for number in order[start:stop]:
            pixels = (digits.images[number] / 16 * 255).astype(np.uint8)
            picture = Image.fromarray(0 * pixels if is_blank else pixels)
            picture.resize((64, 64), Image.Resampling.BICUBIC).save(folder / f"{number}.png")
            answer = {"role": "assistant", "content": str(digits.target[number])}
            messages = [{"role": "user", "content": "?"}, answer]
            lines.append(json.dumps({"image": f"{number}.png", "messages": messages}) + "\n")
        (folder / f"{split}.jsonl").write_text("".join(lines))
    return folder


# 800 updates of 32 rows take two minutes, until about nine of ten digits are right.
def test_ten_digits_are_told_apart_by_their_pictures(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_PACKS_CACHE", str(tmp_path / "cache"))
    base = write_base(tmp_path / "base")
    data = write_digits(tmp_path / "digits")
    lora = LoRAConfig(rank=32)
    train_pack(base, data, lora, TRAIN, tmp_path / "pack", progress=False)

    blank = write_digits(tmp_path / "blank", is_blank=True)
    shares = []
    for folder in (data, blank):
        report = evaluate(load_base(base), tmp_path / "pack", folder, "valid", metric="exact")
        shares.append(report.answers.after.share)
    assert shares[0] >= 0.85 and shares[1] <= 0.2  # 0.92 and 0.11 on a Xeon
