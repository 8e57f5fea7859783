"""float16 training: gradients survive, overflows are skipped or lead to bfloat16, resumed exactly."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.optimizers as optimizers
import pytest
from mlx.utils import tree_flatten

from mlx_packs import LoRAConfig, TrainConfig, backend, load_base, runtime, train_pack
from mlx_packs.adapters.attach import attach
from mlx_packs.bases.tokenizer import load_tokenizer
from mlx_packs.data.dataset import Batch
from mlx_packs.objectives.causal_lm import CausalLM, split_head
from mlx_packs.optim import OPTIMIZERS, make_optimizer
from mlx_packs.runtime import mx
from mlx_packs.training import step, update
from mlx_packs.training.checkpoint import has_loss_scale
from mlx_packs.training.run_folder import RunFolder
from mlx_packs.training.step import Stepper
from mlx_packs.training.update import FIRST, KEY, LEAST, add_scale
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.errors import raises
from tests.helpers.models import base_of
from tests.helpers.runs import Lines
from tests.helpers.steps import examples_of, fill_b, make_batch, weighted, with_weight
from tests.helpers.variants import slow_except
from tests.training.conftest import snapshot

TRAIN = TrainConfig(
    **{"iters": 4, "batch_size": 1, "max_seq_length": 32, "val_batches": 0, "save_every": 2},
    **{"matmul_path": "quantized", "recompute": "none", "compute_dtype": "float16"},
    **{"lr_schedule": "constant", "steps_per_report": 1},
)
LORA = LoRAConfig(rank=2)
LARGE = "~"  # a token whose states are too large for float16


@pytest.fixture(autouse=True)
def gpu(here):
    """The rules of a GPU without kernels of its own; MLX computes on the CPU."""
    with runtime.assumed_device("gpu"), backend("reference"):
        yield


def stepper_of(
    dtype=mx.float16, scale: float | None = FIRST, optimizer=None, max_grad_norm=None, skips=False
):
    """A model in ``dtype`` with adapters, and steps of it; without a scale for None."""
    model = base_of("qwen3")
    model.model.set_dtype(mx.float16)
    model.model.set_dtype(dtype)
    fill_b(attach(model, LoRAConfig(rank=4)))
    model.model.train()
    optimizer = optimizer or optimizers.SGD(learning_rate=1.0)
    optimizer.init(model.model.trainable_parameters())
    if scale is not None:
        add_scale(optimizer)
        optimizer.state[KEY]["scale"] = mx.array(scale)
    loss = partial(weighted, CausalLM(model.model, split_head(model.model)))
    return model.model, Stepper(model.model, loss, optimizer, max_grad_norm, skips)


def batch_of(weight: float = 1.0) -> Batch:
    """A batch whose targets count ``weight`` each."""
    batch = make_batch(examples_of((9, 17)), range(2), 2, 64)
    return replace(with_weight(batch, weight), denominator=1)


def gradients(dtype, scale: float | None, weight: float = 1.0) -> dict[str, mx.array]:
    """Gradients of the adapters, by the difference that an update of SGD makes."""
    model, stepper = stepper_of(dtype, scale)
    before = dict(tree_flatten(model.trainable_parameters()))
    stepper(batch_of(weight), True, True)
    return {n: before[n] - a for n, a in tree_flatten(model.trainable_parameters())}


def relative_errors(actual: dict, expected: dict) -> list[float]:
    """Of each tensor, the norm of the difference by its norm."""
    return [(mx.linalg.norm(actual[n] - g) / mx.linalg.norm(g)).item() for n, g in expected.items()]


@pytest.mark.parametrize("weight", [1.0, 2.0**-22])
def test_scaled_gradients_are_those_of_float32(weight):
    """Also where they are so small that float16 alone would round them to zero."""
    expected = gradients(mx.float32, None)
    assert max(relative_errors(gradients(mx.float16, 128 / weight, weight), expected)) < 0.02
    if weight < 1:
        unscaled = gradients(mx.float16, None, weight)
        assert min(relative_errors(unscaled, expected)) > 0.5


def changed(before: dict, after: dict) -> set[str]:
    return {name.partition(".")[0] for name in before if before[name] != after[name]}


@pytest.mark.parametrize(
    ("name", "alone"),
    [("adamw", True), ("adamw", False), pytest.param("muon", True, marks=pytest.mark.slow)],
)
def test_an_overflow_of_the_gradient_skips_and_halves(name, alone):
    model, stepper = stepper_of(optimizer=make_optimizer(TrainConfig(iters=99, optimizer=name)))
    stepper(batch_of(), True, alone)
    stepper.optimizer.state[KEY]["scale"] = mx.array(2.0**24)

    before = snapshot(model, stepper.optimizer)
    loss, norm = stepper(batch_of(), True, alone)
    after = snapshot(model, stepper.optimizer)

    assert math.isfinite(loss) and norm == math.inf
    # the schedule counts the batch, and no parameter or moment does
    assert changed(before, after) == {"step", "learning_rate", KEY}
    assert after[f"{KEY}.scale"] == 2.0**23
    assert (after[f"{KEY}.good"], after[f"{KEY}.skipped"]) == (0, 1)

    stepper.optimizer.state[KEY]["scale"] = mx.array(FIRST)
    assert math.isfinite(stepper(batch_of(), True, alone)[1])
    assert "weights" in changed(after, snapshot(model, stepper.optimizer))


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("where", ["forward", "unscaled gradient"])
def test_nothing_changes_after_an_overflow_without_remedy(where, alone):
    forward = where == "forward"
    model, stepper = stepper_of(scale=FIRST if forward else LEAST)
    bad = batch_of(1.5e37 if forward else 2.0**40)  # a sum that float32 does not hold
    before = snapshot(model, stepper.optimizer)
    if not alone:  # the overflow is in the first batch of two
        stepper(bad, False, alone)
        bad = batch_of()
    assert math.isnan(stepper(bad, True, alone)[1])
    for _ in range(2):
        assert math.isnan(stepper(batch_of(), True, alone)[1])
    assert changed(before, snapshot(model, stepper.optimizer)) == {KEY}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A base in bfloat16 whose state of the token `LARGE` is too large for float16."""
    folder = write_checkpoint(tmp_path_factory.mktemp("large") / "base", dtype=mx.bfloat16)
    file = str(folder / "model.safetensors")
    tensors = mx.load(file)
    tokenizer = load_tokenizer(folder, json.loads((folder / "config.json").read_text()), False)
    (large,) = tokenizer.encode(LARGE, add_special_tokens=False)
    table = tensors["model.embed_tokens.weight"]
    table[large] = mx.where(table[large] < 0, -65024, 65024)
    tensors["model.layers.0.self_attn.o_proj.weight"] *= 2e4
    mx.save_safetensors(file, tensors, {"format": "mlx"})
    return folder


