"""Recipes of other tools: QLoRA's YAML, PEFT's LoraConfig, transformers' BitsAndBytesConfig."""

import json
import math
from pathlib import Path

import pytest

from mlx_packs.adapters.attach import attach
from mlx_packs.config.external import translate
from mlx_packs.config.fields import read_settings
from mlx_packs.config.recipe import resolve
from tests.helpers.errors import check, raises
from tests.helpers.models import base_of

EXAMPLES = Path(__file__).parents[2] / "examples"
TARGETS = "q_proj k_proj v_proj o_proj up_proj down_proj gate_proj".split()
NOT_SET = """alora_invocation_tokens arrow_config auto_mapping corda_config eva_config exclude_modules
layer_replication layers_pattern layers_to_transform megatron_config modules_to_save revision
target_parameters trainable_token_indices""".split()
OFF = "ensure_weight_tying fan_in_fan_out lora_bias use_dora use_qalora use_rslora".split()
PEFT = {  # as peft 0.21 writes it
    **dict.fromkeys(NOT_SET),
    **dict.fromkeys(OFF, False),
    "alpha_pattern": {},
    "base_model_name_or_path": "owner/base",
    "bias": "none",
    "inference_mode": True,
    "init_lora_weights": True,
    "loftq_config": {},
    "lora_alpha": 32,
    "lora_dropout": 0.1,
    "megatron_core": "megatron.core",
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "r": 8,
    "rank_pattern": {},
    "target_modules": ["q_proj", "v_proj"],
    "task_type": "CAUSAL_LM",
}
BNB = {
    "_load_in_4bit": True,
    "_load_in_8bit": False,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "llm_int8_enable_fp32_cpu_offload": False,
    "llm_int8_has_fp16_weight": False,
    "llm_int8_skip_modules": None,
    "llm_int8_threshold": 6.0,
    "load_in_4bit": True,
    "load_in_8bit": False,
    "quant_method": "bitsandbytes",
}


def recipe(values):
    return resolve(translate(values, "recipe"), "recipe")


def test_the_qlora_example_means_what_the_layout_says():
    resolved = recipe(read_settings(EXAMPLES / "llama3_8b_qlora.yaml"))
    assert resolved.lora.rank == 16 and resolved.lora.alpha == 16 and resolved.lora.dropout == 0.05
    assert list(resolved.lora.target_modules) == TARGETS
    assert (resolved.train.quantize, resolved.train.double_quant) == ("nf4", True)
    assert resolved.train.compute_dtype == "bfloat16"
    assert resolved.train.keep == ("lm_head", "embed_tokens")  # transformers leaves them dense


def test_a_peft_config_means_what_peft_does_with_it():
    resolved = recipe(PEFT)
    assert (resolved.lora.rank, resolved.lora.alpha, resolved.lora.dropout) == (8, 32, 0.1)
    assert (
        resolved.lora.target_modules == ("q_proj", "v_proj")
        and resolved.run["model"] == "owner/base"
    )
    assert recipe(PEFT | {"target_modules": "all-linear"}).lora.target_modules == ()


@pytest.mark.parametrize("rslora", [False, True])
def test_patterns_and_rslora_give_pefts_scales(rslora):
    patterns = {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"q_proj": 4}}
    lora = recipe(PEFT | patterns | {"use_rslora": rslora}).lora
    root = math.sqrt if rslora else float
    scale = {"q_proj": 4 / root(8), "v_proj": 32 / root(2)}
    for path, spec in attach(base_of("qwen3"), lora).specs.items():
        assert spec.slices[0].scale == pytest.approx(scale[path.rsplit(".", 1)[-1]]), path


def test_bitsandbytes_config_means_what_it_does_in_transformers():
    resolved = recipe(BNB).train
    settings = (resolved.quantize, resolved.double_quant, resolved.compute_dtype)
    assert settings == ("nf4", True, "bfloat16")
    resolved = recipe({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}).train
    assert (resolved.double_quant, resolved.compute_dtype) == (False, "float32")  # its defaults
    dense = recipe(BNB | {"llm_int8_skip_modules": ["lm_head", "down_proj"]}).train.keep
    assert dense == ("lm_head", "embed_tokens", "down_proj")


DORA_OF_PISSA = {"use_dora": True, "init_lora_weights": "pissa"}
UNSUPPORTED = [
    ({"bnb_4bit": {}}, "unsupported", "bnb_4bit_quant_type", "'fp4'"),  # bitsandbytes' default
    (BNB | {"bnb_4bit_compute_dtype": "int8"}, "unsupported", "bnb_4bit_compute_dtype", "'int8'"),
    ({"bnb_4bit": {"quant_type": "nf4"}, "quantize": "affine4"}, "conflict", "quantize", "bnb_4"),
    ({"lora": {"rank": 8}}, "unknown", "rank", "lora.rank"),
    ({"lora": {"bias": "all"}}, "unsupported", "bias", "'all'"),
    (PEFT | {"peft_type": "IA3"}, "unsupported", "peft_type", "LORA"),
    (PEFT | {"use_qalora": True}, "unsupported", "use_qalora", "True"),
    (PEFT | {"modules_to_save": 3}, "invalid", "modules_to_save", "3"),
    (PEFT | DORA_OF_PISSA, "unsupported", "init_lora_weights", "use_dora"),
    (PEFT | {"target_modules": r".*\.q_proj"}, "unsupported", "target_modules", r".*\.q_proj"),
    (PEFT | {"target_modules": None}, "unsupported", "target_modules", "all-linear"),
    (BNB | {"load_in_8bit": True}, "unsupported", "load_in_8bit", "affine8"),
    (BNB | {"bnb_4bit_quant_type": "fp4"}, "unsupported", "bnb_4bit_quant_type", "'fp4'"),
]


@pytest.mark.parametrize(
    ("values", "method"),
    [
        ({"use_dora": True}, "dora"),
        ({"init_lora_weights": "pissa_niter_16"}, "pissa"),
        ({"init_lora_weights": "loftq"}, "loftq"),
        ({}, "lora"),
    ],
)
def test_peft_names_the_method(values, method):
    assert recipe(PEFT | values).train.method == method


@pytest.mark.parametrize(("values", "code", "key", "shown"), UNSUPPORTED)
def test_what_would_mean_something_else_is_an_error(values, code, key, shown):
    with raises(code, key, "recipe: ", shown):
        recipe(values)


def test_train_takes_several_recipes_and_names_the_faulty_one(run, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(PEFT | {"use_qalora": True}))
    (tmp_path / "bnb.json").write_text(json.dumps(BNB))
    code, out, _ = run("train", "-c", tmp_path / "bnb.json", "-c", tmp_path / "adapter_config.json")
    assert (code, out) == (2, "")
    check(run.error, "unsupported", "use_qalora", "adapter_config.json: use_qalora")
