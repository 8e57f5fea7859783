"""`packs plan`: what fits into memory, and how long it takes."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..config.data import OF_EXAMPLES
from ..config.fields import facts_of
from ..config.recipe import Recipe
from ..display import hanging, size
from ..errors import PackError
from ..files import free_bytes
from . import options
from .options import option
from .output import exit_if_failed, print_report, text_table
from .recipe import Files, read_recipes, recipe_of
from .topics import TopicCommand

if TYPE_CHECKING:
    from ..memory.run_plan import RunPlan

_SEARCHED = {
    "batch_size": "{}, less if necessary",
    "max_seq_length": "{}, less if necessary",
    "rank": "{}, less if necessary",
    "recompute": "{}, block if necessary",
    "matmul_path": "all",
    "quantize": "none, nf4 and affine4",
}
_SETTINGS = [
    name
    for name, field in options.SETTINGS.items()
    if facts_of(field).memory or facts_of(field).disk or facts_of(field).time
] + list(OF_EXAMPLES)


def _default_text(name: str, *task: str) -> str:
    return _SEARCHED.get(name, "{}").format(options.shown_default(name, *task) or "")


def limit_of(memory: str | None, budget: str | None, device: str | None) -> tuple[int, list[str]]:
    """Return the bytes that a run may have, and a line if that is a share of a Mac's."""
    from ..runtime import assumed_device, metal_share, on_cpu, total_memory

    if memory is not None and budget is not None:
        raise PackError("--budget: cannot be combined with --memory. Pass one of them.", "conflict")
    if budget is not None:
        return options.size_of("--budget", budget), []
    if memory is None:
        return total_memory(), []

    total = options.size_of("--memory", memory)
    with assumed_device(device):
        if on_cpu():
            return total, []
    sold = total
    if not memory.lower().endswith("ib"):  # Macs are sold by GiB
        sold = int(total * 2**30 / 1e9)
    usable = metal_share(sold)
    note = f"the share that Metal recommends of a Mac with {memory.strip()}"
    return usable, [f"memory  {size(usable)}: {note}"]


_memory = partial(option, section="Memory and speed")


@click.command(
    cls=TopicCommand,
    common="memory budget device machines configs model data verbose json".split(),
    by_task=True,
)
@_memory(
    "--memory",
    metavar="SIZE",
    help="Memory of the machine (24, 24GB). On a Mac, MLX uses what Metal recommends: two thirds "
    "if it is less than 36 GB, otherwise three quarters.",
    default_text="this machine's",
)
@_memory(
    "--budget",
    metavar="SIZE",
    help="Memory that the run itself must fit into (18GB), in place of --memory.",
)
@_memory(
    "--device",
    type=click.Choice(["cpu", "gpu"]),
    help="Device to plan for; needs --memory or --budget.",
    default_text="this machine's",
)
@options.setting(
    "data",
    "not counted",
    help="Estimate with the lengths of these training examples: a folder, a file, or 'tiny' "
    "(bundled).",
)
@_memory(
    "--machines",
    type=click.IntRange(min=1),
    help="Also show the simplest way that fits on N such machines with these settings: one "
    "machine, data-parallel training, a pipeline, which splits the base, or none.",
    default_text="not counted",
)
@options.recipes
@options.setting(
    "model",
    _default_text("model"),
    multiple=True,
    help=f"{facts_of(options.SETTINGS['model']).help} Several are compared in a table.",
)
@options.add(*(options.setting(name, partial(_default_text, name)) for name in _SETTINGS))
@option("-v", "--verbose", is_flag=True, help="Also show other ways, and the parts of the peak.")
@options.as_json
def plan(
    memory: str | None,
    budget: str | None,
    device: str | None,
    machines: int | None,
    configs: tuple[str, ...],
    model: tuple[str, ...],
    verbose: bool,
    **flags,
) -> None:
    """Estimate memory, time and disk space, and suggest a training command.

    Only config.json and tensor headers are read, also of a model on the Hub. Options of
    `packs train` that change memory, time or disk space, such as --rank, are accepted and kept.
    Of the others, batch size, activation checkpointing, sequence length and rank are reduced, in
    this order, until the run fits; the exit code is 1 if none does. The last line is its command.
    Several --model give a table with the best plan of each.
    """
    if device is not None and memory is None and budget is None:
        raise PackError(
            f"--device {device}: needs the memory of that machine. Add --memory GB.", "conflict"
        )
    if machines is not None and len(model) > 1:
        raise PackError("--machines: takes one --model. Leave out the others.", "conflict")

    flags = {k: v for k, v in flags.items() if v is not None}
    files = read_recipes(configs)
    limit, notes = limit_of(memory, budget, device)
    settings = {"flags": flags, "files": files, "configs": configs}
    settings |= {"device": device, "machines": machines, "verbose": verbose}
    plan_model = partial(planned, **settings, limit=limit)
    here = _machine(recipe_of(flags, files))
    if memory is None and budget is None:
        notes = _machine_lines(here)

    if len(models := tuple(dict.fromkeys(model))) > 1:
        _print_table(plan_model, models, limit, here, notes)
        return

    chosen = plan_model(models[0] if models else None)
    lines = chosen.lines()
    before = next(i for i, line in enumerate(lines) if line.startswith("fits "))
    lines[before:before] = notes
    print_report({**chosen.report, "machine": here}, lines)
    if not chosen.fits:
        exit_if_failed([f"{chosen.report['model']}: no way of training it fits into {size(limit)}"])


