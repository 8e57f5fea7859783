"""Every registered method trains a base through the one interface, and leaves it as it was."""

import pytest
from mlx.utils import tree_flatten

from mlx_packs import load_base
from mlx_packs.adapters.attach import attach
from mlx_packs.adapters.trainable import find_method, trainable_modules
from mlx_packs.config import choices
from mlx_packs.config.schema import LoRAConfig, TrainConfig
from mlx_packs.runtime import mx
from tests.helpers.checkpoints import write_dense
from tests.helpers.models import base_of

TOKENS = mx.array([[5, 9, 3, 77, 12, 40], [1, 2, 3, 4, 5, 6]])
LORA = LoRAConfig(rank=4)


@pytest.fixture(params=choices.METHODS)
def name(request) -> str:
    return request.param


@pytest.fixture
def base(name, tmp_path):
    """A base that the method goes with."""
    if name == "loftq":
        return load_base(write_dense(tmp_path / "dense"), "affine4")
    return base_of("llama")


def attached(name: str, base):
    train = TrainConfig(method=name)
    find_method(name).check(base, "dense")
    return find_method(name).attach(base, LORA, train, "dense")


def change_values(trainable) -> dict[str, mx.array]:
    """Set all trainable parameters to other values; return them."""
    values = {n: t + 0.1 * mx.random.normal(t.shape) for n, t in trainable.tensors().items()}
    trainable.load(values, "test")
    return values


def test_disabled_computes_the_base_and_then_what_was_trained(name, base):
    before = base.model(TOKENS)
    trainable = attached(name, base)
    values = change_values(trainable)
    trained = base.model(TOKENS)
    with pytest.raises(KeyboardInterrupt), trainable.disabled():
        assert mx.allclose(base.model(TOKENS), before, atol=1e-5).item()
        raise KeyboardInterrupt
    assert not mx.allclose(trained, before, atol=1e-3).item()
    assert mx.array_equal(base.model(TOKENS), trained).item()
    assert {n: t.tolist() for n, t in trainable.tensors().items()} == {
        n: t.tolist() for n, t in values.items()
    }


def test_adapter_shapes_are_those_that_are_trained(name, base):
    trainable = attached(name, base)
    parameters = [tuple(w.shape) for _, w in tree_flatten(base.model.trainable_parameters())]
    trainable.detach()
    planned = attach(base, LORA, matmul_path="dense").specs
    shapes = find_method(name).adapter_shapes(planned)
    assert sorted(shapes) == ([] if choices.METHODS[name].trains_base else sorted(parameters))


def test_a_base_is_the_same_after_detaching(name, base):
    before = base.model(TOKENS)
    objects = {path: id(m) for path, m in base.model.named_modules()}
    trainable = attached(name, base)
    trainable.recompute("block")
    change_values(trainable)
    trainable.detach()
    trainable.detach()
    assert {path: id(m) for path, m in base.model.named_modules()} == objects
    assert mx.array_equal(base.model(TOKENS), before).item()
    assert not tree_flatten(base.model.trainable_parameters())


def test_trainable_modules_have_exactly_the_trainable_parameters(name, base):
    assert trainable_modules(base.model) == []
    trainable = attached(name, base)
    modules = trainable_modules(base.model)
    own = [w for m in modules for _, w in tree_flatten(m.trainable_parameters())]
    assert sum(w.size for w in own) == trainable.parameter_count()
