"""Whole training runs through the text of the kernels, emulated, against the reference."""

import pytest

from mlx_packs import LoRAConfig, TrainConfig, train_pack
from mlx_packs.ops import _backend, dispatch
from mlx_packs.packs.base import load_base
from mlx_packs.runtime import mx
from tests.helpers.emulation import emulation, failing_maker
from tests.helpers.rows import chat, write_rows

STEPS = 10  # emulated ones take seconds each


@pytest.fixture(scope="module")
def four_chats(tmp_path_factory):
    turns = [chat(f"Say {n}.", f"{n} it is, {n}!") for n in ("one", "two", "three", "four")]
    return write_rows(tmp_path_factory.mktemp("rows"), train=turns, valid=turns[:2])


def losses(
    rows, out, iters=STEPS, dtype=mx.float32, learning_rate=5e-3
) -> tuple[list[float], dict]:
    """The loss of each step of a run on the tiny base, and the run's report."""
    base = load_base("tiny")
    base.model.set_dtype(dtype)
    train = TrainConfig(
        iters=iters,
        batch_size=1,
        max_seq_length=32,
        learning_rate=learning_rate,
        matmul_path="quantized",
        steps_per_report=1,
        val_batches=0,
        save_every=1000,
    )
    lora = LoRAConfig(rank=4, rank_pattern={"v_proj": 3}, num_layers=1)
    run = train_pack(base, rows, lora, train, out)
    return [line["loss"] for line in run.curve if "loss" in line], run.report


@pytest.mark.slow
@pytest.mark.parametrize("language", ["metal", "cuda"])
def test_ten_steps_have_the_losses_of_the_reference(language, four_chats, tmp_path):
    expected, report = losses(four_chats, tmp_path / "reference")
    assert len(expected) == STEPS and expected[-1] < 0.8 * expected[0]
    assert report["ops"]["backend"] == "reference" and not report["ops"]["kernels"]
    with emulation(language, orders=("forward",)) as built, dispatch.backend(language):
        by_kernels, report = losses(four_chats, tmp_path / "kernels")
    assert by_kernels == pytest.approx(expected, rel=1e-5)
    assert {k.definition.name.removeprefix("mlx_packs_grouped_lora_") for k in built} >= {
        "down",
        "up_4at0_4at1_3at2",
    }
    assert report["ops"]["backend"] == language and report["ops"]["kernels"]
    assert not report["ops"]["fallbacks"]


@pytest.mark.slow
def test_ten_bfloat16_steps_have_losses_of_the_reference(four_chats, tmp_path):
    how = {"dtype": mx.bfloat16, "learning_rate": 1e-4}  # larger ones make paths part by chance
    expected, _ = losses(four_chats, tmp_path / "reference", **how)
    with emulation("metal", orders=("forward",)), dispatch.backend("metal"):
        by_kernels, _ = losses(four_chats, tmp_path / "kernels", **how)
    assert by_kernels == pytest.approx(expected, rel=0.01)


@pytest.fixture(scope="module")
def reference_losses(four_chats, tmp_path_factory) -> list[float]:
    """The losses of three steps by the reference."""
    return losses(four_chats, tmp_path_factory.mktemp("reference") / "p", iters=3)[0]


@pytest.mark.parametrize("kind", ["compile", "exception", "wrong"])
def test_run_where_a_kernel_fails_equals_the_reference(
    kind, four_chats, reference_losses, tmp_path, monkeypatch, caplog
):
    with emulation("metal") as _, dispatch.backend("metal"):
        monkeypatch.setitem(_backend.MAKERS, "metal", failing_maker(kind, _backend.MAKERS["metal"]))
        by_kernels, report = losses(four_chats, tmp_path / "kernels", iters=3)
    assert by_kernels == reference_losses
    assert set(report["ops"]["fallbacks"]) == {"grouped_lora"} and not report["ops"]["kernels"]
    assert len(caplog.records) == 1
