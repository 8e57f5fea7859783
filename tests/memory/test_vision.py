"""The plan of a base with a vision tower is that of its language model."""

import pytest

from mlx_packs.config.lora import LoRAConfig
from mlx_packs.config.schema import TrainConfig
from mlx_packs.memory.decoder_sizes import TEXT_FAMILIES
from mlx_packs.memory.estimate import estimator_of
from mlx_packs.memory.read import describe

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_the_plan_is_that_of_the_language_model(family):
    plain = {**TEXT, "model_type": TEXT_FAMILIES[family]}
    whole = {"model_type": family, "text_config": TEXT, "vision_config": {"hidden_size": 4096}}

    lora = LoRAConfig()
    train = TrainConfig()
    expected = estimator_of(plain).estimate(describe("base", plain), lora, train)
    assert estimator_of(whole).estimate(describe("base", whole), lora, train) == expected
