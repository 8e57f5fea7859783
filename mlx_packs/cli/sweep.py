"""`packs sweep`: many runs of one recipe with other values of some settings."""

from pathlib import Path

import click

from .. import signals
from ..config.choices import SEARCHES
from ..config.external import translate
from ..config.fields import read_settings
from ..display import NORMAL, QUIET, Display
from ..errors import Interrupted, PackError
from . import options
from .options import option
from .output import exit_if_failed, print_report
from .recipe import recipe_of


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
    "--search",
    section="Optimization",
    metavar=options.one_of(SEARCHES),
    help="How values are chosen: all combinations (grid) or at random (random).",
    default_text="search of the section sweep, else grid",
)
@options.as_json
@option("-q", "--quiet", is_flag=True, help="Print the leaderboard only.")
def sweep(file: str, out: str | None, search: str | None, quiet: bool) -> None:
    """Train a recipe with several settings, and compare the packs.

    The section sweep of FILE names the search (grid or random) and the values by key of the
    recipe. Every trial is checked before the first one starts. Each is trained in a process of its
    own; after an interruption the same command continues. The leaderboard is printed, and written
    as JSON. The best pack is the one with the best held-out metric among the packs that pass the
    recipe's gates; if none does, the exit code is 1.
    """
    from ..files import exclusive_writer, make_folder
    from ..sweeps.leaderboard import leaderboard, text_table
    from ..sweeps.plan import SECTION, plan_sweep
    from ..sweeps.sweep import begin, train_trials

    settings = read_settings(file)
    if SECTION not in settings:
        raise PackError(f"{file}: {SECTION}: is missing. Name the parameters there.", flag=SECTION)
    section = settings.pop(SECTION)
    if search is not None and isinstance(section, dict):
        section = {**section, "search": search}

    settings = translate(settings, file)
    out = out or settings.pop("out", None) or settings.pop("adapter_path", None)
    folder = Path(out or Path("sweeps") / Path(file).stem).expanduser()
    planned = plan_sweep(
        {**settings, SECTION: section},
        file,
        folder,
        lambda own: recipe_of({}, [(file, own)]),
    )

    display = Display(QUIET if quiet else NORMAL)
    make_folder(folder.parent)
    with exclusive_writer(folder):
        continues = begin(planned)
        text = f"{planned.config.search} · {len(planned.trials)} trials · {folder}"
        if continues:
            over = sum(trial.result is not None for trial in planned.trials)
            text += f" · continues, {over} have results"
        display.line("sweep", text)
        try:
            train_trials(planned, display)
        except (KeyboardInterrupt, Interrupted) as error:
            number = getattr(error, "exit_code", 128 + signals.number_of(error)) - 128
            raise Interrupted(
                "interrupted. The same command continues the sweep.", number
            ) from error

    content = leaderboard(planned)
    lines = [*text_table(content), f"table   {folder / 'leaderboard.json'}"]
    if content["best"] is not None:
        lines.append(f"best    {content['best']}")
    print_report(content, lines)
    if content["best"] is None:
        failed = [row["status"] for row in content["rows"] if row["pack"] is None]
        why = "no trial passes the gates"
        if failed and len(failed) == len(content["rows"]):
            why = f"every trial failed ({failed[0]})"
        exit_if_failed([f"{folder}: {why}; the logs are trials/*/train.log"])
