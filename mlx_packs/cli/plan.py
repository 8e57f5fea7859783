"""`packs plan`: what fits into memory."""

import dataclasses
import shlex
import shutil
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import click

from ..config.fields import facts_of
from ..config.recipe import DATA_SETTINGS, Recipe, RunOptions
from ..display import hanging, size
from ..errors import PackError
from . import options
from .options import option
from .output import exit_if_failed, print_report
from .recipe import read_recipes, recipe_of
from .topics import TopicCommand

if TYPE_CHECKING:
    from ..memory.headers import Headers
    from ..memory.recommend import PlanOption
    from ..memory.row_shapes import RowShapes

_SEARCHED = {
    "batch_size": "{}, less if necessary",
    "max_seq_length": "{}, less if necessary",
    "rank": "{}, less if necessary",
    "recompute": "{}, block if necessary",
    "matmul_path": "all",
    "quantize": "none, nf4 and affine4",
}
_HAS_CODE = (
    "code    the base includes code ({}), which was not run. Read it; training needs "
    "--trust-remote-code."
)
_SETTINGS = [
    name
    for name, field in options.SETTINGS.items()
    if facts_of(field).memory or facts_of(field).disk
]


def _default_text(name: str, *task: str) -> str:
    return _SEARCHED.get(name, "{}").format(options.shown_default(name, *task) or "")


def _limit(memory: str | None, budget: str | None, device: str | None) -> tuple[int, list[str]]:
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
    note = f"what Metal recommends to use of a Mac with {memory.strip()}"
    return usable, [f"memory  {size(usable)}: {note}"]


_memory = partial(option, section="Memory and speed")


@click.command(
    cls=TopicCommand, common="memory budget device machines configs model data json".split()
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
@options.setting("model", _default_text("model"))
@options.add(*(options.setting(name, partial(_default_text, name)) for name in _SETTINGS))
@options.as_json
def plan(
    memory: str | None,
    budget: str | None,
    device: str | None,
    machines: int | None,
    configs: tuple[str, ...],
    **flags,
) -> None:
    """Estimate memory and disk space, and suggest a training command.

    Only config.json and tensor headers are read, also of a model on the Hub. Options of
    `packs train` that change memory or disk space, such as --rank, are accepted and kept. Of the
    others, batch size, activation checkpointing, sequence length and rank are reduced, in this
    order, until the run fits; the exit code is 1 if none does. The last line is its command.
    """
    from ..memory.read import read_headers
    from ..memory.recommend import recommend, table
    from ..memory.row_shapes import row_shapes
    from ..runtime import assumed_device

    if device is not None and memory is None and budget is None:
        raise PackError(
            f"--device {device}: needs the memory of that machine. Add --memory GB.", "conflict"
        )

    flags = {k: v for k, v in flags.items() if v is not None}
    files = read_recipes(configs)
    recipe = recipe_of(flags, files)
    model = recipe.model
    unflagged = recipe_of({"model": model}, files)
    limit, shared = _limit(memory, budget, device)
    headers = read_headers(model)

    names = recipe.specified
    rows = needed = None
    data = _command_arguments(flags, recipe)
    with assumed_device(device):
        if names & DATA_SETTINGS:
            rows = row_shapes(str(model), recipe.data, recipe.train, recipe.lora)
        headers = dataclasses.replace(headers, image_tokens=rows and rows.image_tokens)
        known = recipe.lora, recipe.train, names, rows and rows.shapes_of
        choices = recommend(headers, limit, *known)

        report = []
        for choice in choices:
            command = shlex.join([*shlex.split(choice.command(model, configs, unflagged)), *data])
            report.append({**_facts(choice, headers), "command": command})

        width = min(100, shutil.get_terminal_size((100, 24)).columns)
        lines = table(choices, headers, limit, configs, unflagged, width)
        if machines is not None:
            needed = _add_machines(report, lines, headers, limit, recipe, machines, width)

    lines[1:1] = shared
    if headers.code is not None:
        lines.insert(1, _HAS_CODE.format(headers.code))
    if data and lines[-1].startswith("try:    packs"):
        lines[-1] = f"{lines[-1]} {shlex.join(data)}"
    if names & DATA_SETTINGS:
        lines[1:1] = _data_lines(recipe.data.data, rows, choices[0])

    fits = any(choice.fit != "no" for choice in choices) or needed not in (None, "none")
    print_report({"model": model, "fits": fits, "options": report}, lines)
    if not fits:
        exit_if_failed([f"{model}: no way of training it fits into {size(limit)}"])


def _add_machines(
    report: list[dict],
    lines: list[str],
    headers: "Headers",
    memory: int,
    recipe: Recipe,
    machines: int,
    width: int,
) -> str:
    """Add what a run needs of some machines; return it, ``none`` if it fits on no number."""
    from ..memory.pipeline import plan_machines

    needed = plan_machines(headers, memory, recipe.lora, recipe.train, machines)

    for each in report:
        each["machines"] = needed.to_json()
    lines[-1:-1] = hanging(needed.line(), width).split("\n")
    return needed.needed


def _command_arguments(flags: Mapping, recipe: Recipe) -> list[str]:
    """Return ``--data`` and ``--seeds`` for the suggested command, unless it needs none."""
    arguments = []
    if "data" in flags:
        arguments = ["--data", flags["data"]]
    elif recipe.model != RunOptions.model and not recipe.specified & {*DATA_SETTINGS, "phases"}:
        arguments = ["--data", "DATA"]

    if seeds := recipe.run.get("seeds"):
        arguments += ["--seeds", str(seeds), "--out", "DIR"]
    return arguments


def _facts(choice: "PlanOption", headers: "Headers") -> dict:
    return {
        **choice.to_json(),
        "compute_dtype": choice.dtype(headers.config).to_json(),
        "code": headers.code,
    }


def _data_lines(
    data: str | None,
    rows: "RowShapes | None",
    best: "PlanOption",
) -> list[str]:
    if rows is None:
        return [f"data    {data} · is not read: every example is planned at full length"]
    lines = [
        f"data    {data} · {rows.count:,} training examples",
        f"rows    at most {rows.longest:,} tokens · planned for {best.train.batch_size} x "
        f"{best.longest:,} tokens (longest batch of the data)",
    ]
    if rows.image_tokens:
        lines.append(
            f"images  {rows.image_tokens:,} tokens in all · their features count as activations"
        )
    return lines
