"""Optimizer and schedule: values are typed and tried before anything is loaded."""

import inspect
import math
import re
from dataclasses import fields

import numpy as np
import pytest

from mlx_packs.config.choices import OPTIMIZERS, OptimizerFacts
from mlx_packs.config.fields import facts_of
from mlx_packs.config.optimizer import OptimizerConfig
from mlx_packs.config.recipe import resolve
from mlx_packs.config.schema import TrainConfig
from mlx_packs.memory.planned_adapters import optimizer_bytes
from mlx_packs.optim import OPTIMIZERS as REGISTERED
from mlx_packs.optim import SCHEDULES, make_optimizer, schedule
from mlx_packs.runtime import mx
from tests.helpers.errors import raises

COSINE = {"name": "cosine_decay", "arguments": [1e-4, 100]}


PEAK = 3e-3

# The share of the peak after each of so many updates, counted from the end of the warm-up.
SHARES = {
    "cosine": lambda update, updates: (1 + np.cos(np.pi * update / updates)) / 2,
    "linear": lambda update, updates: 1 - update / updates,
    "constant": lambda update, updates: np.ones_like(update),
    "wsd": lambda update, updates: np.minimum(1, (updates - update) / round(0.2 * updates)),
}


def rates(name: str, iters: int, warmup: int = 0, accumulation: int = 1) -> np.ndarray:
    """The learning rate of every update of a run, and of the two after it."""
    config = TrainConfig(
        learning_rate=PEAK,
        lr_schedule=name,
        iters=iters,
        warmup_steps=warmup,
        grad_accumulation_steps=accumulation,
    )
    rate = schedule(config)
    updates = math.ceil(iters / accumulation)
    return np.array([rate(mx.array(update)).item() for update in range(updates + 2)])


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 10])
def test_schedule_rises_to_its_peak_follows_its_formula_and_stays(name, warmup):
    rise = PEAK * np.arange(warmup) / 10
    follow = PEAK * SHARES[name](np.arange(50 - warmup, dtype=float), 50 - warmup)
    end = {"constant": PEAK}.get(name, 0.0)
    wanted = np.concatenate([rise, follow, [end, end]])
    np.testing.assert_allclose(rates(name, 50, warmup), wanted, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_counts_updates_and_not_batches(name):
    np.testing.assert_array_equal(rates(name, 99, 5, accumulation=3), rates(name, 33, 5))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("iters", [1, 2, 3])
def test_schedule_of_few_updates_is_positive_and_never_above_its_peak(name, iters):
    for warmup in (0, 1, 3):
        values = rates(name, iters, warmup)[:iters]
        assert (values[1 if warmup else 0 :] > 0).all() and (values <= PEAK * (1 + 1e-6)).all()
        assert values[0] == 0 or not warmup


def test_optimizer_takes_the_rates_of_its_schedule():
    optimizer = make_optimizer(TrainConfig(learning_rate=PEAK, lr_schedule="cosine", iters=20))
    weights, seen = {"w": mx.ones((2, 2))}, []
    for _ in range(20):
        weights = optimizer.apply_gradients({"w": mx.ones((2, 2))}, weights)
        seen.append(optimizer.learning_rate.item())
    np.testing.assert_allclose(seen, rates("cosine", 20)[:20], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"warmup": "ten"}, "lr_schedule.warmup: "),
        ({"warmup": 2, "warmup_init": -1}, "lr_schedule.warmup_init: "),
        ({"arguments": [-1e-4, 100]}, "lr_schedule.arguments[0]: "),
        ({"arguments": [1e-4]}, "cosine_decay"),
        ({"arguments": 1e-4}, "lr_schedule.arguments: "),
        ({"name": [1]}, "step_decay"),
        ({5: 1}, "lr_schedule.5: "),
    ],
)
def test_schedule_mapping_names_what_is_wrong(changes, shown):
    code = "unknown" if {"name", 5} & changes.keys() else "invalid"
    with raises(code, "lr_schedule", shown):
        make_optimizer(TrainConfig(lr_schedule={**COSINE, **changes}))


