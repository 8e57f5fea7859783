"""LayerTrainer: adapters on registered linears against the same graph in plain MLX."""

import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from mlx_packs import LayerTrainer, LoRAConfig, TrainConfig
from mlx_packs.layers.registered import RegisteredLayer
from mlx_packs.nn.frozen_weight import frozen_weight
from mlx_packs.nn.nf4 import NF4Linear
from mlx_packs.runtime import mx
from tests.helpers.errors import raises
from tests.helpers.steps import largest_difference

KINDS = {
    "quantized": lambda linear: nn.QuantizedLinear.from_linear(linear, 64, 4),
    "nf4": NF4Linear.from_linear,
    "nf4 single": lambda linear: NF4Linear.from_linear(linear, double_quant=False),
    "dense": lambda linear: linear,
}
SIZES = {"up": (64, 128), "down": (128, 64), "head": (64, 32)}
VOCAB = 32


def settings(**changes) -> TrainConfig:
    defaults = {"iters": 20, "learning_rate": 1e-3, "lr_schedule": "constant", "seed": 3}
    return TrainConfig(**{**defaults, **changes})


def three(kind: str = "dense") -> dict[str, nn.Module]:
    """Three linears of a kind."""
    mx.random.seed(11)
    return {name: KINDS[kind](nn.Linear(*sizes)) for name, sizes in SIZES.items()}


def trainer_of(linears: dict, lora: LoRAConfig | None = None, train=None, optimizer=None):
    trainer = LayerTrainer(lora or LoRAConfig(rank=4), train or settings(), optimizer)
    for name, linear in linears.items():
        trainer.register(name, linear)
    return trainer


def batch(rows: int = 8, seed: int = 5) -> tuple[mx.array, mx.array]:
    mx.random.seed(seed)
    return mx.random.normal((rows, 5, 64)), mx.random.randint(0, VOCAB, (rows, 5))


def residual(layers):
    """A graph that no sequence is: gate, norm, a residual stream."""

    def forward(x):
        inner = nn.silu(layers["up"](mx.fast.layer_norm(x, None, None, 1e-5)))
        return layers["head"](x + layers["down"](inner))

    return forward


def plain_run(linears: dict, start: dict, graph, batches, optimizer):
    """Losses and adapters of a graph in MLX's autograd, with MLX's optimizer."""
    adapters = tree_unflatten(list(start.items()))

    def loss(adapters, x, y):
        def called(name):
            a, b = (adapters[name][each] for each in ("lora_a", "lora_b"))
            return lambda h: linears[name](h) + 2.0 * ((h @ a) @ b)

        logits = graph({name: called(name) for name in linears})(x)
        return nn.losses.cross_entropy(logits.astype(mx.float32), y, reduction="mean")

    losses = []
    for x, y in batches:
        value, grads = mx.value_and_grad(loss)(adapters, x, y)
        grads, _ = optimizers.clip_grad_norm(grads, 1.0)
        adapters = optimizer.apply_gradients(grads, adapters)
        mx.eval(adapters)
        losses.append(value.item())
    return losses, dict(tree_flatten(adapters))


def equal(one: dict, other: dict) -> bool:
    return set(one) == set(other) and all(mx.array_equal(one[n], other[n]).item() for n in one)


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [("quantized", "adamw"), ("nf4", "adamw"), ("dense", "adamw"), ("dense", "sgd")],
)
def test_steps_equal_plain_mlx_autograd(kind, optimizer):
    corrected = optimizers.AdamW(1e-3, bias_correction=True)
    plain = {"adamw": corrected, "sgd": optimizers.SGD(1e-3)}[optimizer]
    linears = three(kind)
    trainer = trainer_of(linears, train=settings(optimizer=optimizer))
    layers = {name: trainer.layer(name) for name in linears}
    start, forward = trainer.tensors(), residual(layers)
    batches = [batch(seed=s) for s in range(6)]
    losses = [trainer.step_lm(forward, *b) for b in batches]
    expected, adapters = plain_run(linears, start, residual, batches, plain)
    np.testing.assert_allclose(losses, expected, atol=1e-6)
    assert largest_difference(trainer.tensors(), adapters) < 1e-6
    assert largest_difference(trainer.tensors(), start) > 1e-4


