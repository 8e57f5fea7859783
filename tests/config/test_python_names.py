"""Configurations made in Python: names of other trainers, types, order and repr."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest

from mlx_packs import DataConfig, LoRAConfig, PackError, TrainConfig


@pytest.mark.parametrize(
    ("config", "key", "hint"),
    [
        (LoRAConfig, "r", "It is called 'rank' here."),
        (TrainConfig, "bf16", "compute_dtype='bfloat16'"),
        (DataConfig, "dataset", "It is called 'data' here."),
        (LoRAConfig, "method", "is a setting of TrainConfig."),
        (TrainConfig, "output_dir", "'out' here, an argument of train_pack."),
        (TrainConfig, "packign", "Did you mean 'packing'?"),
    ],
)
def test_a_name_of_another_trainer_is_answered_with_ours(config, key, hint):
    with pytest.raises(PackError) as raised:
        config(**{key: 1})
    assert str(raised.value).startswith(f"{config.__name__}: {key}: ")
    assert hint in str(raised.value)
    assert (raised.value.code, raised.value.flag) == ("unknown", key)


def test_all_linear_is_the_default_targets():
    assert LoRAConfig(target_modules="all-linear") == LoRAConfig()
    assert LoRAConfig(target_modules=["all-linear"]) == LoRAConfig()
    assert LoRAConfig.from_mapping({"target_modules": "all-linear"}) == LoRAConfig()
    with pytest.raises(PackError, match="stands for all linear layers"):
        LoRAConfig(target_modules=["all-linear", "lm_head"])


@pytest.mark.parametrize(
    ("given", "targets"),
    [
        ("q_proj,v_proj", ("q_proj", "v_proj")),
        (["q_proj", "v_proj"], ("q_proj", "v_proj")),
        ({"v_proj", "q_proj"}, ("q_proj", "v_proj")),
    ],
)
def test_targets_are_names_in_any_form(given, targets):
    assert LoRAConfig(target_modules=given).target_modules == targets


@pytest.mark.parametrize(
    ("config", "key", "value", "kind"),
    [
        (LoRAConfig, "rank", "sixteen", "an integer"),
        (LoRAConfig, "rank", True, "an integer"),
        (LoRAConfig, "target_modules", 7, "a list"),
        (LoRAConfig, "rank_pattern", ["q_proj"], "a mapping"),
        (LoRAConfig, "rslora", "maybe", "true or false"),
        (TrainConfig, "learning_rate", None, "a number"),
    ],
)
def test_a_value_of_another_type_is_rejected_where_it_is_made(config, key, value, kind):
    with pytest.raises(PackError, match=f"must be {kind}") as raised:
        config(**{key: value})
    assert raised.value.flag == key


def test_numbers_get_the_type_of_their_setting():
    config = LoRAConfig(rank=np.int64(8), alpha=16, rank_pattern={"q_proj": np.int32(4)})
    assert (config.rank, config.alpha, config.rank_pattern) == (8, 16.0, {"q_proj": 4})
    assert type(config.rank) is int
    assert type(config.alpha) is float
    assert type(TrainConfig(learning_rate="1e-4").learning_rate) is float
    assert TrainConfig(iters=100.0).iters == 100


def test_repr_shows_what_differs_from_the_defaults():
    config = TrainConfig(simpo_gamma=0.3, iters=10, task="simpo")
    assert repr(config) == "TrainConfig(task='simpo', iters=10, simpo_gamma=0.3)"
    assert repr(TrainConfig()) == "TrainConfig()"
    assert repr(LoRAConfig(target_modules="q_proj")) == "LoRAConfig(target_modules=('q_proj',))"
    assert eval(repr(config)) == config


def test_configurations_are_copied_and_replaced():
    config = TrainConfig(iters=10)
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert dataclasses.replace(config, iters=20) == TrainConfig(iters=20)
