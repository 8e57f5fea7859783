"""Our step is mlx-lm's step: the same loss, the same gradient of every A and B, the same weights.

mlx-lm's side is its own code: `iterate_batches`, `default_loss`, `train`.
Its mask takes in one target after the end of a row (`steps <= length`), token 0, which only rows
that fill the batch's width do not have. Rows here are full, or that target is accounted for.
"""

import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.trainer import TrainingArgs, default_loss, iterate_batches, train
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_packs.adapters.attach import attach
from mlx_packs.config.schema import LoRAConfig
from mlx_packs.data.encoding import Example
from mlx_packs.runtime import mx
from tests.helpers.models import base_of
from tests.helpers.steps import lm_stepper, make_batch

FAMILIES = ("qwen3", "qwen2", "llama")
RANK, SCALE = 4, 2.0
WIDTH = 33  # tokens of a row that fills its batch: 32 inputs and the last target
TOLERANCE = 1e-5

Row = tuple[list[int], int]  # tokens, and the number of the first that are prompt


def random_rows(lengths: list[int], completion_only: bool) -> list[Row]:
    """Random rows of the given lengths; their first 40 % is prompt, or nothing is."""
    random = np.random.default_rng(5)
    return [(random.integers(1, 128, n).tolist(), n * 2 // 5 * completion_only) for n in lengths]


def quantized(family: str):
    """A small random 4-bit base; the same one at each call."""
    base = base_of(family)
    nn.quantize(base.model, group_size=32, bits=4)
    base.model.freeze()  # quantizing leaves the biases of qwen2 trainable
    return base


def our_side(family: str, matmul_path: str = "quantized"):
    """A base with adapters that matter (B is not zero), and their values by name."""
    attached = attach(
        quantized(family), LoRAConfig(rank=RANK, alpha=SCALE * RANK), None, matmul_path
    )
    start = {name: mx.random.normal(t.shape) * 0.1 for name, t in attached.tensors().items()}
    attached.load(start, "test")
    attached.model.train()
    return attached, start


def mlx_lm_side(family: str, start: dict[str, mx.array]) -> nn.Module:
    """The same base under mlx-lm's own LoRA layers, with the same values."""
    model = quantized(family).model
    linear_to_lora_layers(model, -1, {"rank": RANK, "scale": SCALE, "dropout": 0.0})
    assert set(start) == set(dict(tree_flatten(model.trainable_parameters())))
    model.load_weights(list(start.items()), strict=False)
    model.train()
    return model


def our_batch(data: list[Row], pad_is_target: bool = False):
    """Our batch of the same rows; with ``pad_is_target`` a padded row also has the target 0."""
    examples = []
    for tokens, offset in data:
        if pad_is_target and len(tokens) < WIDTH:
            tokens = [*tokens, 0]
        target = np.arange(len(tokens)) >= max(offset, 1)
        examples.append(Example(np.array(tokens, dtype=np.int32), target, "test"))
    return make_batch(examples, range(len(examples)), len(examples), WIDTH - 1)


class KeepGradient(optimizers.Optimizer):
    """Puts each gradient where its parameter was, so that a whole compiled step shows it."""

    def init_single(self, parameter, state):
        pass

    def apply_single(self, gradient, parameter, state):
        return gradient


def our_loss_and_gradients(attached, batch) -> tuple[float, dict[str, mx.array]]:
    stepper = lm_stepper(attached.model, KeepGradient(), max_grad_norm=None)
    loss, _ = stepper(batch, last=True, alone=True)
    return loss, attached.tensors()


def assert_within_tolerance(ours: dict[str, mx.array], theirs: dict[str, mx.array]) -> None:
    """Each tensor to TOLERANCE of its largest entry, and none is all zero."""
    assert set(ours) == set(theirs)
    for name, expected in theirs.items():
        largest = mx.abs(expected).max().item()
        assert largest > 0, name
        assert mx.abs(ours[name] - expected).max().item() <= TOLERANCE * largest, name


def check_step(ours, theirs, data: list[Row], batch, ends_at_the_row: bool = False) -> None:
    """Both sides have the same number of targets, loss and gradients."""
    loss, gradients = our_loss_and_gradients(ours, batch)
    tokens, lengths = next(iterate_batches(data, len(data), WIDTH))  # (offset, length) [B, 2]
    if ends_at_the_row:  # steps <= length - 1 is steps < length
        lengths = lengths - mx.array([0, 1])
    step = nn.value_and_grad(theirs, default_loss)
    (expected, count), expected_gradients = step(theirs, tokens, lengths)
    assert count.item() == batch.targets
    assert loss == pytest.approx(expected.item(), rel=TOLERANCE)
    assert_within_tolerance(gradients, dict(tree_flatten(expected_gradients)))


@pytest.mark.parametrize(
    ("family", "completion_only", "path"),
    [
        *((family, only, "quantized") for family in FAMILIES for only in (True, False)),
        ("qwen3", True, "transient"),
        ("qwen3", True, "dense"),
    ],
)
def test_full_rows_have_mlx_lms_loss_and_gradients(family, completion_only, path):
    data = random_rows([WIDTH, WIDTH, WIDTH], completion_only)
    attached, start = our_side(family, path)
    check_step(attached, mlx_lm_side(family, start), data, our_batch(data))


@pytest.mark.parametrize("completion_only", [True, False])
def test_padded_rows_equal_mlx_lm_once_its_mask_ends_at_the_row(completion_only):
    data = random_rows([WIDTH, 20, 11], completion_only)
    attached, start = our_side("qwen3")
    check_step(attached, mlx_lm_side("qwen3", start), data, our_batch(data), ends_at_the_row=True)


def test_stock_mlx_lm_differs_by_one_pad_target_for_each_padded_row():
    data = random_rows([WIDTH, 20, 11], True)
    attached, start = our_side("qwen3")
    with_pads = our_batch(data, pad_is_target=True)
    assert with_pads.targets == our_batch(data).targets + 2
    check_step(attached, mlx_lm_side("qwen3", start), data, with_pads)
    losses = []
    for batch in (with_pads, our_batch(data)):
        attached.load(start, "test")
        losses.append(our_loss_and_gradients(attached, batch)[0])
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)


def test_three_steps_give_the_weights_of_mlx_lms_trainer(tmp_path):
    data = random_rows([WIDTH, WIDTH, WIDTH], True)
    attached, start = our_side("qwen3")
    # with eps = 1e-8 Adam turns the rounding of an entry without gradient into a step of its own
    ours, theirs = (optimizers.AdamW(learning_rate=1e-3, eps=1e-5) for _ in range(2))

    stepper = lm_stepper(attached.model, ours, max_grad_norm=None)
    batch = our_batch(data)
    for _ in range(3):
        stepper(batch, last=True, alone=True)

    train(
        mlx_lm_side("qwen3", start),
        theirs,
        data,
        args=TrainingArgs(
            batch_size=len(data),
            iters=3,
            max_seq_length=WIDTH,
            adapter_file=str(tmp_path / "adapters.safetensors"),
        ),
    )

    expected = mx.load(str(tmp_path / "adapters.safetensors"))
    for name, weights in attached.tensors().items():
        assert mx.abs(weights - expected[name]).max().item() <= TOLERANCE, name
        assert mx.abs(weights - start[name]).max().item() > 1e-3, name
