"""An argument of the wrong type is rejected in one line that names it, before anything is done."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import mlx.nn as nn
import pytest

import mlx_packs as mp
from mlx_packs.config.arguments import checked_arguments
from mlx_packs.config.data import Columns
from mlx_packs.packs.weighted_sum import Packs
from mlx_packs.training.settings import recipe_of
from tests.helpers.errors import raises

CLASSES = (mp.Base, mp.Pack, mp.LayerTrainer)
# Calls in a loop, whose arguments are arrays; what shows results; and what has no arguments.
UNCHECKED = {"step", "step_lm", "loss_lm", "flush", "tensors", "detach", "verify", "load_tensors"}
_VALID = {"packs": [], "tensors": {}, "linear": nn.Linear(2, 2)}
_VALID |= dict.fromkeys(("prompts", "texts", "documents"), ["a"])


class Wrong:
    """No argument is one."""


def functions() -> Iterator[tuple[str, Callable]]:
    for name in dir(mp):
        function = getattr(mp, name)
        if inspect.isfunction(function) and not name.startswith("_"):
            yield name, function
    for owner in CLASSES:
        for name, _ in inspect.getmembers(owner, callable):
            is_public = name in {*vars(owner), "encode"} and not name.startswith("_")
            if is_public and name not in UNCHECKED:
                yield f"{owner.__name__}.{name}", getattr(owner, name)


def cases() -> Iterator[tuple[str, str]]:
    for name, function in functions():
        for each in inspect.signature(function).parameters.values():
            if each.name != "self" and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL):
                yield name, each.name


CASES = sorted({*cases()} - {("backend", "name")})  # which names the valid ones


@pytest.mark.parametrize(("name", "argument"), CASES)
def test_every_argument_of_a_wrong_type_is_named_at_once(name, argument, here):
    function = dict(functions())[name]
    arguments = {}
    for each in inspect.signature(function).parameters.values():
        if each.name == "self":
            arguments["self"] = object.__new__(
                next(c for c in CLASSES if name.startswith(c.__name__))
            )
        elif each.default is each.empty and each.kind is not each.VAR_KEYWORD:
            arguments[each.name] = _VALID.get(each.name, "x")

    arguments[argument] = Wrong()
    owner = arguments.pop("self", None)
    with pytest.raises(mp.PackError) as raised, mp.backend("reference"):
        result = function(*filter(None, [owner]), **arguments)
        if hasattr(result, "__enter__"):
            result.__enter__()
    assert raised.value.flag == argument and raised.value.message.startswith(f"{argument}: ")
    assert "but is a Wrong." in raised.value.message and "\n" not in raised.value.message
    assert not list(Path().iterdir())


@checked_arguments
def sample(
    count: int = 1,
    rate: float = 1.0,
    names: Sequence[str] = (),
    packs: Packs | None = None,
    lora: mp.LoRAConfig | None = None,
    columns: Columns | None = None,
    function: Callable[..., float] | None = None,
) -> dict:
    return locals()


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [
        ("count", True, "an integer, but is True (bool)"),
        ("rate", None, "a number, but is a NoneType"),
        ("names", "lm_head", "a list of texts, but is 'lm_head' (str)"),
        ("packs", ["a"], "text, a path, a pack, a mapping or a list, but is ['a'] (list)"),
        ("lora", mp.TrainConfig(), "a LoRAConfig, but is a TrainConfig"),
        ("columns", ["a"], "a DataConfig or a mapping, but is ['a'] (list)"),
        ("function", "focal", "a function, but is 'focal' (str)"),
    ],
)
def test_other_values_are_named_in_a_line(argument, value, expected):
    with raises("invalid", argument) as error:
        sample(**{argument: value})
    assert error.value.message == f"{argument}: must be {expected}."


def test_a_mapping_is_a_configuration(monkeypatch):
    monkeypatch.setattr("mlx_packs.training.run.train_request", lambda request: request.recipe)
    recipe = mp.train_pack("tiny", "d", {"rank": 3}, {"iters": 2}, None, {"prompt_feature": "q"})
    parts = (mp.LoRAConfig(3), mp.TrainConfig(iters=2), mp.DataConfig(prompt_feature="q"))
    expected = recipe_of("tiny", "d", *parts, out=None)
    assert (recipe.lora, recipe.train) == (expected.lora, expected.train)
    assert recipe.data == expected.data

    with raises("unknown", "prompt", "Did you mean 'prompt_feature'?"):
        mp.train_pack("tiny", "d", columns={"prompt": "q"})
    with raises("invalid", "manifest", "a path"):
        mp.Pack(3)
    with raises("not-found", None, "no-pack"):
        mp.Pack("no-pack")
