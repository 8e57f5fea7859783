"""Names of other trainers in Python, and configurations made there: types, order and repr."""

import inspect

import numpy as np
import pytest

import mlx_packs as mp
from mlx_packs import LoRAConfig, PackError, TrainConfig


@pytest.mark.parametrize(
    ("function", "name", "hint"),
    [
        ("LoRAConfig", "r", "It is called 'rank' here."),
        ("TrainConfig", "bf16", "compute_dtype='bfloat16'"),
        ("LoRAConfig", "method", "is a setting of TrainConfig."),
        ("TrainConfig", "output_dir", "'out' here, an argument of train_pack."),
        ("train_pack", "model", "It is called 'base' here."),
        ("train_pack", "r", "lora=mp.LoRAConfig(rank=...)"),
        ("train_pack", "num_train_epochs", "train=mp.TrainConfig(epochs=...)"),
        ("train_pack", "overwrit", "Did you mean 'overwrite'?"),
        ("evaluate_batch", "max_seq_length", "It is called 'sequence_length' here."),
        ("push", "repo_id", "It is called 'repo' here."),
    ],
)
def test_a_name_of_another_trainer_is_answered_with_ours(function, name, hint):
    with pytest.raises(PackError) as raised:
        getattr(mp, function)(**{name: "x"})
    is_setting = function.endswith("Config")
    said = f"{function}: {name}: " if is_setting else f"{function}: has no argument '{name}'. "
    assert str(raised.value).startswith(said) and hint in str(raised.value)
    assert (raised.value.code, raised.value.flag) == ("unknown", name)


def test_names_of_generation_and_the_other_configuration_are_answered(shared_tiny):
    with pytest.raises(PackError, match="It is called 'max_tokens' here"):
        shared_tiny.generate("Hi", max_new_tokens=5)
    with pytest.raises(PackError, match="train: must be a .*, but is a LoRAConfig"):
        mp.train_pack("tiny", "tiny", train=LoRAConfig())


def test_a_setting_without_its_name_is_rejected_and_signatures_are_shown():
    with pytest.raises(PackError, match="takes settings by name.* but got 10 without one"):
        TrainConfig(10)
    assert LoRAConfig(8).rank == 8
    assert list(inspect.signature(mp.train_pack).parameters)[:3] == ["base", "data", "lora"]


def test_targets_are_names_in_any_form_and_all_linear_is_the_default():
    assert LoRAConfig(target_modules="all-linear") == LoRAConfig()
    assert LoRAConfig(target_modules=["all-linear"]) == LoRAConfig()
    assert LoRAConfig.from_mapping({"target_modules": "all-linear"}) == LoRAConfig()
    with pytest.raises(PackError, match="stands for all linear layers"):
        LoRAConfig(target_modules=["all-linear", "lm_head"])
    for given in ("q_proj,v_proj", ["q_proj", "v_proj"], {"v_proj", "q_proj"}):
        assert LoRAConfig(target_modules=given).target_modules == ("q_proj", "v_proj")


def test_numbers_get_the_type_of_their_setting():
    with pytest.raises(PackError, match="must be a mapping"):
        LoRAConfig(rank_pattern=["q_proj"])
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
