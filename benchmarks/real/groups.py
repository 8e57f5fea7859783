"""What it does to the loss curve that examples which begin alike meet in a batch.

The examples are the steps of gsm8k's solutions: each has the problem and the number of a step, and
answers with that step, so that three to eight examples begin with the same problem. A run with
groups and one with batches drawn at random see as many batches.

    python -m benchmarks.real.groups WORK STEPS ROWS SEED    # by `python -m benchmarks real`
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlx_packs import TrainConfig, load_base, train_pack

from . import files
from .jobs import RATE, lora, read_rows, write_rows

AT_RANDOM, GROUPED = "drawn at random", "groups put together"
BATCH = 8
_EVALUATIONS = 4


def steps_of(rows: Sequence[dict]) -> list[dict]:
    """Return a row for each step of the solution of a problem, all with the problem first."""
    questions = []
    for row in rows:
        problem, solution = (message["content"] for message in row["messages"])
        for number, line in enumerate(solution.splitlines(), 1):
            asked = f"{problem}\nWhat is line {number} of the solution?"
            turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": line}]
            questions.append({"messages": turns})
    return questions


def measure(work: Path, steps: int, rows: int, seed: int) -> list[dict[str, Any]]:
    """Return the validation losses of each way, of equal numbers of batches apart."""
    folder = work / f"groups-{steps}-{rows}-seed{seed}"
    problems = read_rows("gsm8k", "train")
    order = np.random.default_rng(seed).permutation(len(problems))
    chosen = [problems[i] for i in order[: steps * BATCH // 3]]
    write_rows(folder / "data" / "train.jsonl", steps_of(chosen))
    write_rows(folder / "data" / "valid.jsonl", steps_of(read_rows("gsm8k", "test"))[:rows])

    base = load_base(files.smollm2())
    results = []
    for way, share in ((AT_RANDOM, "off"), (GROUPED, "on")):
        config = TrainConfig(
            iters=steps,
            batch_size=BATCH,
            max_seq_length=512,
            learning_rate=RATE,
            matmul_path="dense",
            metric="none",
            val_batches=-1,
            steps_per_eval=steps // _EVALUATIONS,
            test_batches=1,
            save_every=steps,
            seed=seed,
            awake=False,
            share_prefix=share,
        )
        run = train_pack(base, str(folder / "data"), lora(), config, folder / share, overwrite=True)
        curve = [line["valid_loss"] for line in run.curve if "valid_loss" in line]
        shared = run.report["shared_prefix"] or {}
        results.append({"way": way, "losses": curve, "saved": shared.get("saved", 0.0)})
    return results


def main(arguments: list[str]) -> int:
    work, steps, rows, seed = arguments
    print(json.dumps(measure(Path(work), int(steps), int(rows), int(seed))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
