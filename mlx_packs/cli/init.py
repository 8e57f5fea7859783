"""`packs init`: a recipe for a model, examples and a machine."""

import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml

from ..config.fields import facts_of
from ..config.recipe import Recipe, models_for
from ..display import size
from ..errors import PackError
from ..files import atomic_write
from . import options
from .options import option
from .output import print_report
from .plan import limit_of, planned
from .recipe import recipe_of

if TYPE_CHECKING:
    from ..memory.recommend import PlanOption

_RUN = {"epochs": 3, "patience": 3}  # the length that docs/choose.md advises
_NAMES = ("rank", "batch_size", "max_seq_length", "recompute", "learning_rate")


@click.command()
@option("--model", metavar="MODEL", help="Base model, as for packs train.", default_text="asked")
@option("--data", metavar="DATA", help="Training data, as for packs train.", default_text="asked")
@option(
    "--memory",
    metavar="SIZE",
    help="Memory of the Mac that trains (16GB).",
    default_text="this machine's",
)
@option("--out", metavar="FILE", default="recipe.yaml", help="Recipe to write.")
@options.overwrite
@options.as_json
def init(
    model: str | None, data: str | None, memory: str | None, out: str, overwrite: bool
) -> None:
    """Write a recipe that fits a machine, with a comment for each setting.

    Asks for the model and the data if a terminal is there and the flags are not. The settings
    are from packs plan; packs train -c FILE trains by them.
    """
    from ..runtime import host_memory

    path = options.writable_file(out, "--out")
    if path.exists() and not overwrite:
        raise PackError(f"--out {out}: exists. Choose another file or pass --overwrite.", "exists")

    suggested = models_for(host_memory())
    model = model or _answer("--model", f"Model ({', '.join(suggested)} fit here)", suggested[-1])
    data = data or _answer("--data", "Folder or file with your examples", None)
    recipe, lines = _fitting({"model": model, "data": data, **_RUN}, memory)

    settings = {"model": model, "data": data, "out": f"packs/{Path(data).stem}"}
    chosen = {**vars(recipe.train), **vars(recipe.lora)}
    settings |= {name: chosen[name] for name in _NAMES} | _RUN
    atomic_write(path, "".join(_recipe(settings, path)))
    print_report(
        {"recipe": str(path), "settings": settings},
        [*lines, f"wrote   {path}", f"try:    packs train -c {path}"],
    )


def _fitting(
    flags: Mapping[str, Any], memory: str | None
) -> "tuple[Recipe | PlanOption, list[str]]":
    """Return the settings that fit into a memory, and lines about them; defaults without a plan."""
    device = "gpu" if memory else None
    limit, notes = limit_of(memory, None, device)
    try:
        plan = planned(None, flags, limit, device=device)
    except PackError as error:
        if error.code != "unsupported":
            raise
        return recipe_of(flags), [f"plan    {error.message}"]

    if not plan.fits:
        raise PackError(f"--model {flags['model']}: cannot be trained in {size(limit)}.", "memory")
    return plan.best, [*notes, *plan.lines()[:-1]]


def _answer(flag: str, question: str, default: str | None) -> str:
    """Ask for an option in a terminal; a PackError where nobody can answer."""
    if not sys.stdin.isatty():
        raise PackError(f"{flag}: is required, since nobody can be asked here.")
    return click.prompt(question, default, err=True)


def _recipe(settings: Mapping[str, Any], path: Path) -> Iterator[str]:
    """Yield the parts of a recipe: each setting below what it is."""
    yield f"# packs train -c {path}\n"
    for name, value in settings.items():
        meaning = textwrap.fill(facts_of(options.SETTINGS[name]).help, 96)
        yield "\n" + textwrap.indent(meaning, "# ") + "\n"
        yield yaml.safe_dump({name: value}, allow_unicode=True)
