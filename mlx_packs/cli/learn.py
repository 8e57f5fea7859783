"""`packs learn`: train a pack on the rated answers of `packs serve --learn`."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..display import NORMAL, QUIET, Display
from ..errors import PackError, RunStopped, flag_of
from . import options
from .options import option
from .output import print_report
from .topics import TopicCommand

if TYPE_CHECKING:
    from ..learning.folder import LearningFolder

_TASKS = ("auto", "kto", "dpo", "lm")
_SETTINGS = (
    *("epochs", "iters", "learning_rate", "batch_size", "max_seq_length"),
    *("rank", "beta", "seed", "offload_base", "awake"),
)
_DEFAULTS = {"epochs": "3", "iters": None, "rank": "16; a version that is continued keeps its rank"}


@click.command(
    cls=TopicCommand, common="task model data epochs learning_rate lists use json".split()
)
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@option(
    "--task",
    section="Model and data",
    default=_TASKS[0],
    type=click.Choice(_TASKS),
    help="Rows to train on: rated answers (kto), corrections and what they correct (dpo), "
    "or corrections and answers that were rated up (lm). auto takes the task with the most rows, "
    "if they are enough.",
)
@options.setting("model", "the base model of the server", default=None)
@option(
    "--data",
    section="Model and data",
    metavar="DIR",
    help="Examples that no rater wrote, such as the data of the pack: a candidate that is worse on "
    "their validation split by more than two standard errors is not served.",
)
@options.add(
    *(
        options.setting(name, _DEFAULTS.get(name, options.shown_default(name, *_TASKS[1:])))
        for name in _SETTINGS
    )
)
@option("--list", "lists", is_flag=True, help="List the versions with their figures, and exit.")
@option(
    "--use",
    type=int,
    help="Serve version N from now on, and exit; 0 is the pack or base model that it started from.",
)
@options.execution
@option("-q", "--quiet", is_flag=True, help="Print the result only.")
def learn(
    folder: Path,
    task: str,
    model: str | None,
    data: str | None,
    lists: bool,
    use: int | None,
    trust_remote_code: bool,
    quiet: bool,
    **flags,
) -> None:
    """Train a pack on the rated answers that `packs serve --learn DIR` keeps.

    A candidate continues the version that is served. Both are compared on held-out rows, a fifth of
    all prompts. The candidate becomes the next version, and is served, if it is better by more than
    two paired standard errors; otherwise nothing changes. A running server follows within two
    seconds. After an interruption the same command continues.
    """
    from ..learning.folder import LearningFolder
    from ..learning.learn import learn as learn_from
    from ..learning.learn import serve_version

    settings = {name: value for name, value in flags.items() if value is not None}
    if trust_remote_code:
        settings["trust_remote_code"] = True
    every = {"list": lists or None, "use": use, "task": task, "model": model, "data": data}
    named = [name for name, value in (every | settings).items() if value not in (None, "auto")]
    if named[1:] and (lists or use is not None):
        text = f"{flag_of(named[0])}: trains nothing. Leave {flag_of(named[1])} out."
        raise PackError(text, "conflict")

    opened = LearningFolder.at(folder.expanduser())
    if use is not None:
        serve_version(opened, use)
        print_report({"version": use}, [f"version {use} is served from now on"])
        return
    if lists:
        _print_versions(opened)
        return

    display = Display(QUIET if quiet else NORMAL)
    try:
        result = learn_from(opened, task, settings, model, display, data)
    except RunStopped as stopped:
        command = click.get_current_context().command_path.split()
        command += options.arguments_without(())
        stopped.continue_with(shlex.join(command))
        raise
    print_report(result.to_json(), result.lines())


def _print_versions(folder: "LearningFolder") -> None:
    current = folder.current
    versions = folder.versions()
    lines = []

    for number, figures in versions.items():
        mark = "*" if number == current else " "
        lines.append(f"{mark} {number:<4} {_figures_line(figures)}")

    print_report(folder.to_json(), lines)


def _figures_line(figures: Mapping) -> str:
    if not figures:
        return "the original"
    return (
        f"{figures['date']} · {figures['task']}, {figures['rows']} rows · continues "
        f"{figures['continues']} · {figures['measure']} {figures['gain']:+.4f} ± "
        f"{figures['error']:.4f} on {figures['held_out']} held-out prompts"
    )