@pytest.fixture(scope="module")
def bfloat16_base(tmp_path_factory) -> Path:
    """A base in bfloat16; tests only read it."""
    return write_checkpoint(tmp_path_factory.mktemp("small") / "base", dtype=mx.bfloat16)


def texts(train: list[str], *valid: str) -> dict[str, list[dict]]:
    return {"train": [{"text": t} for t in train], "valid": [{"text": t} for t in valid]}


# Four rows, the last to be drawn of which is `LARGE`.
NUMBERS = ["one two three four", "five six seven", "eight nine ten", f"one {LARGE} two three"]
ROWS = texts(NUMBERS, "one two six")
SMALL_ROWS = texts(["one two"] * 4, "three six")


def trained(base, data, train=TRAIN, out="o", lora=LORA, **options):
    display = Lines()
    result = train_pack(base, data, lora, train, out, progress=display, **options)
    return result, [line for line in display.lines if line.startswith("dtype ")]


def stored(out: str) -> dict[str, bytes]:
    """The files of the last checkpoint that must be repeatable."""
    folder = RunFolder(Path(f"{out}-run")).latest_checkpoint()
    return {n: (folder / f"{n}.safetensors").read_bytes() for n in ("adapters", "optimizer")}


def test_a_run_that_overflows_goes_on_in_bfloat16(checkpoint):
    result, lines = trained(checkpoint, ROWS)
    assert lines[0] == "dtype float16: as specified · the loss is scaled"

    overflow = next(line for line in lines if "continues in bfloat16" in line)
    number = int(overflow.removeprefix("dtype batch ").partition(":")[0])
    assert "the loss is nan in float16" in overflow
    assert lines[-1].startswith("dtype bfloat16 instead of float16: batch")

    # every batch is trained once, the one that overflowed too
    assert [line["batch"] for line in result.curve if "loss" in line] == [1, 2, 3, 4]
    assert result.report["batches"] == 4 and math.isfinite(result.report["ppl_after"])
    assert result.report["compute_dtype"]["name"] == "bfloat16"
    assert result.pack.manifest["measured"]["compute_dtype"] == result.report["compute_dtype"]

    last_update = Path(f"o-run/step-{number - 1:06d}")
    assert last_update in RunFolder(Path("o-run")).checkpoints() and not has_loss_scale(last_update)
    tensors = result.pack.load_tensors()
    assert all(mx.isfinite(t).all().item() for t in tensors.values())
    assert not has_loss_scale(RunFolder(Path("o-run")).latest_checkpoint())

    _, lines = trained(checkpoint, ROWS, replace(TRAIN, iters=5), resume=True)
    assert lines == ["dtype bfloat16 instead of float16: as of step-000004"]


