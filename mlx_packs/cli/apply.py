"""`packs apply`: whether a pack fits a base model."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..config.choices import ARCHITECTURES
from ..errors import PackError
from ..gates import evaluate_gates, failures, gate_limits
from . import options
from .options import option
from .output import exit_if_failed, print_report

if TYPE_CHECKING:
    from ..packs.pack import Pack


@click.command()
@click.argument("pack", type=click.Path(path_type=Path))
@options.model_of_pack
@option(
    "--dry-run",
    is_flag=True,
    help="Check hashes, shapes and the base model's fingerprint, without loading weights.",
)
@options.setting("max_pack_mb", type=float)
@options.execution
def apply(
    pack: Path, model: str | None, dry_run: bool, max_pack_mb: float | None, trust_remote_code: bool
) -> None:
    """Check that a pack fits a base model; nothing is changed.

    Without --dry-run, the pack is also attached, run and detached again.
    """
    from ..packs.compatibility import check_fit
    from ..packs.pack import Pack

    limits = gate_limits(max_pack_mb=max_pack_mb)
    opened = Pack.open(pack)
    model = options.base_of(model, opened)
    report = check_fit(opened, model)

    if not dry_run:
        report |= _largest_change(opened, model, trust_remote_code)
    if gates := evaluate_gates(limits, {"max_pack_mb": report["pack_mb"]}):
        report["gates"] = gates

    print_report(report, _lines(report))
    exit_if_failed(failures(gates))


def _lines(report: dict) -> list[str]:
    from ..bases.fingerprint import short_fingerprint

    tensors = []
    if report["projections"]:
        tensors.append(f"{report['projections']} projections")
    if report["full_tensors"]:
        tensors.append(f"{report['full_tensors']} tensors stored in full")

    lines = [
        f"fits    {report['pack']} on {report['model']}: hashes, base fingerprint "
        f"{short_fingerprint(report['fingerprint'])}, {', '.join(tensors)}, {report['pack_mb']} MB"
    ]
    if report["geometry"] != "checked":
        lines.append("note    shapes were not compared: the base stores its tensors by other names")
    for output in (facts.output for facts in ARCHITECTURES.values()):
        if (change := report.get(f"largest_{output}_change")) is not None:
            lines.append(
                f"applied {output}s moved by up to {change:.3f}; after detaching they are "
                "bit-identical to before"
            )

    return lines


def _largest_change(pack: "Pack", model: str, trust_remote_code: bool) -> dict:
    """Attach the pack, return how far outputs move, and check that detaching restores them."""
    from ..packs.base import load_base_for
    from ..runtime import mx

    base = load_base_for(pack, model, trust_remote_code)
    probe = mx.arange(1, min(33, base.vocab_size))[None]
    before = base.model(probe)
    mx.eval(before)

    attached = pack.attach(base)
    change = mx.abs(base.model(probe) - before).max().item()
    attached.detach()

    if not mx.array_equal(base.model(probe), before).item():
        text = "detaching did not restore the base model. This is a bug; please report it."
        raise PackError(f"{pack.path}: {text}", "mismatch")
    return {f"largest_{ARCHITECTURES[base.architecture].output}_change": change}
