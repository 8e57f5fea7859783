"""Images of texts: their tokens are no targets; their numbers; the store of their features."""

import gc

import numpy as np
import pytest

from mlx_packs.bases.families import ImageFacts
from mlx_packs.config.schema import DataConfig
from mlx_packs.data.encoding import EncodingOptions, encode
from mlx_packs.data.preferences import encode_preferences
from mlx_packs.data.rows import Row
from mlx_packs.nn.images import FIRST_IMAGE
from mlx_packs.runtime import mx
from mlx_packs.vision import images
from mlx_packs.vision.images import Image, Images
from mlx_packs.vision.store import IMAGES, read_features, write_features
from mlx_packs.vision.tower import Features
from tests.helpers.errors import raises

PLACEHOLDER = "<|endoftext|>"
FEATURES = 6
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{% if part.type == 'image' %}"
    + PLACEHOLDER
    + "{% else %}"
    "{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
IMAGE = {"type": "image", "image": "a.png"}
USER = {"role": "user", "content": [IMAGE, {"type": "text", "text": " Which colour?"}]}
ANSWER = {"role": "assistant", "content": "Red."}


class FakeImages(Images):
    """Each image is two lines of three features."""

    def __init__(self, token: int) -> None:
        self.family = ImageFacts(PLACEHOLDER)
        self.token = token

    def limit(self, *_) -> None:
        pass

    def add(self, _) -> Image:
        text = f"{PLACEHOLDER * 3}\n{PLACEHOLDER * 3}"
        return Image("a", self, 0, text, FEATURES, 0, None)


@pytest.fixture
def tokenizer(shared_tiny, monkeypatch):
    tokenizer = shared_tiny.tokenizer
    images = FakeImages(tokenizer.encode(PLACEHOLDER)[-1])
    monkeypatch.setattr(tokenizer, "_images", images, raising=False)
    monkeypatch.setattr(tokenizer._tokenizer, "chat_template", TEMPLATE)
    return tokenizer


def image_mask(tokens: np.ndarray) -> np.ndarray:
    """Return what is inside of images, bool [L]: their tokens, and the line break of each."""
    own = np.flatnonzero(tokens <= FIRST_IMAGE)
    assert len(own) and len(own) % FEATURES == 0
    inside = np.zeros(len(tokens), bool)
    for places in own.reshape(-1, FEATURES):
        inside[places[0] : places[-1] + 1] = True
    return inside


@pytest.mark.parametrize("loss_on", ["all", "assistant", "completion"])
def test_images_are_no_targets(tokenizer, loss_on):
    turns = {"messages": [USER, ANSWER, USER, ANSWER]}
    row = Row("a:1", turns)
    examples = encode([row], tokenizer, DataConfig(), EncodingOptions(loss_on))
    tokens, target = examples[0].tokens, examples[0].target
    inside = image_mask(tokens)
    assert not target[inside].any() and target.any()
    assert examples.targets == target.sum()
    if loss_on == "all":
        assert (target == ~inside)[1:].all()


def test_images_of_preferences_are_no_targets(tokenizer):
    values = {"prompt": [USER], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "No."}]}
    options = EncodingOptions()
    examples = encode_preferences([Row("a:1", values)], tokenizer, DataConfig(), options)
    for example in examples.items:
        assert example.target.any()
        assert not example.target[image_mask(example.tokens)].any()


FACTS = {"base": "sha256:1", "max_pixels": 100}


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("is_full", [True, False])
def test_features_come_back_as_they_were(dtype, is_full):
    rows = mx.random.normal((3, 4)).astype(dtype)
    more = {}
    if is_full:
        levels = mx.random.normal((2, 3, 4)).astype(dtype)
        more = {"levels": levels, "shifts": np.ones((3, 4), np.float32)}

    write_features(FACTS, "key", Features("<image>", rows, **more))
    features = read_features(FACTS, "key")
    assert features.text == "<image>"
    assert features.rows.dtype == dtype and mx.array_equal(features.rows, rows).item()
    if is_full:
        assert features.levels.dtype == dtype and mx.array_equal(features.levels, levels).item()
        assert features.shifts.dtype == np.float32 and features.shifts.tolist() == [[1] * 4] * 3
    assert read_features({**FACTS, "max_pixels": 99}, "key") is None


def test_a_damaged_file_is_no_feature():
    write_features(FACTS, "key", Features("x", mx.ones((3, 4))))
    (file,) = IMAGES.path.iterdir()
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content[:-40] + bytes(40))
    assert read_features(FACTS, "key") is None


def added(table: images._Table, count: int) -> Image:
    return table.add(count, lambda start: Image("", None, 0, "", count, start, None))


def test_numbers_name_images_that_exist():
    table = images._Table()
    first = added(table, 3)
    added(table, 5)
    third = added(table, 2)
    gc.collect()
    assert table.all() == [first, third]
    for number, image in ((0, first), (2, first), (8, third), (9, third)):
        assert table.of(FIRST_IMAGE - number) is image


def test_after_the_last_number_a_process_has_to_start_again(monkeypatch):
    monkeypatch.setattr(images, "_NUMBERS", 100)
    table = images._Table()
    added(table, 90)
    with raises("conflict", None, "Start it again"):
        added(table, 20)
