"""Language models that only mlx-vlm has: loaded, trained, generated with, and opened there again.

`tests/helpers/families.py` builds them small.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step

from mlx_packs import train_pack
from mlx_packs.bases import model_classes, unsupported
from mlx_packs.bases.families import facts_of
from mlx_packs.config.choices import package_of
from mlx_packs.convert.merge import merge_pack
from mlx_packs.packs.base import load_base
from mlx_packs.runtime import mx
from tests.bases.test_families import check_step
from tests.helpers.checkpoints import write_files
from tests.helpers.errors import raises
from tests.helpers.families import OF_MLX_VLM, build, config_of, family_base
from tests.helpers.rows import CHATS, write_rows
from tests.helpers.runs import LORA, TRAIN
from tests.inference.test_families import test_a_batch_equals_each_alone as check_batch

pytestmark = pytest.mark.interop

TOKENS = mx.array([[(5 * i + 3) % 120 for i in range(20)]])


def write_checkpoint(folder: Path, family: str, vocabulary: int = 128) -> Path:
    """Write a small model of a family, with the tokenizer of the tiny base."""
    config = config_of(family)
    for part in (config, config.get("text_config", {})):
        if "vocab_size" in part:
            part["vocab_size"] = vocabulary
    model, _ = build(family, config)
    return write_files(folder, dict(tree_flatten(model.parameters())), config)


def logits_there(folder: Path, adapter: Path | None = None) -> mx.array:
    """The logits of mlx-vlm's own model, with an adapter that its own loader reads."""
    from mlx_vlm.trainer.peft.utils import apply_lora_layers
    from mlx_vlm.utils import load_model

    model = load_model(folder, strict=False)  # no weights of what is no language model
    if adapter is not None:
        model = apply_lora_layers(model, adapter)
    model.eval()
    return model.language_model(TOKENS).logits


def is_close(one: mx.array, other: mx.array) -> bool:
    return mx.allclose(one, other, rtol=1e-4, atol=1e-4).item()


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("family", OF_MLX_VLM)
def test_a_step_has_the_gradients_of_plain_lora(family, bits):
    check_step(family, bits)


@pytest.mark.parametrize("family", OF_MLX_VLM)
def test_a_checkpoint_has_the_logits_of_mlx_vlm(family, tmp_path):
    folder = write_checkpoint(tmp_path / family, family)
    base = load_base(folder)
    assert package_of(family) == "mlx-vlm" and base.model.family == family
    assert is_close(base.model(TOKENS), logits_there(folder))


@pytest.mark.parametrize("family", [f for f in OF_MLX_VLM if not facts_of(f).cache_differs])
def test_generation_has_the_tokens_of_the_whole_text(family):
    model = family_base(family).model
    tokens = TOKENS[0].tolist()

    for token, _ in generate_step(TOKENS[0], model, max_tokens=6):
        assert int(token) == mx.argmax(model(mx.array([tokens]))[0, -1]).item()
        tokens.append(int(token))


@pytest.mark.parametrize("family", OF_MLX_VLM)
def test_a_batch_equals_each_alone(family):
    check_batch(family, "three")


@pytest.mark.parametrize("family", ["k2_horizon", "step3p7"])
def test_a_pack_opens_in_mlx_vlm_and_merges(family, here):
    folder = write_checkpoint(here / "base", family, 8192)
    write_rows(here / "d", train=CHATS, valid=CHATS[:2])

    train = replace(TRAIN, iters=20, learning_rate=1e-2)
    report = train_pack(str(folder), "d", LORA, train, "o").report
    assert report["last_loss"] < report["first_loss"]

    base = load_base(folder)
    plain = base.model(TOKENS)
    with base.applied("o"):
        adapted = base.model(TOKENS)
    assert not is_close(plain, adapted)
    assert is_close(adapted, logits_there(folder, here / "o"))

    merge_pack("o", folder, here / "merged")
    assert is_close(adapted, load_base(here / "merged").model(TOKENS))
    assert is_close(adapted, logits_there(here / "merged"))


def test_what_cannot_be_loaded_is_one_line(here, monkeypatch):
    folder = write_checkpoint(here / "base", "k2_horizon")

    def check(model_type: str, *names: str) -> None:
        config = config_of("k2_horizon") | {"model_type": model_type}
        (folder / "config.json").write_text(json.dumps(config))
        with raises("unsupported", None, *names):
            load_base(folder)

    check("no_such_type", "no_such_type not supported by mlx-lm or mlx-vlm")
    check("dinov2", "no language model")

    monkeypatch.setattr(model_classes, "find_spec", lambda name: None)
    monkeypatch.setattr(unsupported, "find_spec", lambda name: None)
    check("k2_horizon", "Model type k2_horizon not supported", "[vision]'")
