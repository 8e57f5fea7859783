"""`packs report`: the page of a run, a pack or a sweep."""

from pathlib import Path

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
    help="File to write.  [default: report.html in the run folder; <pack>-report.html without one; "
    "leaderboard.html in the folder of a sweep]",
)
@options.as_json
def report(run_or_pack: str, out: str | None) -> None:
    """Write a page about a run, a pack or a sweep.

    RUN_OR_PACK is a run folder, a pack's folder, the Hub id of a pulled pack, or the folder of a
    sweep. The page is one self-contained HTML file with the loss curve, results, samples, the mask
    view, changes by layer, memory and recipe. The page of a sweep has its leaderboard. The
    page of an unfinished run shows the available parts. No model is loaded.
    """
    from ..sweeps import leaderboard
    from ..training.run_page import write_page

    folder = Path(run_or_pack).expanduser()
    if (folder / leaderboard.FILE).is_file():
        file = leaderboard.write_page(folder, out)
    else:
        file = write_page(run_or_pack, out)
    print_report({"page": str(file), "bytes": file.stat().st_size}, [f"page    {file}"])
