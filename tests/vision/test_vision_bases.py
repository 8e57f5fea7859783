"""Small vision-language checkpoints: transformers, mlx-vlm and mlx-lm compute the same from each."""

import json
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from mlx_packs import load_base
from mlx_packs.bases import files
from mlx_packs.memory.read import read_headers
from mlx_packs.runtime import mx
from tests.helpers.vision_bases import FAMILIES, write_vision_base

# mlx-vlm takes transformers' processor if its own warns, as Gemma 4's does of its audio.
pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore:At least one mel filter")]

QUESTION = "What is it?"
ANSWER = "A bird."
LINE = "One line of text, longer than a window."
TILE = "<image>" * 4
TILES = (
    f"<fake_token_around_image><row_1_col_1>{TILE}<fake_token_around_image><row_1_col_2>{TILE}\n"
    f"<fake_token_around_image><row_2_col_1>{TILE}<fake_token_around_image><row_2_col_2>{TILE}\n"
    f"\n<fake_token_around_image><global-img>{TILE}<fake_token_around_image>"
)
PADS = f"<|vision_start|>{'<|image_pad|>' * 20}<|vision_end|>"
SOFT = "<image_soft_token>" * 4

# A conversation that begins with a picture of 70 x 50, as the processor expands it up to the question.
EXPANDED = {
    "smolvlm": f"<|im_start|>User:{TILES}",
    "idefics3": f"<|begin_of_text|>User:{TILES}",
    "qwen2_5_vl": (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n" + f"<|im_start|>user\n{PADS}"
    ),
    "qwen3_vl": f"<|im_start|>user\n{PADS}",
    "gemma3": (f"<bos><start_of_turn>user\n\n\n<start_of_image>{SOFT}<end_of_image>\n\n"),
    "qwen2_vl": (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n" + f"<|im_start|>user\n{PADS}"
    ),
    "llava": f"<s>USER: {'<image>' * 16}\n",
    "mistral3": "<s>[INST][IMG][IMG][IMG][IMG_BREAK][IMG][IMG][IMG][IMG_END]",
    "internvl": f"<|im_start|>user\n<img>{'<IMG_CONTEXT>' * 20}</img>\n",
    "gemma4": f"<bos><|turn>user\n<|image>{'<|image|>' * 63}<image|>",
}


# mlx-vlm computes the GELU of InternVL by tanh, transformers by the error function.
CLOSE = {"internvl": 1e-3}


@dataclass(frozen=True)
class Opened:
    """One checkpoint in both libraries, and a conversation with a picture from the processor."""

    family: str
    folder: Path
    torch_model: object
    model: object
    processor: object
    inputs: dict

    @property
    def ids(self) -> mx.array:
        return self.inputs["input_ids"]

    @property
    def others(self) -> dict:
        """What the processor adds to tokens and pixels, such as the sizes of pictures."""
        apart = ("input_ids", "pixel_values", "attention_mask", "image_token_index")
        return {name: array for name, array in self.inputs.items() if name not in apart}

    @property
    def is_image(self) -> np.ndarray:
        """Which tokens are replaced by the picture, of shape (1, length)."""
        return np.array(self.ids) == self.torch_model.config.image_token_id


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
    text = processor.tokenizer.apply_chat_template(conversation(), tokenize=False)
    begun = text.startswith(processor.tokenizer.bos_token or QUESTION)
    options = {"add_special_tokens": False} if begun else {}
    inputs = dict(processor(images=[picture()], text=[text], **options))
    return Opened(family, folder, torch_model.eval(), model, processor, inputs)


