"""The plan of a run with the base on disk is within its error of the measured peak."""

import pytest

from mlx_packs import LoRAConfig, TrainConfig, train_pack
from mlx_packs.memory.plan import ERROR
from tests.helpers.checkpoints import write_stored
from tests.helpers.memory import active_bytes
from tests.helpers.rows import chat, write_rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hidden", "blocks", "length", "batch"),
    [(512, 24, 128, 1), (768, 16, 256, 2)],
)
def test_the_estimate_is_within_its_error_of_the_measured_peak(
    hidden, blocks, length, batch, tmp_path
):
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": blocks}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": 4, "head_dim": 64}
    base = write_stored(tmp_path / "base", bits=4, **sizes, **heads, max_position_embeddings=4096)
    turns = [chat(f"What is {n}?", f"It is {n}, and {n} again. " * length) for n in range(8)]
    rows = write_rows(tmp_path / "rows", train=turns, valid=turns[:1], test=turns[:1])

    train = TrainConfig(
        iters=12,  # on a busy machine MLX allocates less ahead in some steps
        batch_size=batch,
        max_seq_length=length,
        matmul_path="transient",
        offload_base="on",
        val_batches=0,
    )
    held = active_bytes() / 1e9  # by other tests of this process
    lora = LoRAConfig(rank=8)
    report = train_pack(str(base), rows, lora, train, tmp_path / "p", progress=False).report
    assert report["plan_peak_gb"] == pytest.approx(report["peak_gb"] - held, rel=ERROR)
