"""Whole training runs through the text of the kernels, emulated, against the reference."""

import pytest

from mlx_packs import LoRAConfig, TrainConfig, train_pack
from mlx_packs.ops import dispatch
from mlx_packs.packs.base import load_base
from mlx_packs.runtime import mx
from tests.helpers.emulation import emulation
from tests.helpers.rows import chat, write_rows

STEPS = 4  # emulated ones take long
FEW = {
    **{"batch_size": 1, "max_seq_length": 32, "matmul_path": "quantized", "steps_per_report": 1},
    **{"val_batches": 0, "save_every": 1000},
}


@pytest.fixture
def losses(small_folder, tmp_path):
    """Train on a small quantized base; the loss of each step, and the run's report."""
    chats = [chat(f"Say {n}.", f"{n} it is, {n}!") for n in ("one", "two", "three", "four")]
    rows = write_rows(tmp_path / "rows", train=chats, valid=chats[:1])

    def train(name, iters=STEPS) -> tuple[list[float], dict]:
        base = load_base(small_folder, quantize="affine4")
        base.model.set_dtype(mx.float32)
        config = TrainConfig(iters=iters, learning_rate=2e-2, **FEW)
        lora = LoRAConfig(rank=4, rank_pattern={"v_proj": 3}, num_layers=1)
        run = train_pack(base, rows, lora, config, tmp_path / name)
        return [line["loss"] for line in run.curve if "loss" in line], run.report

    return train


@pytest.mark.slow
@pytest.mark.parametrize("language", ["metal", "cuda"])
def test_steps_have_the_losses_of_the_reference(language, losses):
    expected, report = losses("reference")
    assert len(expected) == STEPS and expected[-1] < expected[0]
    assert report["ops"]["backend"] == "reference" and not report["ops"]["kernels"]
    with emulation(language, orders=("forward",)) as built, dispatch.backend(language):
        by_kernels, report = losses("kernels")
    assert by_kernels == pytest.approx(expected, rel=1e-5)
    names = {k.definition.name.removeprefix("mlx_packs_grouped_lora_") for k in built}
    assert names >= {"down", "up_4at0_4at1_3at2"}
    assert report["ops"]["backend"] == language and report["ops"]["kernels"]
    assert not report["ops"]["fallbacks"]
