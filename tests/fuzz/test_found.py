"""Inputs that fuzzing found to end in a traceback, hang or worse: each is rejected in one line now."""

import pytest

from mlx_packs.config.external import translate
from mlx_packs.config.recipe import resolve
from tests.helpers.errors import raises

PEFT = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
BNB = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.mark.parametrize(
    ("values", "key"),
    [
        (PEFT | {"lora_alpha": [8]}, "lora_alpha"),
        (PEFT | {"lora_alpha": "embedding"}, "lora_alpha"),
        (PEFT | {"r": {"a": 1}}, "r"),
        (PEFT | {"r": 10**400, "use_rslora": True}, "r"),
        (PEFT | {"rank_pattern": [1]}, "rank_pattern"),
        (PEFT | {"rank_pattern": {"q_proj": "x"}, "use_rslora": True}, "rank_pattern"),
        (PEFT | {"alpha_pattern": 5}, "alpha_pattern"),
        (PEFT | {"target_modules": 5}, "target_modules"),
        (BNB | {"llm_int8_skip_modules": 5}, "llm_int8_skip_modules"),
        (BNB | {"llm_int8_skip_modules": [[]]}, "llm_int8_skip_modules"),
    ],
)
def test_config_of_another_tool_with_a_wrong_type(values, key):
    with raises("invalid", key, "c.json: "):
        translate(values, "c.json")


@pytest.mark.parametrize(
    "values",
    [{"fine_tune_type": ["lora"]}, {"clear_cache_threshold": "9" * 400 + "GB"}],
    ids=lambda values: next(iter(values)),
)
def test_setting_of_mlx_lm_with_a_wrong_value(values):
    with raises("invalid", next(iter(values)), "c.yaml: "):
        resolve(values, "c.yaml")
