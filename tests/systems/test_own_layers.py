"""ADR 007: a trainer over many quantized layers, one case for each row of docs/systems.md."""

import mlx.nn as nn
import mlx.optimizers as optimizers
import pytest

from mlx_packs import LayerTrainer, LoRAConfig, TrainConfig
from mlx_packs.nn.nf4 import NF4Linear
from mlx_packs.runtime import mx
from tests.helpers.errors import raises

pytestmark = pytest.mark.systems
SETTINGS = TrainConfig(iters=30, learning_rate=1e-3, lr_schedule="constant")
SLOWLY = TrainConfig(iters=30, learning_rate=2e-4, lr_schedule="constant")
QUANTIZERS = {
    "affine": lambda linear: nn.QuantizedLinear.from_linear(linear, 64, 4),
    "nf4": lambda linear: NF4Linear.from_linear(linear, double_quant=True),
    "nf4 single": lambda linear: NF4Linear.from_linear(linear, double_quant=False),
}


def stack(count: int, kind: str = "affine", settings: TrainConfig = SETTINGS):
    """A trainer with so many quantized layers of 64 x 64, and the layers."""
    mx.random.seed(2)
    trainer = LayerTrainer(LoRAConfig(rank=4), settings)
    linears = {f"layers.{i}.proj": QUANTIZERS[kind](nn.Linear(64, 64)) for i in range(count)}
    for name, linear in linears.items():
        trainer.register(name, linear)
    return trainer, linears


def batch():
    mx.random.seed(4)
    return mx.random.normal((6, 7, 64)), mx.random.randint(0, 64, (6, 7))


@pytest.mark.parametrize("count", [1, 16])
def test_one_optimizer_trains_layers_under_distinct_names(count):
    trainer, linears = stack(count)
    norm = nn.RMSNorm(64)

    def forward(x):
        for name in linears:
            x = x + trainer.layer(name)(norm(x))
        return x

    losses = [trainer.step_lm(forward, *batch()) for _ in range(4)]
    assert losses[-1] < losses[0]
    moments = trainer.optimizer.state
    assert sum(key.startswith("/layers/") for key in moments) == count
    assert all(mx.abs(t).max().item() > 0 for t in trainer.tensors().values())
    with raises("conflict", "name", "layers.0.proj"):
        trainer.register("layers.0.proj", nn.Linear(64, 64))


def test_three_layers_equal_plain_autograd_as_sequence_and_function():
    (trainer, linears), (other, _) = (stack(3, settings=SLOWLY) for _ in range(2))
    names, (x, y) = list(linears), batch()
    start = trainer.tensors()
    adapters = {n: [start[f"{n}.lora_a"], start[f"{n}.lora_b"]] for n in names}
    adamw = optimizers.AdamW(2e-4, bias_correction=True)

    def plain(adapters):
        h = x
        for name in names:
            a, b = adapters[name]
            h = linears[name](h) + 2.0 * ((h @ a) @ b)
        return nn.losses.cross_entropy(h.astype(mx.float32), y, reduction="mean")

    def forward(h):
        for name in names:
            h = other.layer(name)(h)
        return h

    for _ in range(4):
        value, grads = mx.value_and_grad(plain)(adapters)
        grads, _ = optimizers.clip_grad_norm(grads, 1.0)
        adapters = adamw.apply_gradients(grads, adapters)
        loss = trainer.step_lm(names, x, y)
        assert loss == other.step_lm(forward, x, y) == pytest.approx(value.item(), abs=1e-6)
    tensors = trainer.tensors()
    for name, (a, b) in adapters.items():
        assert mx.abs(tensors[f"{name}.lora_a"] - a).max().item() < 1e-6
        assert mx.abs(tensors[f"{name}.lora_b"] - b).max().item() < 1e-6


def test_parameters_are_found_from_the_registered_modules():
    trainer, linears = stack(2)
    x, y = batch()
    with raises("unknown", "layers", "layers[1]", "QuantizedLinear"):
        trainer.step_lm(["layers.0.proj", QUANTIZERS["affine"](nn.Linear(64, 64))], x, y)
    before, first = trainer.tensors(), trainer.layer("layers.0.proj")
    with pytest.warns(UserWarning, match=r"layers\.1\.proj: "):
        trainer.step_lm(lambda x: first(x), x, y)
    assert trainer.updates == {"layers.0.proj": 1, "layers.1.proj": 0}
    for name, tensor in trainer.tensors().items():
        assert mx.array_equal(before[name], tensor).item() == ("layers.1" in name)


@pytest.mark.parametrize("kind", ["nf4", "nf4 single"])
def test_nf4_layers_train_with_double_quantization_and_without(kind):
    trainer, linears = stack(3, kind)
    assert next(iter(linears.values())).double_quant == (kind == "nf4")
    losses = [trainer.step_lm(list(linears), *batch()) for _ in range(5)]
    assert losses[-1] < losses[0]


def test_accumulated_steps_go_on_to_the_bit_after_a_checkpoint(tmp_path):
    settings = TrainConfig(iters=8, learning_rate=1e-3, grad_accumulation_steps=2)
    (whole, linears), (first, _), (second, _) = (stack(3, settings=settings) for _ in range(3))
    names = list(linears)
    losses = [whole.step_lm(names, *batch()) for _ in range(8)]
    assert [first.step_lm(names, *batch()) for _ in range(4)] == losses[:4]
    first.save(tmp_path / "run")
    second.resume(tmp_path / "run")
    assert [second.step_lm(names, *batch()) for _ in range(4)] == losses[4:]
    for name, tensor in whole.tensors().items():
        assert mx.array_equal(tensor, second.tensors()[name]).item()
    second.save_adapters(tmp_path / "own.safetensors")
    assert {n for n in mx.load(str(tmp_path / "own.safetensors"))} == set(whole.tensors())
