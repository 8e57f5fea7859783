"""`packs bench`: training steps of mlx-lm and ours, timed here."""

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..display import Display
from ..errors import PackError
from . import options
from .options import option
from .output import exit_if_failed, print_report

if TYPE_CHECKING:
    from ..ops._backend import Instance


@click.command()
@option(
    "--model",
    default="tiny",
    metavar="MODEL",
    help="Base model to time in addition to the bundled one: a folder or a Hugging Face id that "
    "mlx-lm can train too.",
)
@option(
    "--shapes",
    metavar="NxN,NxN",
    help="Batches to time: examples x tokens.",
    default_text="1x512,4x512,1x2048; on a CPU 1x64,4x64,1x256",
)
@option(
    "--minutes", default=10.0, metavar="N", help="Maximum duration of the benchmark, in minutes."
)
@option("--rank", default=16, help="Rank of the adapters, on all linear layers.")
@option(
    "--out",
    metavar="FILE",
    help="File to write the record to, as JSON.",
    default_text="packs-bench-<chip>-<date>.json here",
)
@option(
    "--contribute",
    is_flag=True,
    help="Also write the text of a pull request next to the record. Nothing is sent.",
)
@options.trust_remote_code
@options.as_json
def bench(
    model: str,
    shapes: str | None,
    minutes: float,
    rank: int,
    out: str | None,
    contribute: bool,
    trust_remote_code: bool,
) -> None:
    """Time training steps of mlx-lm and mlx-packs on this machine.

    Both run the same steps on the same batches, alternating, after a check that their losses are
    equal. Kernels are checked as by `packs doctor`. Afterwards, `packs plan` and the choice of the
    matmul path use these measurements. The exit code is 1 if losses differ or a kernel is wrong.
    """
    from ..bench.record import failures, file_name, pull_request, table, to_record
    from ..bench.run import BenchSettings, disturbances, read_conditions, run_bench
    from ..files import atomic_write, to_json

    if not (math.isfinite(minutes) and minutes > 0):
        raise PackError(f"--minutes {minutes:g}: must be a number above 0.")
    if rank < 1:
        raise PackError(f"--rank {rank}: must be at least 1.")

    settings = BenchSettings(model, _shapes(shapes), minutes, rank, trust_remote_code)
    _check_out(out)
    before = read_conditions()
    causes = disturbances(before)
    if contribute and causes:
        raise PackError(
            f"--contribute: this machine {' and '.join(causes)}, so its figures would mislead "
            "others. Change that, or leave out --contribute.",
            "conflict",
        )

    display = Display()
    for what in causes:
        display.line("note", f"this machine {what}: figures are lower than it can do")
    result = run_bench(settings, before, _instances(model, rank), display)

    record = to_record(result)
    file = Path(out).expanduser() if out else Path(f"packs-bench-{file_name(record)}")
    faults = failures(result)

    calibration = (
        f"packs plan now predicts seconds per step from {result.calibrated} steps measured here"
    )
    if result.uncalibrated:
        calibration = f"not calibrated: {result.uncalibrated}"
    lines = [*table(record), f"plan    {calibration}"]

    atomic_write(file, to_json(record))
    lines.append(f"record  {file}")

    if contribute and not faults:
        text = file.with_suffix(".md")
        atomic_write(text, pull_request(record, file.name))
        lines.append(f"        {text}: the text of a pull request; nothing was sent")

    print_report(record, lines)
    exit_if_failed(faults)


def _instances(model: str, rank: int) -> list["Instance"]:
    from ..bases.files import TINY
    from ..ops.diagnostics import kernel_instances
    from ..ops.grouped_lora_kernel import MAX_RANK
    from .doctor import instances_of

    usual = kernel_instances()
    if model == TINY or rank > MAX_RANK:
        return usual

    known = {(instance.op, instance.name) for instance in usual}
    return usual + [i for i in instances_of(model, rank) if (i.op, i.name) not in known]


def _shapes(text: str | None) -> tuple[tuple[int, int], ...]:
    if text is None:
        return ()
    matched = [re.fullmatch(r"\s*(\d+)\s*[xX]\s*(\d+)\s*", part) for part in text.split(",")]
    shapes = [(int(m[1]), int(m[2])) if m else (0, 0) for m in matched]

    if any(rows < 1 or length < 2 for rows, length in shapes):
        raise PackError(
            f"--shapes {text}: must be examples x tokens of batches, as in 1x512,4x512; "
            "at least 1x2."
        )
    if len(set(shapes)) < len(shapes):
        raise PackError(f"--shapes {text}: names a shape twice.")
    return tuple(shapes)


def _check_out(out: str | None) -> None:
    """Check that the record can be written, before minutes are spent."""
    file = Path(out).expanduser() if out else Path("packs-bench.json")
    if not file.parent.is_dir():
        raise PackError(f"--out {out}: there is no folder {file.parent}.", "not-found")
    if out and file.exists():
        raise PackError(f"--out {out}: already exists. Choose another file.", "exists")
