"""`packs export` and `packs import`: adapters of other tools."""

from pathlib import Path

import click

from ..config.choices import ADAPTER_FORMATS, DESTINATIONS
from ..errors import PackError
from . import options
from .options import option
from .output import print_report


@click.command()
@click.argument("pack", type=click.Path(path_type=Path))
@option(
    "--to",
    required=True,
    type=click.Choice((*ADAPTER_FORMATS, *DESTINATIONS)),
    help="Format of the adapter to write, or program that opens it.",
)
@option(
    "--out",
    metavar="DIR",
    help="Folder to write the adapter to.",
    default_text="needed; with --to lmstudio its folder of models",
)
@option(
    "--from",
    "start",
    metavar="NAME",
    help="Base model as the program calls it: a model or a .gguf file of Ollama, or for LM Studio "
    "the base model to merge into.",
    default_text="with lmstudio, the base that the pack names",
)
@options.as_json
def export(pack: Path, to: str, out: str | None, start: str | None) -> None:
    """Convert a pack for another tool.

    \b
    mlx-lm, peft  adapter folders, which packs import converts back bit-identically
    gguf          an adapter for llama.cpp (llama-server --lora) and a Modelfile
    ollama        the same, for a model of Ollama (--from)
    lmstudio      the merged model, where LM Studio looks for models
    swift         an adapter folder for mlx-swift-lm, and Swift code that opens it

    Every adapter is numerically verified against the pack, and a merged model is compared with it.
    """  # noqa: D301 - click keeps the lines after \b
    from ..convert.destinations import MODELS
    from ..convert.interop import export_pack

    if out is None and to != "lmstudio":
        raise PackError("--out: name the folder to write.", flag="out")

    report = export_pack(pack, to, out or MODELS / pack.resolve().name, start)
    proven = "numerically verified"
    if to == "lmstudio":
        proven = "measured against base and pack"
    lines = [
        f"wrote   {report['out']} ({report['mb']:.2f} MB): {report['modules']} modules for "
        f"{to}, {proven}"
    ]
    if report["for_merge"] != "none" and to != "lmstudio":
        lines.append(
            f"note    the pack was trained for packs merge --requantize {report['for_merge']}: "
            "other programs apply the adapter without that rounding"
        )

    label = "try     " if to in DESTINATIONS else "note    "
    print_report(report, lines + [f"{label}{note}" for note in report["notes"]])


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
    in_full = ""
    if report["replaced"]:
        in_full = f" · stored in full: {', '.join(report['replaced'])}"
    ranks = ", ".join(map(str, report["ranks"]))
    lines = [
        f"pack    {report['out']} ({report['pack_mb']:.2f} MB) from {report['from']}: "
        f"{', '.join(report['kinds'])} of rank {ranks} on {report['modules']} modules of "
        f"{report['base']}{in_full}"
    ]
    print_report(report, lines + [f"note    {note}" for note in report["notes"]])
