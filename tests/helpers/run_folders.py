"""Run folders as `packs train` leaves them, made without training."""

import json
from collections.abc import Sequence
from pathlib import Path

from mlx_packs.training.run_folder import RunFolder
from mlx_packs.training.run_page import write_report

RECIPE = {"model": "tiny", "data": "tickets", "iters": 600, "share_prefix": "off"}
RECIPE |= {"template_date": None, "task": "lm"}


def make_run(
    home: Path,
    name: str = "tickets",
    metrics: Sequence[dict] = (),
    samples: Sequence[dict] = (),
    report: dict | None = None,
    checkpoint: int | None = None,
    begun: bool = True,
    **status: object,
) -> Path:
    """Write a run folder; ``status`` goes into status.json."""
    folder = home / "packs" / f"{name}-run"
    folder.mkdir(parents=True)
    run = RunFolder(folder)
    if begun:
        run.write_identity({"recipe": RECIPE, "base": "b" * 64, "data": {}})
    for file, lines in (("metrics.jsonl", metrics), ("samples.jsonl", samples)):
        if lines:
            (folder / file).write_text("".join(json.dumps(line) + "\n" for line in lines))
    if report is not None:
        write_report(folder, report)
    if checkpoint is not None:
        (folder / f"step-{checkpoint:06d}").mkdir()
    if status:
        (folder / "status.json").write_text(json.dumps(status))
    return folder


def losses(*batches: int) -> list[dict]:
    """Return lines of metrics.jsonl whose loss falls with the batch."""
    return [{"batch": batch, "loss": 1 + 1 / batch} for batch in batches]