@pytest.mark.parametrize(
    ("optimizer", "arguments", "code", "shown"),
    [
        ("adamw", {"adamw": {"weight_decay": "x"}}, "invalid", "adamw.weight_decay: "),
        ("adamw", {"adamw": {"betas": [0.9]}}, "invalid", "adamw.betas: "),
        ("adamw", {"adamw": {"bias_correction": "yes"}}, "invalid", "adamw.bias_correction: "),
        ("adamw", {"lion": 3}, "invalid", "optimizer_config.lion: "),
        ("adamw", {"adamw": {5: 1}}, "unknown", "optimizer_config.adamw.5: "),
        ("adam", {"adam": {"betas": [1, 1]}}, "invalid", "optimizer_config.adam: "),
        ("sgd", {"sgd": {"nesterov": True}}, "invalid", "optimizer_config.sgd: "),
    ],
)
def test_optimizer_arguments_name_what_is_wrong(optimizer, arguments, code, shown):
    with raises(code, "optimizer_config", shown):
        make_optimizer(TrainConfig(optimizer=optimizer, optimizer_config=arguments))


def test_optimizer_arguments_are_typed_as_their_defaults():
    arguments = {
        "adafactor": {"eps": ["1e-30", 1], "beta_1": None, "relative_step": True},
        "adam": None,
    }
    optimizer = make_optimizer(TrainConfig(optimizer="adafactor", optimizer_config=arguments))
    assert (optimizer.eps, optimizer.beta_1, optimizer.relative_step) == ([1e-30, 1.0], None, True)


def test_warmup_steps_beside_a_schedule_mapping_are_an_error():
    with raises("conflict", "warmup_steps", "lr_schedule.warmup: 3"):
        TrainConfig(lr_schedule=COSINE, warmup_steps=3)
    with raises("conflict", "warmup_steps", "my.yaml: warmup_steps: ", "lr_schedule.warmup: 3"):
        resolve({"lr_schedule": COSINE, "warmup_steps": 3}, "my.yaml")


def test_schedule_mapping_overrides_rate_and_warmup_under_it():
    under = [{"warmup_steps": 10, "learning_rate": 3e-3}, {"lr_schedule": COSINE}]
    train = resolve({}, under=under).train
    assert train.warmup_steps == 0
    assert schedule(train)(mx.array(0)).item() == pytest.approx(1e-4)


def test_adamw_in_8_bits_keeps_two_bytes_a_weight_and_follows_adamw():
    weights = {"w": mx.random.normal((96, 64)), "small": mx.random.normal((10,))}
    paths = {}

    for name in ("adamw", "adamw_8bit"):
        config = {"learning_rate": 1e-2, "lr_schedule": "constant"}
        optimizer = make_optimizer(TrainConfig(optimizer=name, **config))
        optimizer.init(weights)
        current = dict(weights)
        for i in range(20):
            wanted = mx.random.normal((96, 64), key=mx.random.key(i)) * 0.1
            gradients = {"w": current["w"] - wanted, "small": current["small"]}
            current = optimizer.apply_gradients(gradients, current)
            mx.eval(current, optimizer.state)
        paths[name] = current, optimizer.state

    (exact, _), (rounded, state) = paths["adamw"], paths["adamw_8bit"]
    distance = mx.abs(weights["w"] - exact["w"]).max()
    assert mx.abs(rounded["w"] - exact["w"]).max() < 0.15 * distance
    assert mx.array_equal(exact["small"], rounded["small"]).item()

    assert state["w"]["m"].dtype == state["w"]["v"].dtype == mx.uint8
    nbytes = sum(part.nbytes for part in state["w"].values())
    assert nbytes / weights["w"].size == pytest.approx(2 * (1 + 4 / 256), abs=0.01)
    assert state["small"]["m"].dtype == mx.float32


def gradients_of(decades: float, updates: int = 20) -> list[np.ndarray]:
    """Gradients [64, 128] of each update; in every block their magnitudes span this many decades."""
    random = np.random.default_rng(0)
    sizes = 10 ** random.uniform(-decades, 0, (64, 128))
    return [
        (sizes * random.standard_normal(sizes.shape)).astype(np.float32) for _ in range(updates)
    ]


def test_adamw_in_8_bits_makes_no_jump_where_gradients_span_decades():
    """A second moment that were rounded to 0 would make an update of a hundred learning rates."""
    rate = 1e-3
    optimizer = make_optimizer(
        TrainConfig(optimizer="adamw_8bit", learning_rate=rate, lr_schedule="constant")
    )
    weights = {"w": mx.zeros((64, 128))}
    for gradient in gradients_of(decades=6):
        before = weights["w"]
        weights = optimizer.apply_gradients({"w": mx.array(gradient)}, weights)
        assert mx.abs(weights["w"] - before).max() < 6 * rate