def picture(seed: int = 3):
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 255, (50, 70, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def conversation() -> list[dict]:
    question = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    answer = [{"type": "text", "text": ANSWER}]
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def torch_logits(opened: Opened, seed: int = 3) -> np.ndarray:
    """The logits of transformers, of a picture that its own image processor prepares."""
    import torch
    from transformers import AutoImageProcessor

    prepare = AutoImageProcessor.from_pretrained(opened.folder, backend="pil")
    options = {"internvl": {"crop_to_patches": True}, "mistral3": {"patch_size": 28}}
    pixels = prepare(images=[picture(seed)], return_tensors="pt", **options.get(opened.family, {}))
    for counts in ("num_crops", "num_patches", "num_soft_tokens_per_image"):
        pixels.pop(counts, None)

    # Where images are: Qwen's positions and Gemma's masks depend on it.
    kind = "token_type_ids" if opened.family == "gemma3" else "mm_token_type_ids"
    if opened.family.startswith(("qwen", "gemma")):
        pixels[kind] = torch.tensor(opened.is_image).long()
    with torch.no_grad():
        return opened.torch_model(torch.tensor(np.array(opened.ids)), **pixels).logits.numpy()


def torch_text_logits(opened: Opened, ids: mx.array) -> np.ndarray:
    import torch

    with torch.no_grad():
        return opened.torch_model(torch.tensor(np.array(ids))).logits.numpy()


def mlx_logits(opened: Opened) -> np.ndarray:
    """The logits of mlx-vlm."""
    if opened.family == "gemma3":
        return gemma3_logits(opened)

    pixels = opened.inputs["pixel_values"]
    return np.array(opened.model(opened.ids, pixels, mask=None, **opened.others).logits)


def gemma3_logits(opened: Opened) -> np.ndarray:
    """The logits of Gemma 3 from the layers of mlx-vlm, with the masks of transformers.

    In transformers the tokens of a picture see each other and what is before them; in a layer with
    a window, nothing further back than the window. mlx-vlm's model adds a mask of ones to the scores
    instead, so that every token sees all others, and its generation ignores that mask, so that a
    token sees only earlier ones.

    Besides, mlx-vlm divides the picture's features by the root of `hidden_size` at the root of
    config.json, 2048 if it is missing as in published ones, and multiplies them by that of the text.
    """
    model, text = opened.model, opened.model.language_model.model
    at_the_root = model.config.hidden_size
    model.config.hidden_size = text.config.hidden_size
    try:
        h = model.get_input_embeddings(
            opened.ids, opened.inputs["pixel_values"], mask=opened.inputs["attention_mask"]
        ).inputs_embeds
    finally:
        model.config.hidden_size = at_the_root

    h = h * text.config.hidden_size**0.5
    everywhere, in_window = seen(opened.is_image[0], text.config.sliding_window)
    for layer in text.layers:
        h = layer(h, in_window if layer.self_attn.is_sliding else everywhere)
    return np.array(model.language_model.lm_head(text.norm(h)))


def seen(is_image: np.ndarray, window: int) -> tuple[mx.array, mx.array]:
    """What a token sees if the tokens of the only picture see each other, without and with a window."""
    position = np.arange(is_image.size)
    distance = position[:, None] - position
    everywhere = (distance >= 0) | (is_image[:, None] & is_image)
    return mx.array(everywhere), mx.array(everywhere & (distance < window))


def difference(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference, relative to the largest number of the first."""
    assert one.shape == other.shape
    return float(np.abs(one - other).max() / np.abs(one).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_with_a_picture_are_equal(family, opened):
    both = opened(family)
    expected = torch_logits(both)
    assert expected.std() > 0.1
    assert difference(expected, mlx_logits(both)) < CLOSE.get(family, 1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_picture_reaches_the_last_token(family, opened):
    both = opened(family)
    assert difference(torch_logits(both)[:, -1], torch_logits(both, seed=4)[:, -1]) > 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_a_picture_is_expanded_as_published(family, opened):
    both = opened(family)
    text = both.processor.tokenizer.decode(both.ids[0].tolist())
    beginning, _, rest = text.partition(QUESTION)
    assert beginning == EXPANDED[family] and ANSWER in rest


@pytest.mark.parametrize("family", FAMILIES)
def test_the_template_has_the_text_of_parts_and_perhaps_strings(family, opened):
    """Three published templates leave out a message that is a string, without an error."""
    tokenizer = opened(family).processor.tokenizer
    parts = [{"role": "user", "content": [{"type": "text", "text": LINE}]}]
    assert LINE in tokenizer.apply_chat_template(parts, tokenize=False)

    string = [{"role": "user", "content": LINE}]
    is_left_out = LINE not in tokenizer.apply_chat_template(string, tokenize=False)
    assert is_left_out == (family in ("smolvlm", "idefics3", "llava"))


@pytest.mark.parametrize("family", FAMILIES)
def test_special_tokens_have_the_ids_of_the_files(family, opened):
    both = opened(family)
    written = json.loads((both.folder / "tokenizer.json").read_text())["added_tokens"]
    for token in written:
        assert both.processor.tokenizer.encode(token["content"], add_special_tokens=False) == [
            token["id"]
        ]


@pytest.mark.parametrize("family", FAMILIES)
def test_all_have_the_same_logits_of_text(family, opened):
    both = opened(family)
    ids = mx.array([both.processor.tokenizer.encode(LINE)])
    expected = torch_text_logits(both, ids)
    assert difference(expected, np.array(both.model.language_model(ids).logits)) < 1e-4
    assert difference(expected, np.array(text_model(both.folder)(ids))) < 1e-4


@pytest.mark.parametrize("family", [name for name in FAMILIES if not name.startswith("qwen")])
def test_both_continue_from_the_same_embeddings(family, opened):
    """mlx-lm's text model after mlx-vlm's image tower; those of Qwen lack positions in a picture.

    Gemma 3 multiplies the given array itself by the root of the hidden size, in both libraries.
    That of mlx-lm expects an array before this in Gemma 4, too, and that of mlx-vlm after it.
    """
    both = opened(family)
    features = both.model.get_input_embeddings(
        both.ids,
        both.inputs["pixel_values"],
        mask=both.inputs["attention_mask"],
        **both.others,
    )
    given = np.array(features.inputs_embeds)
    scale, layers = 1.0, {}
    if family == "gemma4":
        scale, layers = 1 / 8, {"per_layer_inputs": features.per_layer_inputs}

    expected = both.model.language_model(
        None if family == "gemma4" else both.ids, inputs_embeds=mx.array(given), **layers
    )
    embeddings = mx.array(given * scale)
    logits = text_model(both.folder)(both.ids, input_embeddings=embeddings, **layers)
    assert difference(np.array(expected.logits), np.array(logits)) < 1e-5

    was_changed = not np.array_equal(np.array(embeddings), given * scale)
    assert was_changed == (family == "gemma3")


def text_model(folder: Path):
    """The model of mlx-lm, which has no images; it does not know all families that have its text."""
    from mlx_lm.models import llama, qwen3
    from mlx_lm.utils import load_model

    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    others = {"llama": llama, "qwen3": qwen3}
    if config["model_type"] == "llava" or text["model_type"] not in others:
        return load_model(folder)[0]

    module = others[text["model_type"]]
    model = module.Model(module.ModelArgs.from_dict(text))
    model.load_weights(list(text_weights(folder).items()))
    return model


def text_weights(folder: Path) -> dict[str, mx.array]:
    """The tensors of the text model, by the names of a checkpoint without images."""
    beginnings = {
        "model.text_model.": "model.",
        "language_model.model.": "model.",
        "language_model.lm_head.": "lm_head.",
        "lm_head.": "lm_head.",
    }
    return {
        published + name.removeprefix(beginning): array
        for name, array in mx.load(str(folder / "model.safetensors")).items()
        for beginning, published in beginnings.items()
        if name.startswith(beginning)
    }


def test_mlx_vlm_hides_nothing_from_a_token_of_gemma_3(opened):
    """Its model, that is, if it is given a picture; `gemma3_logits` says how it should be."""
    both = opened("gemma3")
    other = mx.concatenate([both.ids[:, :-1], mx.zeros_like(both.ids[:, :1])], axis=1)
    first, second = (
        np.array(both.model(ids, both.inputs["pixel_values"], mask=mx.ones_like(both.ids)).logits)
        for ids in (both.ids, other)
    )
    assert difference(first[:, 0], second[:, 0]) > 1e-3


def test_what_gemma_4_sees_of_a_picture_in_the_large_models(opened, monkeypatch):
    """26B and 31B set `use_bidirectional_attention` to "vision", which the small ones leave unset.

    In transformers the tokens of a picture then see each other only in layers with a window, and no
    further back than it reaches. mlx-vlm lets them see each other in all layers and beyond the
    window. With the masks of transformers its logits are the same.
    """
    both = opened("gemma4")
    text = both.model.language_model.model
    for config in (both.torch_model.config.text_config, text.config):
        monkeypatch.setattr(config, "use_bidirectional_attention", "vision")
    expected = torch_logits(both)
    assert difference(expected, mlx_logits(both)) > 0.01

    _, in_window = seen(both.is_image[0], text.config.sliding_window)
    causal, _ = seen(both.is_image[0] & False, text.config.sliding_window)
    masks = {"sliding_attention": in_window, "full_attention": causal}
    monkeypatch.setattr(
        type(text), "_make_masks", lambda *_: [masks[layer.layer_type] for layer in text.layers]
    )
    assert difference(expected, mlx_logits(both)) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_is_small_and_depends_on_the_seed(family, opened, tmp_path):
    first, again, other = opened(family).folder, tmp_path / "again", tmp_path / "other"
    write_vision_base(family, again)
    write_vision_base(family, other, seed=1)
    contents = [(folder / "model.safetensors").read_bytes() for folder in (first, again, other)]

    assert contents[0] == contents[1] != contents[2] and len(contents[0]) < 2e6
    assert {path.name for path in again.iterdir()} == {path.name for path in other.iterdir()}
    assert len(opened(family).processor.tokenizer) < 400


def test_a_llava_whose_file_lacks_the_sizes_of_its_text_has_those_of_transformers(
    tmp_path, monkeypatch
):
    from transformers import LlamaConfig

    published = LlamaConfig().to_dict()
    assert all(published[name] == size for name, size in files._LLAVA_TEXT.items())

    whole = write_vision_base("llava", tmp_path / "whole")
    sparse = shutil.copytree(whole, tmp_path / "sparse")
    config = json.loads((whole / "config.json").read_text())
    text = config["text_config"]
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = {name: text.pop(name) for name in names}
    config["vocab_size"] = text["vocab_size"]
    (sparse / "config.json").write_text(json.dumps(config))

    monkeypatch.setattr(files, "_LLAVA_TEXT", sizes)
    tokens = mx.arange(8)[None]
    one, other = (load_base(folder).model(tokens) for folder in (whole, sparse))
    assert mx.array_equal(one, other)
    assert read_headers(sparse).config["text_config"] == text | sizes
