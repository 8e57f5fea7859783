"""Runs on rows with images: every task and layout, the cache of features, resuming, packs."""

from pathlib import Path

import numpy as np
import pytest

from mlx_packs import LoRAConfig, TrainConfig, evaluate, load_base, train_pack
from mlx_packs.bases.turns import IMAGE_MARK
from mlx_packs.runtime import mx
from tests.helpers.errors import raises
from tests.helpers.rows import write_rows
from tests.helpers.tasks import interrupted
from tests.vision.inputs import NAMES, chats, images, write_asked

pytestmark = pytest.mark.interop

FAMILIES = ("smolvlm", "qwen3_vl", "gemma3")
LORA = LoRAConfig(rank=2)
TRAIN = {
    "iters": 4,
    "batch_size": 2,
    "max_seq_length": 320,
    "matmul_path": "dense",
    "save_every": 2,
    "steps_per_report": 1,
    "val_batches": 0,
    "lr_schedule": "constant",
    "learning_rate": 1e-2,
}


def weights(folder: Path) -> dict[str, np.ndarray]:
    arrays = mx.load(str(folder / "adapters.safetensors"))
    return {name: np.array(array) for name, array in arrays.items()}


def trained(base, data, out: Path, **changes) -> dict[str, np.ndarray]:
    train_pack(base, data, LORA, TrainConfig(**(TRAIN | changes)), out, progress=False)
    return weights(out)


def check_close(one: dict, other: dict) -> None:
    for name in one:
        assert one[name] == pytest.approx(other[name], abs=2e-5), name


@pytest.mark.parametrize("family", FAMILIES)
def test_shared_prefixes_and_cached_activations_change_no_weight(family, folder_of, tmp_path):
    data = chats(tmp_path / "data")
    folder = folder_of(family)
    plain = trained(folder, data, tmp_path / "a", share_prefix="off", cache_frozen="off")
    if family != "gemma3":  # whose images see themselves
        check_close(trained(folder, data, tmp_path / "b", share_prefix="on"), plain)

    lora = LoRAConfig(rank=2, num_layers=1)
    last = {}
    for cached in ("off", "on"):
        train = TrainConfig(**(TRAIN | {"cache_frozen": cached, "share_prefix": "off"}))
        train_pack(folder, data, lora, train, tmp_path / cached, progress=False)
        last[cached] = weights(tmp_path / cached)
    check_close(last["on"], last["off"])


def test_preferences_share_the_images_of_their_prompt(folder_of, tmp_path):
    data = write_asked(tmp_path / "data", chosen="It is good", rejected="No")
    base = load_base(folder_of("qwen3_vl"))
    trained(base, data, tmp_path / "a", task="dpo")
    assert base.tokenizer._images.computed == len(NAMES)


def test_completions_of_prompts_with_images_are_rewarded(folder_of, tmp_path):
    data = write_asked(tmp_path / "data")

    def shorter(completions, **_):
        return [-len(text) / 20 for text in completions]

    settings = {"task": "grpo", "num_generations": 2, "max_completion_length": 6, "beta": 0.1}
    train = TrainConfig(**(TRAIN | settings))
    out = tmp_path / "a"
    train_pack(folder_of("qwen3_vl"), data, LORA, train, out, reward=shorter, progress=False)
    assert any(array.any() for name, array in weights(out).items() if name.endswith("lora_b"))


def test_a_resumed_run_computes_no_features_and_ends_the_same(folder_of, tmp_path):
    data = chats(tmp_path / "data")
    folder = folder_of("qwen3_vl")
    whole = trained(folder, data, tmp_path / "a")

    out = interrupted(tmp_path / "a", tmp_path / "b")
    base = load_base(folder)
    train_pack(base, data, LORA, TrainConfig(**TRAIN), out, resume=True, progress=False)
    images = base.tokenizer._images
    assert (images.computed, images.recalled, images._tower) == (0, len(NAMES), None)
    resumed = weights(out)
    assert all(np.array_equal(resumed[name], whole[name]) for name in whole)


@pytest.mark.page
def test_the_page_of_a_run_shows_the_text_of_its_sample_without_images(folder_of, tmp_path):
    data = write_asked(tmp_path / "data", chosen="A", rejected="B")

    train = TrainConfig(**(TRAIN | {"task": "dpo", "iters": 1, "save_every": 1}))
    train_pack(folder_of("qwen3_vl"), data, LORA, train, tmp_path / "a", progress=False)

    page = (tmp_path / "a-run" / "report.html").read_text()
    assert "What is it?" in page and "<img" not in page
    assert IMAGE_MARK not in page


def test_examples_with_images_that_see_themselves_are_evaluated_in_rows(folder_of, tmp_path):
    name = images(tmp_path / "data")[0]
    question = "What is on this picture, in one word of your own, number"
    rows = [{"image": name, "prompt": f"{question} {i}?", "completion": "A"} for i in range(4)]
    data = write_rows(tmp_path / "data", train=rows, valid=rows[:2])
    base = load_base(folder_of("gemma3"))
    scores = [evaluate(base, None, data, "train", share_prefix=s) for s in ("auto", "off")]
    assert scores[0].base == scores[1].base
    with raises("unsupported", "share_prefix"):
        evaluate(base, None, data, "train", share_prefix="on")
