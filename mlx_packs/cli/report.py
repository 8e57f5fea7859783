"""`packs report`: the page of a run or a pack."""

import click

from . import options
from .options import option
from .output import print_report


@click.command()
@click.argument("run_or_pack", type=click.Path())
@option(
    "-o",
    "--out",
    metavar="FILE",
    help="File to write.  [default: report.html in the run folder; <pack>-report.html without one]",
)
@options.as_json
def report(run_or_pack: str, out: str | None) -> None:
    """Write a page about a run or a pack.

    RUN_OR_PACK is a run folder, a pack's folder, or the Hub id of a pulled pack. The page is one
    self-contained HTML file with the loss curve, results, samples, the mask view, changes by layer,
    memory and recipe. For an unfinished run, it shows what is available. No model is loaded.
    """
    from ..training.run_page import write_page

    file = write_page(run_or_pack, out)
    print_report({"page": str(file), "bytes": file.stat().st_size}, [f"page    {file}"])