@pytest.mark.interop
def test_adamw_in_8_bits_stays_near_that_of_bitsandbytes():
    """Not equal: on a CPU, bitsandbytes rounds moments to one of 65,536 places before its map."""
    torch = pytest.importorskip("torch")
    bitsandbytes = pytest.importorskip("bitsandbytes")
    start = np.random.default_rng(1).standard_normal((64, 128)).astype(np.float32)
    theirs = torch.nn.Parameter(torch.tensor(start))
    reference = bitsandbytes.optim.AdamW8bit([theirs], lr=1e-3, weight_decay=0.01)
    optimizer = make_optimizer(
        TrainConfig(optimizer="adamw_8bit", learning_rate=1e-3, lr_schedule="constant")
    )
    ours = {"w": mx.array(start)}
    for gradient in gradients_of(decades=1):
        theirs.grad = torch.tensor(gradient)
        reference.step()
        ours = optimizer.apply_gradients({"w": mx.array(gradient)}, ours)

    expected = theirs.detach().numpy()
    difference = np.abs(np.array(ours["w"]) - expected).max()
    assert difference < 0.05 * np.abs(expected - start).max()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_loraplus_multiplies_the_learning_rate_of_b_alone(name):
    shape = (8, 600)  # large enough to be stored in 8 bits
    start = {"q": {x: [mx.random.normal(shape, key=mx.random.key(i))] for i, x in enumerate(AB)}}
    gradients = {"q": {x: [mx.random.normal(shape, key=mx.random.key(9))] for x in AB}}

    def after(**settings) -> dict:
        optimizer = make_optimizer(TrainConfig(optimizer=name, lr_schedule="constant", **settings))
        values = start
        for _ in range(3):
            values = optimizer.apply_gradients(gradients, values)
        return {x: values["q"][x][0] for x in AB}

    both = after(learning_rate=1e-3, loraplus_lr_ratio=4.0)
    slow, fast = after(learning_rate=1e-3), after(learning_rate=4e-3)
    assert mx.array_equal(both["lora_a"], slow["lora_a"]).item()
    assert mx.allclose(both["lora_b"], fast["lora_b"], rtol=1e-4, atol=1e-6).item()
    assert not mx.allclose(fast["lora_b"], slow["lora_b"], rtol=1e-4, atol=1e-6).item()


def test_loraplus_is_for_adapters():
    with raises("conflict", "loraplus_lr_ratio", "--method full"):
        TrainConfig(method="full", loraplus_lr_ratio=2.0)


AB = ("lora_a", "lora_b")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_facts_of_an_optimizer_are_the_defaults_of_its_class(name):
    facts, parameters = OPTIMIZERS[name], inspect.signature(REGISTERED[name]).parameters
    assert facts.corrects_bias == ("bias_correction" in parameters)
    assert list(facts.betas) == (parameters["betas"].default if "betas" in parameters else [])
    decay = parameters["weight_decay"].default if "weight_decay" in parameters else None
    assert facts.weight_decay == decay


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_help_names_an_optimizer_whose_defaults_are_not_the_usual_ones(name):
    helps = {f.name: str(facts_of(f).shown_default) for f in fields(OptimizerConfig)}
    usual = OPTIMIZERS[OptimizerConfig.optimizer].betas
    is_named = {key: name in re.findall(r"\w+", helps[key]) for key in ("weight_decay", "betas")}
    facts = OPTIMIZERS[name]
    assert is_named == {
        "weight_decay": bool(facts.weight_decay),
        "betas": facts.betas not in ((), usual),
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bytes_of_a_state_are_a_fact_of_every_optimizer(name):
    size = 1 << 20
    measured = optimizer_bytes([(1 << 10, 1 << 10)], TrainConfig(optimizer=name))
    assert measured / size == pytest.approx(OPTIMIZERS[name].bytes_per_weight, abs=0.01)
    with pytest.raises(TypeError, match="bytes_per_weight"):
        OptimizerFacts(betas=(0.9, 0.99))


@pytest.mark.parametrize("name", ["adam", "adamw", "adamw_8bit"])
def test_the_first_update_is_of_the_learning_rate_as_in_torch(name):
    def first(**changes) -> float:
        config = TrainConfig(optimizer=name, lr_schedule="constant", learning_rate=1e-3, **changes)
        weights, gradients = {"w": mx.zeros((64, 128))}, {"w": mx.full((64, 128), 0.01)}
        updated = make_optimizer(config).apply_gradients(gradients, weights)["w"]
        return -updated[0, 0].item()

    assert first() == pytest.approx(1e-3, rel=1e-3)
    assert first(bias_correction=False) == pytest.approx(3.162e-3, rel=1e-3)
