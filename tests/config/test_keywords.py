"""Arguments of public functions by other names are answered with ours."""

import inspect

import pytest

import mlx_packs as mp


@pytest.mark.parametrize(
    ("function", "argument", "hint"),
    [
        ("train_pack", "model", "It is called 'base' here."),
        ("train_pack", "r", "lora=mp.LoRAConfig(rank=...)"),
        ("train_pack", "num_train_epochs", "train=mp.TrainConfig(epochs=...)"),
        ("train_pack", "args", "It is called 'train' here."),
        ("train_pack", "peft_config", "It is called 'lora' here."),
        ("train_pack", "train_dataset", "It is called 'data' here."),
        ("train_pack", "overwrit", "Did you mean 'overwrite'?"),
        ("evaluate_batch", "max_seq_length", "It is called 'sequence_length' here."),
        ("combine_packs", "model", "It is called 'base' here."),
        ("merge_pack", "model", "It is called 'base' here."),
        ("import_adapter", "model", "It is called 'base' here."),
        ("push", "repo_id", "It is called 'repo' here."),
        ("export_pack", "output_dir", "It is called 'out' here."),
        ("generate", "model", "It is called 'base' here."),
        ("batch_generate", "model", "It is called 'base' here."),
    ],
)
def test_an_argument_of_another_name_is_answered(function, argument, hint):
    with pytest.raises(mp.PackError) as raised:
        getattr(mp, function)(**{argument: "x"})
    assert str(raised.value).startswith(f"{function}: has no argument '{argument}'. ")
    assert hint in str(raised.value)
    assert (raised.value.code, raised.value.flag) == ("unknown", argument)


@pytest.mark.parametrize("name", ["max_new_tokens", "max_length", "max_completion_tokens"])
def test_names_of_generation_are_answered(name, shared_tiny):
    with pytest.raises(mp.PackError, match="It is called 'max_tokens' here"):
        shared_tiny.generate("Hi", **{name: 5})


@pytest.mark.parametrize(
    ("argument", "wrong"), [("train", mp.LoRAConfig), ("lora", mp.TrainConfig)]
)
def test_a_configuration_of_the_other_kind_is_rejected(argument, wrong, nothing_is_loaded):
    with pytest.raises(mp.PackError, match=f"{argument}: must be a .*, but is a {wrong.__name__}"):
        mp.train_pack("tiny", "tiny", **{argument: wrong()})


def test_a_setting_without_its_name_is_rejected():
    with pytest.raises(mp.PackError, match="takes settings by name.* but got 10 without one"):
        mp.TrainConfig(10)
    assert mp.LoRAConfig(8).rank == 8


def test_signatures_are_shown_as_they_are():
    parameters = list(inspect.signature(mp.train_pack).parameters)
    assert parameters[:4] == ["base", "data", "lora", "train"]
