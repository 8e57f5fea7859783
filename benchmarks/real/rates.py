"""Which learning rate trains SmolLM2 best on a real data set, with and without a warm-up.

Everything else is the default of `packs train`: AdamW with bias correction, the cosine schedule.

    python -m benchmarks.real.rates DATA WORK STEPS ROWS SEED    # by `python -m benchmarks real`
"""

import json
import sys
from pathlib import Path
from typing import Any

from mlx_packs import TrainConfig, load_base, train_pack

from . import files
from .jobs import PARTS, lora, read_rows, write_rows

RATES = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3)
WARMUPS = (0.0, 0.1)  # shares of the updates


def measure(data: str, work: Path, steps: int, rows: int, seed: int) -> list[dict[str, Any]]:
    """Return rate, warm-up, and perplexity on held-out rows after training, of each run."""
    part = PARTS[data]
    folder = work / f"rates-{data}-{steps}-seed{seed}"
    write_rows(folder / "data" / "train.jsonl", read_rows(data, "train"))
    write_rows(folder / "data" / "test.jsonl", read_rows(data, "test")[:rows])

    base = load_base(files.smollm2())
    results = []
    for warmup in WARMUPS:
        for rate in RATES:
            config = TrainConfig(
                iters=steps,
                batch_size=part.batch_size,
                max_seq_length=part.max_seq_length,
                learning_rate=rate,
                warmup_ratio=warmup,
                matmul_path="dense",
                metric="none",
                val_batches=0,
                test_batches=-1,
                save_every=steps,
                seed=seed,
                awake=False,
            )
            out = folder / f"{rate:g}-{warmup:g}"
            run = train_pack(base, str(folder / "data"), lora(), config, out, overwrite=True)
            scores = run.pack.manifest["eval"]
            results.append(
                {
                    "rate": rate,
                    "warmup": warmup,
                    "ppl": scores["ppl_after"],
                    "ppl_se": scores["ppl_after_se"],
                    "ppl_before": scores["ppl_before"],
                }
            )
    return results


def main(arguments: list[str]) -> int:
    data, work, steps, rows, seed = arguments
    print(json.dumps(measure(data, Path(work), int(steps), int(rows), int(seed))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
