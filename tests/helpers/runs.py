"""The settings of a small run on the tiny base that several test modules share."""

from mlx_packs import LoRAConfig, TrainConfig
from mlx_packs.display import QUIET, Display

LORA = LoRAConfig(rank=2, num_layers=1)
TRAIN = TrainConfig(
    iters=2,
    batch_size=2,
    max_seq_length=64,
    matmul_path="dense",
    save_every=1,
    steps_per_report=1,
    lr_schedule="constant",
    learning_rate=1e-3,
)


class Lines(Display):
    """A display that prints nothing and keeps its lines."""

    def __init__(self):
        super().__init__(QUIET)
        self.lines = []

    def line(self, label, text, level=1):
        self.lines.append(f"{label} {text}")
