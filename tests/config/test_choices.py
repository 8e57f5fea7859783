"""A name of `config.choices` that has no code, or code that has no name, fails at import."""

import ast
import functools
import importlib.util
from pathlib import Path

import pytest

from mlx_packs.config import choices
from tests.helpers.imports import dotted, nodes_of

PACKAGE = Path(choices.__file__).parents[1]
LISTINGS = {
    n for n, each in vars(choices).items() if n.isupper() and isinstance(each, dict | tuple)
}
# Tasks, methods and formats of weights name their class, searches, policies and metrics are their facts, a listing is
# some of the tasks, objectives name what makes a task, and a switch has no code.
WITHOUT_REGISTRY = {
    *("TASKS", "METHODS", "SEARCHES", "DECODER_TASKS", "POLICIES", "OBJECTIVES"),
    *("METRICS", "NUMBERS", "WEIGHT_MODES", "WEIGHT_FORMATS", "AUTO_ON_OFF", "MODELS"),
}


@functools.cache
def registries() -> list[tuple[str, str]]:
    """Listing and module of every call of `registered`."""
    calls = []
    for file in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(("mlx_packs", *file.relative_to(PACKAGE).with_suffix("").parts))
        if "registered(" not in file.read_text(encoding="utf-8"):
            continue
        for node in nodes_of(file):
            if isinstance(node, ast.Call) and dotted(node.func) == "registered":
                calls.append((ast.unparse(node.args[0]).removeprefix("choices."), module))
    return sorted(set(calls))


def imported_again(module: str) -> None:
    """Run a module as its import does, beside the one that is loaded."""
    spec = importlib.util.find_spec(module)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize(("listing", "module"), registries())
def test_a_registry_has_the_names_of_its_listing_alone(monkeypatch, listing, module):
    imported_again(module)
    names = getattr(choices, listing)
    first = next(iter(names))
    if isinstance(names, dict):
        changes = {"another": {**names, "another": names[first]}}
        changes[first] = {name: facts for name, facts in names.items() if name != first}
    else:
        changes = {"another": (*names, "another"), first: names[1:]}
    for faulty, changed in changes.items():
        monkeypatch.setattr(choices, listing, changed)
        with pytest.raises(RuntimeError, match=f"registered in one place only: {faulty}"):
            imported_again(module)


def test_every_listing_has_a_registry():
    assert {listing for listing, _ in registries()} == LISTINGS - WITHOUT_REGISTRY


def test_a_name_is_of_one_architecture():
    types = [t for facts in choices.ARCHITECTURES.values() for t in facts.model_types]
    assert len(types) == len(set(types))
    assert {choices.architecture_of(t) for t in types} == {"encoder"}
    assert choices.architecture_of("qwen3") == choices.architecture_of(None) == "decoder"
    assert {facts.architecture for facts in choices.TASKS.values()} == set(choices.ARCHITECTURES)


def test_what_trains_a_head_says_what_its_packs_do_instead_of_generating():
    scoring = [facts.pack for facts in choices.TASKS.values() if "score" in facts.heads]
    assert scoring and all(pack.described and pack.instead for pack in scoring)
    assert all(pack.evaluator for pack in scoring)
    assert all(facts.described for facts in choices.TASKS.values())


def test_less_is_better_of_losses_and_errors():
    lower = ("ppl", "loss", "teacher_loss", "log_loss", "rmse", "mae", "calibration_error")
    assert all(map(choices.is_lower_better, lower))
    assert not any(map(choices.is_lower_better, ("accuracy", "answers", "reward", "spearman")))


def test_a_mode_of_weights_is_known_by_a_tensor_that_no_other_has():
    parts = [part for facts in choices.WEIGHT_MODES.values() for part in facts.parts]
    assert len(parts) == len(set(parts)) and "weight" not in parts and "bias" not in parts
    assert {mode for mode, _ in choices.WEIGHT_FORMATS.values()} <= set(choices.WEIGHT_MODES)


def test_tensors_say_how_each_weight_is_quantized():
    names = ("a.weight", "a.absmax", "b.weight", "b.scales", "b.biases", "c.weight", "c.bias")
    assert choices.weight_modes_of(names) == {"a": "nf4", "b": "affine"}
    assert choices.weight_modes_of(("x.weight", "x.weight.absmax")) == {"x": "nf4"}
