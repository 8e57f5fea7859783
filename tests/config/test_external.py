"""Recipes of QLoRA projects, and files of other tools that are no recipes."""

from pathlib import Path

import pytest

from mlx_packs.config.external import translate
from mlx_packs.config.fields import read_settings
from mlx_packs.config.recipe import resolve
from tests.helpers.errors import check, raises

EXAMPLES = Path(__file__).parents[2] / "examples"
TARGETS = "q_proj k_proj v_proj o_proj up_proj down_proj gate_proj".split()


def recipe(values):
    return resolve(translate(values, "recipe"), "recipe")


def test_the_qlora_example_means_what_the_layout_says():
    resolved = recipe(read_settings(EXAMPLES / "llama3_8b_qlora.yaml"))
    assert resolved.lora.rank == 16 and resolved.lora.alpha == 16 and resolved.lora.dropout == 0.05
    assert list(resolved.lora.target_modules) == TARGETS
    assert (resolved.train.quantize, resolved.train.double_quant) == ("nf4", True)
    assert resolved.train.compute_dtype == "bfloat16"
    assert resolved.train.keep == ("lm_head", "embed_tokens")  # transformers leaves them dense


def test_bnb_4bit_has_the_defaults_of_transformers():
    resolved = recipe({"bnb_4bit": {"quant_type": "nf4"}}).train
    assert (resolved.double_quant, resolved.compute_dtype) == (False, "float32")


@pytest.mark.parametrize(
    ("values", "code", "key", "shown"),
    [
        ({"bnb_4bit": {}}, "unsupported", "bnb_4bit", "'fp4'"),  # bitsandbytes' default
        (
            {"bnb_4bit": {"quant_type": "nf4", "compute_dtype": "int8"}},
            "unsupported",
            "bnb_4bit",
            "'int8'",
        ),
        ({"bnb_4bit": {"quant_type": "nf4"}, "quantize": "nf4"}, "conflict", "quantize", "bnb_4"),
        ({"lora": {"rank": 8}}, "unknown", "rank", "lora.rank"),
        ({"lora": {"bias": "all"}}, "unsupported", "bias", "'all'"),
        ({"peft_type": "LORA", "r": 8}, "unknown", "peft_type", "'method'"),
        ({"load_in_4bit": True}, "unknown", "load_in_4bit", "quantize='nf4'"),
    ],
)
def test_what_would_mean_something_else_is_an_error(values, code, key, shown):
    with raises(code, key, "recipe: ", shown):
        recipe(values)


def test_train_takes_several_recipes_and_names_the_faulty_one(run, tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "run.json").write_text('{"rank": 4}')
    code, out, _ = run("train", "-c", tmp_path / "run.json", "-c", tmp_path / "adapter_config.json")
    assert (code, out) == (2, "")
    check(run.error, "unknown", "peft_type", "adapter_config.json: peft_type")
