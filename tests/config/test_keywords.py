"""Arguments of public functions by other names are answered with ours."""

import inspect

import pytest

import mlx_packs as mp


@pytest.mark.parametrize(
    ("function", "argument", "hint"),
    [
        ("train_pack", "model", "It is called 'base' here."),
        ("train_pack", "model_name_or_path", "It is called 'base' here."),
        ("train_pack", "dataset", "It is called 'data' here."),
        ("train_pack", "output_dir", "It is called 'out' here."),
        ("train_pack", "r", "lora=mp.LoRAConfig(rank=...)"),
        ("train_pack", "num_train_epochs", "train=mp.TrainConfig(epochs=...)"),
        ("train_pack", "text_feature", "columns=mp.DataConfig(text_feature=...)"),
        ("train_pack", "overwrit", "Did you mean 'overwrite'?"),
        ("load_base", "model", "It is called 'name' here."),
        ("load_base", "load_in_4bit", "It is called 'quantize' here."),
        ("evaluate", "model", "It is called 'base' here."),
        ("evaluate_batch", "max_seq_length", "It is called 'sequence_length' here."),
        ("merge_pack", "base", "It is called 'model' here."),
        ("combine_packs", "base", "It is called 'model' here."),
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
    assert list(inspect.signature(mp.train_pack).parameters)[:4] == [
        "base",
        "data",
        "lora",
        "train",
    ]