def test_accumulated_batches_equal_one_large_weighted_batch():
    x, y = batch(8)
    weights = mx.array(np.random.default_rng(0).integers(0, 3, y.shape).astype(np.float32))
    whole = trainer_of(three(), train=settings(optimizer="sgd"))
    parts = trainer_of(three(), train=settings(optimizer="sgd", grad_accumulation_steps=4))
    for _ in range(3):
        whole.step_lm(list(SIZES), x, y, weights=weights)
        for i in range(0, 8, 2):
            before = parts.tensors()
            parts.step_lm(list(SIZES), x[i : i + 2], y[i : i + 2], weights=weights[i : i + 2])
            assert equal(before, parts.tensors()) == (i < 6)
    assert largest_difference(whole.tensors(), parts.tensors()) < 1e-6
    assert parts.updates == whole.updates == dict.fromkeys(SIZES, 3)


def test_flush_makes_the_update_of_a_part_of_an_accumulation():
    one = trainer_of(three(), train=settings(optimizer="sgd", grad_accumulation_steps=3))
    other = trainer_of(three(), train=settings(optimizer="sgd"))
    assert not one.flush()
    for trainer in (one, other):
        trainer.step_lm(list(SIZES), *batch())
    assert one.flush() and not one.flush()
    assert largest_difference(one.tensors(), other.tensors()) < 1e-7


def test_layer_without_part_in_a_step_is_reported():
    trainer = trainer_of(three(), train=settings(optimizer_config={"adamw": {"weight_decay": 0.5}}))
    trainer.step_lm(list(SIZES), *batch())  # its moments are not zero any more
    before = trainer.tensors()
    used = trainer.layer("head")
    with pytest.warns(UserWarning, match="up, down: "):
        trainer.step_lm(lambda x: used(x), *batch())
    after = trainer.tensors()
    for name in before:
        assert mx.array_equal(before[name], after[name]).item() == (not name.startswith("head"))
    assert trainer.updates == {"up": 1, "down": 1, "head": 2}
    trainer.step_lm(["head"], *batch())  # a sequence names its layers: no warning
    assert trainer.updates["head"] == 3


def test_masked_targets_of_all_three_kinds_count_alike():
    x, y = batch()
    targets = np.array(y)
    targets[:, ::2] = -100
    mask = np.ones(y.shape, bool)
    mask[:, ::2] = False
    trainer = trainer_of(three())
    losses = [
        trainer.loss_lm(list(SIZES), x, targets),
        trainer.loss_lm(list(SIZES), x, y, mask=mask),
        trainer.loss_lm(list(SIZES), x, y, weights=mask.astype(np.float32)),
    ]
    assert losses[0] == losses[1] == losses[2]
    assert losses[0] == pytest.approx(trainer.loss_lm(list(SIZES), x[:, 1::2], y[:, 1::2]))


def test_loss_lm_learns_nothing_and_drops_nothing():
    trainer = trainer_of(three(), LoRAConfig(rank=4, dropout=0.5))
    trainer.step_lm(list(SIZES), *batch())
    before = trainer.tensors()
    losses = [trainer.loss_lm(list(SIZES), *batch()) for _ in range(2)]
    assert losses[0] == losses[1] and equal(before, trainer.tensors())


def test_a_loss_of_ones_own_steps_as_that_of_a_language_model():
    one, other = trainer_of(three()), trainer_of(three())
    forward = residual({name: one.layer(name) for name in SIZES})

    def loss(x, y):
        return nn.losses.cross_entropy(forward(x), y, reduction="mean")

    expected = other.step_lm(residual({name: other.layer(name) for name in SIZES}), *batch())
    assert one.step(loss, *batch()) == pytest.approx(expected, abs=1e-6)
    assert largest_difference(one.tensors(), other.tensors()) < 1e-6


def test_an_optimizer_of_mlx_is_the_one_that_is_used():
    lion, linears = optimizers.Lion(1e-3), three()
    trainer = trainer_of(linears, train=TrainConfig(seed=3), optimizer=lion)
    start = trainer.tensors()
    batches = [batch(seed=s) for s in range(3)]
    for b in batches:
        trainer.step_lm(list(SIZES), *b)

    def graph(layers):
        return lambda x: layers["head"](layers["down"](layers["up"](x)))

    _, adapters = plain_run(linears, start, graph, batches, optimizers.Lion(1e-3))
    assert largest_difference(trainer.tensors(), adapters) < 1e-6


