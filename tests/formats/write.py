"""Write the pack and the run of a fixture as this program writes them.

python -m tests.formats.write NAME
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

from mlx_packs import LoRAConfig, TrainConfig, train_pack

FORMATS = Path(__file__).parent
LORA = LoRAConfig(rank=1, num_layers=1, target_modules=("q_proj", "v_proj"))
TRAIN = TrainConfig(
    iters=2,
    batch_size=2,
    max_seq_length=64,
    save_every=2,
    steps_per_report=1,
    lr_schedule="constant",
    learning_rate=1e-3,
    matmul_path="dense",
)


def main(name: str) -> None:
    """Write the folder ``name``, which must not exist."""
    target = FORMATS / name
    target.mkdir()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        shutil.copytree(FORMATS / "d", "d")
        train_pack("tiny", "d", LORA, TRAIN, "o")
        for report in ("report.html", "report.json"):
            Path("o-run", report).unlink(missing_ok=True)
        shutil.move("o", target / "pack")
        shutil.move("o-run", target / "run")


if __name__ == "__main__":
    main(sys.argv[1])
