"""Small vision-language checkpoints: what transformers, mlx-vlm and mlx-lm make of one is the same."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mlx_packs.runtime import mx
from tests.helpers.vision_bases import FAMILIES, write_vision_base

pytestmark = pytest.mark.interop

QUESTION = "What is it?"
ANSWER = "A bird."
TILE = "<image>" * 4
PADS = "<|image_pad|>" * 20

# The user's turn with one picture of 70 x 50 as the processor expands it, up to the question.
EXPANDED = {
    "smolvlm": (
        "<|im_start|>User:"
        f"<fake_token_around_image><row_1_col_1>{TILE}<fake_token_around_image><row_1_col_2>{TILE}\n"
        f"<fake_token_around_image><row_2_col_1>{TILE}<fake_token_around_image><row_2_col_2>{TILE}\n"
        f"\n<fake_token_around_image><global-img>{TILE}<fake_token_around_image>"
    ),
    "qwen2_5_vl": (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\n<|vision_start|>{PADS}<|vision_end|>"
    ),
    "qwen3_vl": f"<|im_start|>user\n<|vision_start|>{PADS}<|vision_end|>",
}


@dataclass(frozen=True)
class Opened:
    """One checkpoint in both libraries, and a conversation with a picture as the processor lays it out."""

    folder: Path
    torch_model: object
    model: object
    processor: object
    inputs: dict


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Opens each family once."""
    return cache(lambda family: _open(family, tmp_path_factory.mktemp(family)))


def _open(family: str, folder: Path) -> Opened:
    import torch
    from mlx_vlm.utils import load
    from transformers import AutoModelForImageTextToText

    write_vision_base(family, folder)
    torch_model, notes = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(notes.values())

    model, processor = load(str(folder))
    assert type(processor).__module__.startswith("mlx_vlm.")  # other processors need torchvision
    text = processor.apply_chat_template(conversation(), tokenize=False)
    inputs = dict(processor(images=[picture()], text=[text], add_special_tokens=False))
    return Opened(folder, torch_model.eval(), model, processor, inputs)


def picture(seed: int = 3):
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 255, (50, 70, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def conversation() -> list[dict]:
    question = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    answer = [{"type": "text", "text": ANSWER}]
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def torch_logits(opened: Opened, **changes) -> np.ndarray:
    """The logits of transformers; `changes` replace inputs."""
    import torch

    inputs = {
        name: torch.tensor(np.array(array)) for name, array in (opened.inputs | changes).items()
    }
    if "image_grid_thw" in inputs:  # the positions of transformers' Qwen come from it
        is_image = inputs["input_ids"] == opened.torch_model.config.image_token_id
        inputs["mm_token_type_ids"] = is_image.long()

    with torch.no_grad():
        return opened.torch_model(**inputs).logits.numpy()


def mlx_logits(opened: Opened) -> np.ndarray:
    """The logits of mlx-vlm."""
    names = ("input_ids", "pixel_values", "attention_mask")
    ids, pixels, _ = (opened.inputs[name] for name in names)
    others = {name: array for name, array in opened.inputs.items() if name not in names}
    return np.array(opened.model(ids, pixels, **others).logits)


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference, relative to the largest number of the first."""
    assert one.shape == other.shape
    return float(np.abs(one - other).max() / np.abs(one).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_with_a_picture_are_equal(family, opened):
    both = opened(family)
    expected = torch_logits(both)
    assert expected.std() > 0.1 and distance(expected, mlx_logits(both)) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_the_picture_reaches_the_last_token(family, opened):
    both = opened(family)
    flipped = both.inputs["pixel_values"][..., ::-1]
    changed = torch_logits(both, pixel_values=flipped)
    assert distance(torch_logits(both)[:, -1], changed[:, -1]) > 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_a_picture_is_expanded_as_published(family, opened):
    both = opened(family)
    text = both.processor.tokenizer.decode(both.inputs["input_ids"][0].tolist())
    beginning, _, rest = text.partition(QUESTION)
    assert beginning == EXPANDED[family] and ANSWER in rest


@pytest.mark.parametrize("family", FAMILIES)
def test_mlx_lm_has_the_logits_of_text(family, opened):
    both = opened(family)
    ids = mx.array([both.processor.tokenizer.encode("One line of text, longer than a window.")])
    expected = torch_logits(
        SimpleNamespace(torch_model=both.torch_model, inputs={"input_ids": ids})
    )
    assert distance(expected, np.array(text_model(both.folder)(ids))) < 1e-4
    assert distance(expected, np.array(both.model.language_model(ids).logits)) < 1e-4


def text_model(folder: Path):
    """The model of mlx-lm: it drops the weights of the images, and knows SmolVLM's text as llama."""
    from mlx_lm.models import llama
    from mlx_lm.utils import load_model

    text = json.loads((folder / "config.json").read_text()).get("text_config", {})
    if text.get("model_type") != "llama":
        return load_model(folder)[0]

    model = llama.Model(llama.ModelArgs.from_dict(text))
    weights = mx.load(str(folder / "model.safetensors")).items()
    of_text = {
        name.replace("model.text_model.", "model."): array
        for name, array in weights
        if name.startswith(("model.text_model.", "lm_head."))
    }
    model.load_weights(list(of_text.items()))
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_is_small_and_depends_on_the_seed(family, opened, tmp_path):
    first, again, other = opened(family).folder, tmp_path / "again", tmp_path / "other"
    write_vision_base(family, again)
    write_vision_base(family, other, seed=1)
    contents = [(folder / "model.safetensors").read_bytes() for folder in (first, again, other)]

    assert contents[0] == contents[1] != contents[2] and len(contents[0]) < 2e6
    assert {path.name for path in again.iterdir()} == {path.name for path in other.iterdir()}
    assert len(opened(family).processor.tokenizer) < 400