@pytest.mark.parametrize(
    ("optimizer", "accumulated"), [("adamw", 1), ("adamw_8bit", 1), ("adamw", 3)]
)
def test_a_resumed_run_equals_the_unbroken_one_bit_for_bit(tmp_path, optimizer, accumulated):
    lora = LoRAConfig(rank=4, dropout=0.3)
    train = settings(optimizer=optimizer, lr_schedule="cosine", grad_accumulation_steps=accumulated)
    batches = [batch(seed=s) for s in range(6)]

    def learn(trainer, batches):
        return [trainer.step_lm(list(SIZES), *each) for each in batches]

    uninterrupted, broken, resumed = (trainer_of(three("quantized"), lora, train) for _ in range(3))
    mx.random.seed(9)
    losses = learn(uninterrupted, batches)
    mx.random.seed(9)
    before = learn(broken, batches[:3])
    broken.save(tmp_path / "run")
    mx.random.seed(77)
    resumed.resume(tmp_path / "run")
    assert before + learn(resumed, batches[3:]) == losses
    assert equal(resumed.tensors(), uninterrupted.tensors())


def test_resume_refuses_another_setting_and_what_is_no_run(tmp_path):
    trainer = trainer_of(three())
    trainer.step_lm(list(SIZES), *batch())
    trainer.save(tmp_path / "run")
    with raises("mismatch", "learning_rate", "0.001", "0.002"):
        trainer_of(three(), train=settings(learning_rate=2e-3)).resume(tmp_path / "run")
    in_another_order = dict(reversed(three().items()))
    for other in (trainer_of(three(), LoRAConfig(rank=2)), trainer_of(in_another_order)):
        with raises("mismatch", "layers"):
            other.resume(tmp_path / "run")
    with raises("not-found", None, str(tmp_path)):
        trainer.resume(tmp_path)


def test_adapters_are_saved_under_mlx_lms_names_and_load_again(tmp_path):
    trainer, again = trainer_of(three("nf4")), trainer_of(three("nf4"))
    trainer.step_lm(list(SIZES), *batch())

    file = tmp_path / "deep" / "own.safetensors"
    trainer.save_adapters(file)
    names = [f"{name}.{each}" for name in SIZES for each in ("lora_a", "lora_b")]
    assert sorted(mx.load(str(file))) == sorted(names)
    assert [f.name for f in file.parent.iterdir()] == [file.name]

    again.load_adapters(file)
    assert again.loss_lm(list(SIZES), *batch()) == trainer.loss_lm(list(SIZES), *batch())

    with raises("mismatch", None, "own.safetensors", "up", "alpha 8"):
        trainer_of(three(), LoRAConfig(rank=4, alpha=1)).load_adapters(file)
    with raises("mismatch", None, "own.safetensors", "up.lora_a", "(64, 4)", "(64, 2)"):
        trainer_of(three(), LoRAConfig(rank=2, alpha=8)).load_adapters(file)
    with raises("not-found", None, "nothing"):
        again.load_adapters(tmp_path / "nothing")


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weight_computes_what_the_layer_computes(kind):
    linears = three(kind)
    trainer = trainer_of(linears)
    trainer.step_lm(list(SIZES), *batch())
    x = mx.random.normal((3, 64))
    merged = x @ trainer.merged_weight("up").T + linears["up"].bias
    assert mx.allclose(merged, trainer.layer("up")(x), atol=1e-5).item()
    frozen = linears["up"].weight if kind == "dense" else frozen_weight(linears["up"]).dense()
    assert mx.abs(trainer.merged_weight("up") - frozen).max().item() > 1e-5


@pytest.mark.parametrize("alphas", ["{", "[]", '{"up": "x"}', "[" * 99_999, '{"up": NaN}'])
def test_adapters_with_damaged_alphas_are_one_line(tmp_path, alphas):
    file = tmp_path / "own.safetensors"
    mx.save_safetensors(str(file), {"up.lora_a": mx.zeros((2, 2))}, {"alpha": alphas})
    with raises("unreadable", None, "own.safetensors", "metadata"):
        trainer_of(three(), LoRAConfig(rank=2, alpha=8)).load_adapters(file)