def _print_table(
    plan_model: Callable, models: Sequence[str], limit: int, here: dict, notes: list[str]
) -> None:
    """Print the best plan of each model; what keeps one from being planned is a line below."""
    reports = []
    rows = []
    unknown = {}
    errors = []
    for name in models:
        try:
            planned = plan_model(name)
        except PackError as error:
            errors.append(error)
            reports.append({"model": name, "fits": False, "options": [], **error.to_json()})
            continue

        reports.append(planned.report)
        best = planned.best
        kind, path, _, batch, _, peak, fit = best.cells
        rows.append([name.rpartition("/")[2], kind, path, batch, peak, best.run.text(), fit])
        if best.run.low is None:
            unknown[best.run.line()] = None

    if len(errors) == len(models) and len({error.message for error in errors}) == 1:
        raise errors[0]  # it is not about a model

    lines = [f"memory  {size(limit)}", *notes, ""]
    if rows:
        head = ["model", "method", "path", "batch", "peak", "run", "fits"]
        lines += text_table(head, rows, _width())
    lines += [f"run     {reason}" for reason in unknown]
    lines += [f"no plan {error.message}" for error in errors]

    print_report({"models": reports, "machine": here}, lines)
    if not any(report["fits"] for report in reports):
        exit_if_failed([f"none of the {len(models)} models can be trained in {size(limit)}"])


def _width() -> int:
    return min(100, shutil.get_terminal_size((100, 24)).columns)


def _machine(recipe: Recipe) -> dict:
    """Return this machine: its memory (on a Mac what Metal recommends), and what is free now."""
    from ..memory.pressure import free_memory
    from ..runtime import device_name, total_memory

    out = Path(recipe.run.get("out") or "packs").expanduser()
    free = {"free_memory_gb": free_memory(), "free_disk_gb": free_bytes(out)}
    return {
        "chip": device_name(),
        "memory_gb": total_memory() / 1e9,
        **{name: count if count is None else count / 1e9 for name, count in free.items()},
        "out": str(out),
    }


def _machine_lines(here: dict) -> list[str]:
    parts = [here["chip"]]
    if (free := here["free_memory_gb"]) is not None:
        parts.append(f"{size(1e9 * free)} of memory free now")
    if (free := here["free_disk_gb"]) is not None:
        parts.append(f"{size(1e9 * free)} of disk")
    return hanging(f"machine {' · '.join(parts)}", _width()).split("\n")


def planned(
    model: str | None,
    flags: Mapping,
    limit: int,
    files: Files = (),
    configs: Sequence[str] = (),
    device: str | None = None,
    machines: int | None = None,
    verbose: bool = False,
) -> "RunPlan":
    """Return the plan of a model; None is the one that the files name."""
    from ..memory.run_plan import Style, example_arguments, plan_run

    named = {} if model is None else {"model": model}
    recipe = recipe_of({**flags, **named}, files)
    unflagged = recipe_of({"model": recipe.model}, files)
    style = Style(unflagged, example_arguments(recipe, flags), configs, _width(), verbose)
    return plan_run(recipe, limit, style, device, machines)
