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
        ("train_pack", "overwrit", "Did you mean 'overwrite'?"),
        ("evaluate_batch", "max_seq_length", "It is called 'sequence_length' here."),
        ("combine_packs", "model", "It is called 'base' here."),
        ("export_pack", "output_dir", "It is called 'out' here."),
    ],
)
def test_an_argument_of_another_name_is_answered(function, argument, hint):
    with pytest.raises(mp.PackError) as raised:
        getattr(mp, function)(**{argument: "x"})
    assert str(raised.value).startswith(f"{function}: has no argument '{argument}'. ")
    assert hint in str(raised.value)
    assert (raised.value.code, raised.value.flag) == ("unknown", argument)


def test_signatures_are_shown_as_they_are():
    parameters = list(inspect.signature(mp.train_pack).parameters)
    assert parameters[:4] == ["base", "data", "lora", "train"]