def test_rank_and_alpha_of_a_layer_override_the_common_ones():
    trainer = LayerTrainer(LoRAConfig(rank=8, alpha=4))
    trainer.register("a", nn.Linear(64, 32), rank=2)
    trainer.register("b", nn.Linear(64, 32), alpha=1.0)
    a, b = trainer.tensors()["a.lora_a"], trainer.tensors()["b.lora_b"]
    assert (a.shape, b.shape) == ((64, 2), (8, 32))
    scales = [trainer.layer(n).spec.slices[0].scale for n in "ab"]
    assert scales == [4 / 2, 1 / 8]
    assert trainer.parameter_count == 64 * 2 + 2 * 32 + 64 * 8 + 8 * 32


def test_a_loss_that_is_not_finite_changes_nothing():
    trainer = trainer_of(three(), LoRAConfig(rank=4, dropout=0.2))
    x, y = batch()
    trainer.step_lm(list(SIZES), x, y)
    before, key = trainer.tensors(), mx.array(mx.random.state[0])
    moments = str(trainer.optimizer.state)
    with raises("diverged", None, "step 2", "nan"):
        trainer.step_lm(list(SIZES), x * mx.array(float("nan")), y)
    assert equal(before, trainer.tensors()) and str(trainer.optimizer.state) == moments
    assert mx.array_equal(key, mx.random.state[0]).item()
    trainer.step_lm(list(SIZES), x, y)
    assert trainer.updates["up"] == 2


def test_a_nan_in_an_accumulation_drops_what_waited():
    trainer = trainer_of(three(), train=settings(grad_accumulation_steps=2))
    x, y = batch()
    before = trainer.tensors()
    trainer.step_lm(list(SIZES), x, y)
    with raises("diverged", None, "nan"):
        trainer.step_lm(list(SIZES), x * mx.array(float("nan")), y)
    trainer.step_lm(list(SIZES), x, y)
    assert equal(before, trainer.tensors())
    trainer.step_lm(list(SIZES), x, y)
    assert not equal(before, trainer.tensors())


LINEARS = three()


def step(layers):
    return lambda trainer: trainer.step_lm(layers, *batch())


def register(name, linear, **more):
    return lambda trainer: trainer.register(name, linear, **more)


def make(**settings):
    return lambda _: LayerTrainer(**settings)


def fresh_layer() -> RegisteredLayer:
    return LayerTrainer().register("x", nn.Linear(64, 32), rank=2)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (step(["up", "dwn"]), ("unknown", "layers", "'dwn'", "'down'")),
        (step([nn.Linear(64, 32)]), ("unknown", "layers", "layers[0]", "Linear")),
        (step([fresh_layer()]), ("unknown", "layers", "layers[0]", "'x'")),
        (step(["up", "head"]), ("invalid", None, "head", "64", "[8, 5, 128]")),
        (step(["down", "head"]), ("invalid", None, "down", "128", "[8, 5, 64]")),
        (step([]), ("invalid", "layers", "[]")),
        (step("up"), ("invalid", "layers", "'up'")),
        (step(lambda x: x[..., :VOCAB]), ("not-found", "layers")),  # calls none
        (register("up", nn.Linear(64, 64)), ("conflict", "name", "up")),
        (register("", nn.Linear(64, 64)), ("invalid", "name", "''")),
        (register("a/b", nn.Linear(64, 64)), ("invalid", "name", "'a/b'")),
        (register(3, nn.Linear(64, 64)), ("invalid", "name", "3")),
        (register("x", nn.LayerNorm(64)), ("invalid", "linear", "LayerNorm")),
        (register("x", fresh_layer()), ("conflict", "linear", "x")),
        (register("again", LINEARS["up"]), ("conflict", "linear", "again", "'up'")),
        (register("x", nn.Linear(64, 8), rank=9), ("invalid", None, "8")),
        (register("x", nn.Linear(64, 8), rank=0), ("invalid", None, "rank", "0")),
        (register("x", nn.Linear(64, 8), alpha=-1.0), ("invalid", None, "alpha", "-1.0")),
        # would have no effect
        (make(lora=LoRAConfig(target_modules=("q_proj",))), ("conflict", "target_modules")),
        (make(train=TrainConfig(batch_size=8)), ("conflict", "batch_size", "8")),
        (
            make(train=TrainConfig(learning_rate=1e-3), optimizer=optimizers.SGD(1e-3)),
            ("conflict", "learning_rate", "0.001"),
        ),
        (make(optimizer="adamw"), ("invalid", "optimizer", "str")),
    ],
)
def test_what_does_not_fit_is_rejected_by_name(call, error):
    trainer = trainer_of(LINEARS)
    with raises(*error):
        call(trainer)
    assert trainer.names == list(SIZES)