@pytest.mark.slow
def test_steps_ahead_of_an_overflow_change_no_byte(checkpoint, monkeypatch):
    lora, files = replace(LORA, dropout=0.2), []
    train = replace(TRAIN, seed=1, steps_per_report=9, save_every=9)
    for ahead in (True, False):
        monkeypatch.setattr(step, "runs_ahead", lambda ahead=ahead: ahead)
        result, lines = trained(checkpoint, ROWS, train, f"o{ahead}", lora)
        assert "batch 3: the loss is nan" in lines[1]  # and one is in flight
        assert result.report["compute_dtype"]["name"] == "bfloat16"
        files.append(stored(f"o{ahead}"))
    assert files[0] == files[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("held_out", "fault"),
    [([f"{LARGE} a"], "forward pass"), (["a b", f"{LARGE} a"], "held-out examples")],
)
def test_a_base_that_overflows_is_trained_in_bfloat16(checkpoint, held_out, fault):
    result, lines = trained(checkpoint, texts([f"one {LARGE} two"] * 2, *held_out))
    assert fault in lines[1] and result.report["batches"] == 4
    assert RunFolder(Path("o-run")).checkpoints()[0].name == "step-000002"


@pytest.mark.slow
def test_a_resumed_run_is_the_unbroken_one(bfloat16_base, monkeypatch):
    monkeypatch.setattr(update, "GROWTH", 3)
    trained(bfloat16_base, SMALL_ROWS, out="whole")
    assert has_loss_scale(RunFolder(Path("whole-run")).latest_checkpoint())
    trained(bfloat16_base, SMALL_ROWS, replace(TRAIN, iters=2))
    result, lines = trained(bfloat16_base, SMALL_ROWS, resume=True)
    assert lines == ["dtype float16: as specified · the loss is scaled"]
    assert stored("o") == stored("whole")
    assert result.report["loss_scale"] == 2 * FIRST and result.report["skipped_updates"] == 0
    assert [line["loss_scale"] for line in result.curve] == [FIRST, FIRST, 2 * FIRST, 2 * FIRST]


@pytest.mark.slow
def test_a_run_in_float16_can_be_resumed_on_a_cpu(bfloat16_base):
    trained(bfloat16_base, SMALL_ROWS, replace(TRAIN, iters=2))
    with runtime.assumed_device("cpu"):
        result, lines = trained(bfloat16_base, SMALL_ROWS, resume=True)
    assert lines == ["dtype float32 instead of float16: CPUs are far slower in half precision"]
    assert result.report["batches"] == 4
    assert not has_loss_scale(RunFolder(Path("o-run")).latest_checkpoint())


def test_a_skipped_update_is_logged(bfloat16_base, monkeypatch):
    monkeypatch.setattr(update, "FIRST", 2.0**24)
    result, lines = trained(bfloat16_base, SMALL_ROWS)
    assert lines[1] == ("dtype batch 1: a gradient overflows in float16, its update is skipped")
    assert result.report["skipped_updates"] == len(lines) - 1 > 0
    assert all(math.isfinite(line["grad_norm"]) for line in result.curve)


def test_a_loaded_base_that_overflows_is_an_error(checkpoint):
    base = load_base(checkpoint, compute_dtype="float16")
    assert base.compute_dtype == "float16"
    with raises("diverged", "compute_dtype", "in float16"):
        trained(base, ROWS, replace(TRAIN, compute_dtype="auto"))
    with raises("conflict", "compute_dtype", "load_base"):
        trained(base, ROWS, out="p")


@pytest.mark.slow
def test_accumulated_batches_are_taken_again(checkpoint):
    train = replace(TRAIN, grad_accumulation_steps=4, iters=8)
    result, lines = trained(checkpoint, ROWS, train)
    assert any("continues in bfloat16" in line for line in lines)
    assert [line["batch"] for line in result.curve if "loss" in line] == [*range(1, 9)]
    assert result.report["steps"] == 2
    assert RunFolder(Path("o-run")).checkpoints()[0].name == "step-000000"


@pytest.mark.parametrize("name", slow_except(OPTIMIZERS, "adamw"))
def test_a_guarded_update_is_the_optimizers_own(name):
    results = []
    for scale in (FIRST, None):
        config = TrainConfig(iters=9, optimizer=name)
        model, stepper = stepper_of(mx.float32, scale, make_optimizer(config))
        for _ in range(2):
            stepper(batch_of(), True, True)
        results.append(dict(tree_flatten(model.trainable_parameters())))
    assert max(relative_errors(*results)) < 1e-4
