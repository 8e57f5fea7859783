"""The plan of a base with a vision tower is that of its language model."""

from dataclasses import replace

import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_packs import load_base, train_pack
from mlx_packs.bases.families import FAMILIES, Family
from mlx_packs.bases.precision import activation_bytes
from mlx_packs.config.lora import LoRAConfig
from mlx_packs.config.schema import TrainConfig
from mlx_packs.memory.plan import ERROR
from mlx_packs.memory.read import describe, estimator_of
from tests.helpers.errors import raises
from tests.helpers.memory import active_bytes
from tests.helpers.models import model_of
from tests.helpers.rows import write_rows
from tests.helpers.variants import nightly_except
from tests.helpers.vision_bases import write_vision_base

TEXT = model_of("llama")[1]

# The language models of families that take images and have a plan.
TEXTS = {name: f.plan for name, f in FAMILIES.items() if f.images and f.plan}


def test_every_family_says_which_plan_it_has():
    assert all(FAMILIES[text].plan == "dense" for text in TEXTS.values())
    with pytest.raises(TypeError, match="plan"):
        Family()


@pytest.mark.parametrize("family", TEXTS)
def test_the_plan_is_that_of_the_language_model(family):
    plain = {**TEXT, "model_type": TEXTS[family]}
    whole = {"model_type": family, "text_config": TEXT, "vision_config": {"hidden_size": 4096}}

    lora = LoRAConfig()
    train = TrainConfig()
    expected = estimator_of(plain).estimate(describe("base", plain), lora, train)
    headers = replace(describe("base", whole), image_tokens=0)
    assert estimator_of(whole).estimate(headers, lora, train) == expected


def test_features_of_the_batch_are_activations():
    def activations(tokens: int | None, levels: list[int], shape: tuple = (100, 10)) -> int:
        tower = {"deepstack_visual_indexes": levels}
        config = {"model_type": "qwen3_vl", "text_config": TEXT, "vision_config": tower}
        headers = replace(describe("base", config), image_tokens=tokens)
        train = TrainConfig(batch_size=2)
        plan = estimator_of(config).estimate(headers, LoRAConfig(), train, shape)
        return plan.parts()["activations"]

    of_token = 64 * activation_bytes(TEXT, "auto")
    none = activations(0, [])
    assert activations(30, []) - none == 2 * 30 * of_token
    assert activations(30, [5, 6]) - none == 3 * 2 * 30 * of_token
    for tokens in (1000, None):
        assert activations(tokens, []) - none == 2 * 200 * of_token


def test_a_mistral3_with_another_text_has_no_plan():
    text = {**TEXT, "model_type": "mistral4"}
    whole = {"model_type": "mistral3", "text_config": text, "vision_config": {}}
    with raises("unsupported", None, "mistral4"):
        describe("base", whole)


@pytest.mark.interop
@pytest.mark.parametrize(
    ("family", "recompute", "modules"),
    nightly_except(
        [
            ("smolvlm", "none", ()),
            ("smolvlm", "block", ()),
            ("llava", "none", ("q_proj",)),
            ("llava", "block", ()),
            ("mistral3", "none", ()),
            ("mistral3", "block", ("q_proj",)),
        ],
        ("smolvlm", "none", ()),
        often_is=(),
        seconds=10,
    ),
)
def test_the_plan_is_within_its_error_of_the_measured_peak(
    family, recompute, modules, tmp_path, monkeypatch
):
    from PIL import Image

    monkeypatch.setenv("MLX_PACKS_CACHE", str(tmp_path / "cache"))
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
    if family == "mistral3":
        sizes["head_dim"] = 64
    folder = write_vision_base(family, tmp_path / "base", text_config=sizes)

    pixels = np.random.default_rng(0).integers(0, 255, (56, 56, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    row = {"image": str(tmp_path / "a.png"), "prompt": "What is it? " * 20, "completion": "A" * 32}
    data = write_rows(tmp_path / "data", train=[row] * 4, valid=[row], test=[row])

    train = TrainConfig(
        iters=16,  # the peak of a step varies with the order of its operations
        max_seq_length=512,
        matmul_path="dense",
        recompute=recompute,
        share_prefix="off",
        val_batches=0,
    )
    base = load_base(folder)
    own = sum(array.nbytes for _, array in tree_flatten(base.model.parameters()))
    lora = LoRAConfig(rank=8, target_modules=modules)
    once = replace(train, iters=1)
    train_pack(base, data, lora, once, tmp_path / "first", progress=False)
    held = (active_bytes() - own) / 1e9

    run = train_pack(base, data, lora, train, tmp_path / "second", progress=False)
    assert run.report["plan_peak_gb"] == pytest.approx(run.report["peak_gb"] - held, rel=ERROR)