@pytest.mark.parametrize(
    ("targets", "more", "error"),
    [
        (np.full((8, 5), VOCAB), {}, ("invalid", "targets", f"token {VOCAB} ")),
        (np.full((8, 5), -3), {}, ("invalid", "targets", "token -3 ")),
        (np.full((8, 5), -100), {}, ("data", "targets")),
        (np.zeros((8, 4), int), {}, ("invalid", "targets", "[8, 4]", "[8, 4, 'V']", "[8, 5, 32]")),
        (np.zeros((8, 5)), {}, ("invalid", "targets", "float64")),
        (np.zeros((8, 5), int), {"mask": np.ones((8,))}, ("invalid", "mask", "[8]", "[8, 5]")),
        (np.zeros((8, 5), int), {"weights": -np.ones((8, 5))}, ("invalid", "weights")),
    ],
)
def test_targets_that_do_not_fit_are_rejected(targets, more, error):
    trainer = trainer_of(three())
    for call in (trainer.step_lm, trainer.loss_lm):
        with raises(*error):
            call(list(SIZES), batch()[0], targets, **more)


def test_waiting_gradients_are_neither_mixed_nor_lost(tmp_path):
    trainer = trainer_of(three(), train=settings(grad_accumulation_steps=2))
    trainer.step_lm(list(SIZES), *batch())
    with raises("conflict"):
        trainer.step_lm(["head"], *batch())
    with raises("conflict", None, "saving"):
        trainer.save(tmp_path / "run")
    with raises("conflict", None, "registering more"):
        trainer.register("more", nn.Linear(64, 64))
    assert trainer.flush()
    trainer.step_lm(["head"], *batch())


def test_a_function_whose_layers_change_is_refused():
    trainer = trainer_of(three())
    calls = []

    def forward(x):
        calls.append(1)
        return trainer.layer("head")(
            x if len(calls) < 4 else trainer.layer("down")(trainer.layer("up")(x))
        )

    with pytest.warns(UserWarning):
        trainer.step_lm(forward, *batch())
    with raises("conflict", "layers", "down, up"):
        for _ in range(4):
            trainer.step_lm(forward, *batch())


def test_a_loss_of_ones_own_must_be_one_number():
    trainer = trainer_of(three())
    up = trainer.layer("up")
    with raises("invalid", "loss", "[8, 5]"):
        trainer.step(lambda x: up(x).mean(-1), batch()[0])
    with raises("invalid", "loss", "float"):
        trainer.step(3.0, batch()[0])
    with raises("invalid", "arrays"):
        trainer.step(lambda: mx.array(0.0))


@pytest.mark.slow
def test_steps_are_the_same_compiled():
    """On a CPU MLX compiles with g++; so they are not compiled there unless compilation is enabled."""
    plain, compiled = (trainer_of(three("quantized")) for _ in range(2))
    losses = [plain.step_lm(list(SIZES), *batch(seed=s)) for s in range(4)]
    mx.enable_compile()
    try:
        compiled_losses = [compiled.step_lm(list(SIZES), *batch(seed=s)) for s in range(4)]
    finally:
        mx.disable_compile()
    np.testing.assert_allclose(compiled_losses, losses, atol=1e-6)
    assert largest_difference(plain.tensors(), compiled.tensors()) < 1e-6
    assert [g.stepper.traces for g in compiled._graphs.values()] == [1]
