"""`packs sweep`: many runs of one recipe with other values of some settings."""

from pathlib import Path

import click

from .. import signals
from ..config.choices import SWEEP_RUNNERS
from ..config.external import translate
from ..config.parse import read_settings
from ..display import NORMAL, QUIET, Display
from ..errors import Interrupted, PackError
from . import options
from .options import option
from .output import exit_if_failed, print_report
from .recipe import RecipeFiles, recipe_of


@click.command()
@option(
    "-c",
    "--config",
    "file",
    section="Model and data",
    metavar="FILE",
    required=True,
    help="YAML or JSON file: a recipe of packs train with a section sweep.",
)
@option(
    "--out",
    metavar="DIR",
    help="Folder for the trials and the leaderboard.",
    default_text="out of the file, else sweeps/<FILE>",
)
@option(
    "--runner",
    type=click.Choice(SWEEP_RUNNERS),
    default=SWEEP_RUNNERS[0],
    help="Train the trials one after the other on this machine (local), or by Ray Tune on the Ray "
    "cluster of RAY_ADDRESS, else on this machine (ray).",
)
@options.as_json
@option("-q", "--quiet", is_flag=True, help="Print the leaderboard only.")
def sweep(file: str, out: str | None, runner: str, quiet: bool) -> None:
    """Train a recipe with several settings, and compare the packs.

    The section sweep of FILE names the search (grid, random or halving) and the values by key of the
    recipe. Every trial is checked before the first one starts. Each is trained in a process of its
    own; after an interruption the same command continues. The leaderboard is printed and written as
    CSV, JSON and HTML. The best pack is the one with the best held-out metric of those that pass the
    recipe's gates; if none does, the exit code is 1.
    """
    from ..files import exclusive_writer, make_folder
    from ..sweeps import runners
    from ..sweeps.leaderboard import best_of, ranked, text_table, to_json_rows, write_leaderboard
    from ..sweeps.sweep import SECTION, begin, plan_sweep

    read = read_settings(file)
    if SECTION not in read:
        raise PackError(f"{file}: {SECTION}: is missing. Name the parameters there.", flag=SECTION)
    settings = translate({k: v for k, v in read.items() if k != SECTION}, file)
    out = out or settings.pop("out", None) or settings.pop("adapter_path", None)
    folder = Path(out or Path("sweeps") / Path(file).stem).expanduser()
    display = Display(QUIET if quiet else NORMAL)
    planned = plan_sweep(
        {**settings, SECTION: read[SECTION]},
        file,
        folder,
        lambda own: recipe_of({}, RecipeFiles(((file, own),))),
    )
    runners.check_runner(runner)
    make_folder(folder.parent)
    with exclusive_writer(folder):
        continues = begin(planned)
        config = planned.config
        over = sum(trial.result(0) is not None for trial in planned.trials)
        text = f"{config.search} · {len(planned.trials)} trials · {folder}"
        display.line("sweep", text + (f" · continues, {over} have results" if continues else ""))
        try:
            runners.RUNNERS[runner](planned, display)
        except (KeyboardInterrupt, Interrupted) as error:
            number = getattr(error, "exit_code", 128 + signals.number_of(error)) - 128
            raise Interrupted(
                "interrupted. The same command continues the sweep.", number
            ) from error
        page = write_leaderboard(planned)
    rows = ranked(planned)
    best = best_of(rows)
    lines = [*text_table(planned), f"page    {page}"]
    if best is not None:
        lines.append(f"best    {best.trial.pack}")
    print_report(to_json_rows(planned), lines)
    if best is None:
        errors = [row.status for row in rows if row.result.error]
        all_failed = rows and len(errors) == len(rows)
        why = f"every trial failed ({errors[0]})" if all_failed else "no trial passes the gates"
        exit_if_failed([f"{folder}: {why}; the logs are trials/*/train.log"])
