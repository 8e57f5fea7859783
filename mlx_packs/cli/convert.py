"""`packs export` and `packs import`: adapters of PEFT and mlx-lm."""

from pathlib import Path

import click

from ..config.choices import ADAPTER_FORMATS
from . import options
from .options import option
from .output import print_report


@click.command()
@click.argument("pack", type=click.Path(path_type=Path))
@option(
    "--to",
    required=True,
    type=click.Choice(ADAPTER_FORMATS),
    help="Format of the adapter to write.",
)
@options.out("Folder to write the adapter to.")
@options.as_json
def export(pack: Path, to: str, out: str) -> None:
    """Convert a pack to an adapter of PEFT or mlx-lm.

    The adapter is numerically verified against the pack.
    """
    from ..convert.interop import export_pack

    report = export_pack(pack, to, out)
    lines = [
        f"wrote   {report['out']} ({report['mb']:.2f} MB): {report['modules']} modules for "
        f"{to}, numerically verified"
    ]
    print_report(report, lines + [f"note    {note}" for note in report["notes"]])


@click.command("import")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@options.out("Folder to write the pack to.")
@option(
    "--model",
    metavar="MODEL",
    help="Base model of the adapter.",
    default_text="the one that the adapter names",
)
@options.overwrite
@options.trust_remote_code
@options.as_json
def import_(
    folder: Path, out: str, model: str | None, overwrite: bool, trust_remote_code: bool
) -> None:
    """Convert an adapter of PEFT or mlx-lm to a pack.

    DIR is the folder of the adapter; only safetensors files are read. An adapter that a pack cannot
    store exactly is rejected with the reason.
    """
    from ..convert.interop import import_adapter

    report = import_adapter(folder, out, model, overwrite, trust_remote_code)
    replaced = ", ".join(report["replaced"])
    in_full = f" · stored in full: {replaced}" if replaced else ""
    ranks = ", ".join(map(str, report["ranks"]))
    lines = [
        f"pack    {report['out']} ({report['pack_mb']:.2f} MB) from {report['from']}: "
        f"{', '.join(report['kinds'])} of rank {ranks} on {report['modules']} modules of "
        f"{report['base']}{in_full}"
    ]
    print_report(report, lines)
