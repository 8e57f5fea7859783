"""`packs quantize`: a quantized copy of a checkpoint."""

from typing import TYPE_CHECKING

import click

from ..config.choices import WEIGHT_MODES
from ..display import Display, size
from ..errors import PackError
from . import options
from .inspect import bits_line
from .options import option
from .output import print_report

if TYPE_CHECKING:
    from ..bases.quantization import QuantizeOptions


@click.command()
@options.setting(
    "model", required=True, help="Checkpoint to quantize: a folder or a Hugging Face id."
)
@options.out("Folder to write the quantized checkpoint to.")
@option(
    "--mode", type=click.Choice(tuple(WEIGHT_MODES)), default="nf4", help="Kind of quantization."
)
@options.setting("double_quant", "double-quant")
@option(
    "--bits",
    type=int,
    help="With --mode affine: bits per weight (2, 3, 4, 5, 6 or 8).",
    default_text="4",
)
@option(
    "--group-size",
    type=int,
    help="Number of weights that share a scale: 32, 64 or 128; with --mode nf4 also 256.",
    default_text="64",
)
@option("--block", type=int, help="Same as --group-size, with --mode nf4.")
@options.setting("keep")
@option(
    "--bits-for",
    multiple=True,
    metavar="REGEX=BITS",
    help="Quantize the modules whose path matches REGEX in affine mode with BITS bits. Repeatable.",
)
@option(
    "--format",
    type=click.Choice(["mlx", "bitsandbytes"]),
    default="mlx",
    help="Format of the files: mlx, or bitsandbytes for transformers.",
)
@options.max_shard_gb
@options.overwrite
@options.trust_remote_code
@options.as_json
def quantize(model: str, out: str, overwrite: bool, trust_remote_code: bool, **settings) -> None:
    """Write a 4-bit (or 2- to 8-bit) copy of a checkpoint.

    Tensors are quantized one by one, so the model may be larger than memory. After an interruption
    the same command continues.
    """
    from ..bases.writer import quantize

    how = _options(**settings)
    report = quantize(model, out, how, overwrite, trust_remote_code, Display())
    print_report(report, _lines(report))


def _options(
    mode: str,
    bits: int | None,
    group_size: int | None,
    block: int | None,
    double_quant: bool | None,
    **others,
) -> "QuantizeOptions":
    from ..bases.quantization import QuantizeOptions
    from ..bases.weight_formats import specified_format

    if block is not None and mode != "nf4":
        raise PackError(f"--block: does not apply to --mode {mode}.", "conflict")
    if None not in (block, group_size) and block != group_size:
        text = f"is another name of --group-size, which is {group_size}. Give one of them."
        raise PackError(f"--block {block}: {text}", "conflict")

    size = group_size if block is None else block
    weight_format = specified_format(mode, bits=bits, group_size=size, double_quant=double_quant)

    return QuantizeOptions(
        weight_format,
        options.names(others["keep"]),
        tuple(_bits_for(text) for text in others["bits_for"]),
        others["format"],
        others["max_shard_gb"],
    )


def _bits_for(text: str) -> tuple[str, int]:
    expression, _, bits = text.rpartition("=")
    if not expression or not bits.isdecimal():
        raise PackError(f"--bits-for {text}: must be REGEX=BITS, as in 'down_proj=8'.")
    return expression, int(bits)


def _lines(report: dict) -> list[str]:
    finished = report["shards_found"]
    earlier = ""
    if finished:
        earlier = f", {finished} of them already there"
    return [
        f"wrote   {report['out']} ({size(report['gb'] * 1e9)}, "
        f"{report['shards']} shard(s){earlier})",
        bits_line(report),
        *_dense_lines(report["left_dense"]),
        f"took    {report['seconds']:.1f} s · process peak {report['process_peak_gb']:.2f} GB",
    ]


def _dense_lines(reasons: dict[str, str]) -> list[str]:
    """Return a line for each reason, with the first modules that it holds for."""
    lines = []
    for reason in dict.fromkeys(reasons.values()):
        paths = [path for path, why in reasons.items() if why == reason]
        shown = ", ".join(paths[:3])
        if len(paths) > 3:
            shown += f" and {len(paths) - 3} more"
        lines.append(f"dense   {shown} ({reason})")
    return lines
