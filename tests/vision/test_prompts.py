"""Prompts with images: penalties, and where an image may be."""

import numpy as np
import pytest

from mlx_packs.bases.turns import IMAGE_MARK
from mlx_packs.config.sampling import Sampling
from mlx_packs.inference.chat import question
from mlx_packs.inference.generate import chat_prompt, responses, seeing_no_images
from mlx_packs.packs.base import load_base
from mlx_packs.runtime import mx
from tests.helpers.errors import raises
from tests.helpers.vision_bases import write_vision_base

pytestmark = pytest.mark.interop


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return load_base(write_vision_base("smolvlm", tmp_path_factory.mktemp("smolvlm")))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def picture(cache, monkeypatch):
    from PIL import Image

    monkeypatch.setenv("MLX_PACKS_CACHE", str(cache))
    pixels = np.random.default_rng(0).integers(0, 255, (56, 84, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def test_penalties_see_the_token_of_the_vocabulary(base, picture):
    """As transformers has it; MLX would read and write beside the logits."""
    prompt = chat_prompt(base, [question("What?", [picture])])
    assert min(prompt) < 0
    seen = []

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())
        return logits

    for call in seeing_no_images(base, [process]):
        call(mx.array(prompt), mx.zeros((1, base.vocab_size)))
    token = base.tokenizer._images.token
    assert seen == [[token if each < 0 else each for each in prompt]]

    sampling = Sampling(max_tokens=4, temperature=0.0, repetition_penalty=1.5)
    scores = [mx.abs(each.logprobs).max().item() for each in responses(base, prompt, sampling)]
    assert np.isfinite(scores).all()


def test_a_prompt_that_ends_with_an_image_is_rejected(base, picture):
    """The last token is read alone, where no image is looked for."""
    messages = [{**question("What?", [picture]), "content": f"What? {IMAGE_MARK}"}]
    prompt = chat_prompt(base, messages)
    end = max(i for i, token in enumerate(prompt) if token < 0) + 1
    for more in (0, 1):
        with raises("data"):
            next(responses(base, prompt[: end + more]))
    next(responses(base, prompt[: end + 2]))
