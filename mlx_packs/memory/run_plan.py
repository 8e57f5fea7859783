"""The plan of a training run: whether it fits into memory, how long it takes, and its command."""

import dataclasses
import shlex
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..config.arguments import checked_arguments
from ..config.data import OF_EXAMPLES
from ..config.recipe import DATA_SETTINGS, Recipe, RunOptions, check_method, resolve_new
from ..data.in_memory import Data, InMemoryRows, columns_of
from ..display import hanging, size
from ..errors import PackError, flag_of
from ..report.text import TextReport
from ..runtime import assumed_device, metal_share, on_cpu, total_memory
from .pipeline import plan_machines
from .plan_text import answer
from .read import read_headers
from .recommend import REDUCED, PlanOption, recommend, smallest_change
from .row_shapes import RowShapes, row_shapes

_HAS_CODE = (
    "code    the base includes code ({}), which was not run. Read it; training needs "
    "--trust-remote-code."
)


@dataclass(frozen=True, repr=False)
class RunPlan(TextReport):
    """The memory and time of a training run, and whether it fits.

    Attributes:
        fits: Whether a way of training fits into the memory.
        peak_gb: Estimated peak of the best way, in GB of 10^9 bytes.
        command: The ``packs train`` command of the best way.
        report: All ways, as ``packs plan --json`` prints them.
    """

    fits: bool
    best: PlanOption
    report: dict[str, Any]
    text: Sequence[str]

    @property
    def peak_gb(self) -> float:
        return self.best.plan.peak_bytes / 1e9

    @property
    def command(self) -> str:
        return self.report["options"][0]["command"]

    def lines(self) -> list[str]:
        return list(self.text)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a mapping."""
        return self.report


@checked_arguments
def plan(
    model: str | Path,
    data: Data | None = None,
    *,
    memory: float | None = None,
    device: str | None = None,
    **settings: Any,
) -> RunPlan:
    """Estimate the memory and time of a training run, as ``packs plan`` does.

    Only config.json and the headers of tensors are read. ``print(plan)`` says whether it fits.

    Args:
        model: A name as in `load_base`.
        data: As of `train_pack`, to count the tokens of its examples; None plans for examples of
            full length.
        memory: Memory of the machine in GB; None is this machine's. On a Mac, MLX uses two thirds
            or three quarters of it.
        device: ``"cpu"`` or ``"gpu"``; None is this machine's.
        settings: Settings of the run by name, as of `train`. They are kept; batch size, activation
            checkpointing, sequence length and rank are reduced if they are not given.

    Raises:
        PackError: If the model cannot be planned, or a setting is wrong.
    """
    if device not in (None, "cpu", "gpu"):
        raise PackError(f"device: must be 'cpu' or 'gpu', but is {device!r}.", "unknown", "device")
    if device is not None and memory is None:
        raise PackError("device: needs the memory of that machine.", "conflict", "device")

    recipe = resolve_new({**settings, "model": str(model)})
    check_method(recipe)
    if data is not None:
        columns = columns_of(data, recipe.data)
        specified = recipe.specified | {"data"}
        recipe = dataclasses.replace(recipe, data=columns, specified=specified, names_data=True)

    limit = total_memory()
    if memory is not None:
        with assumed_device(device):
            # Macs are sold by GiB
            limit = int(memory * 1e9) if on_cpu() else metal_share(int(memory * 2**30))
    arguments = example_arguments(recipe, recipe.specified)
    style = Style(resolve_new({"model": str(model)}), arguments)
    return plan_run(recipe, limit, style, device)


@dataclass(frozen=True)
class Style:
    """How a plan writes its lines and commands.

    Attributes:
        defaults: Settings that commands leave out, since the run has them anyway.
        arguments: The end of each command.
        configs: Recipe files that commands name; their settings are left out, too.
        width: Most columns of a line.
        verbose: Whether to show the other ways and the parts of the peak.
    """

    defaults: Recipe
    arguments: Sequence[str] = ()
    configs: Sequence[str] = ()
    width: int = 100
    verbose: bool = False


def example_arguments(recipe: Recipe, named: Container[str]) -> list[str]:
    """Return the arguments of examples and seeds for a command, unless it needs none.

    Only settings that are ``named`` are arguments: files have the others.
    """
    arguments = []
    if "data" in named:
        in_memory = isinstance(recipe.data.data, InMemoryRows)
        arguments = ["--data", "DATA" if in_memory else str(recipe.data.data)]
    elif recipe.model != RunOptions.model and not recipe.specified & {*DATA_SETTINGS, "phases"}:
        arguments = ["--data", "DATA"]
    for name in recipe.data.changed(OF_EXAMPLES):
        if name in named:
            arguments += [flag_of(name), str(getattr(recipe.data, name))]

    if seeds := recipe.run.get("seeds"):
        arguments += ["--seeds", str(seeds), "--out", "DIR"]
    return arguments


def plan_run(
    recipe: Recipe,
    limit: int,
    style: Style,
    device: str | None = None,
    machines: int | None = None,
) -> RunPlan:
    """Return the plan of a recipe within ``limit`` bytes.

    ``machines`` adds the simplest way that fits on that many.
    """
    configs = style.configs
    defaults = style.defaults
    model = recipe.model
    headers = read_headers(model)
    names = recipe.specified
    rows = None
    needed = None
    with assumed_device(device):
        if names & DATA_SETTINGS:
            rows = row_shapes(str(model), recipe.data, recipe.train, recipe.lora)
        headers = dataclasses.replace(headers, image_tokens=rows and rows.image_tokens)
        shapes = (rows and rows.shapes_of, rows and rows.epoch_of)
        plan_with = partial(recommend, headers, limit, recipe.lora, recipe.train)
        choices = plan_with(names, *shapes)
        least = smallest_change(choices)
        if least.fit == "no" and names & set(REDUCED):
            least = smallest_change(plan_with(names - set(REDUCED), *shapes))

        def facts(choice: PlanOption) -> dict:
            command = choice.command(model, configs, defaults)
            return {
                **choice.to_json(),
                "compute_dtype": choice.dtype(headers.config).to_json(),
                "code": headers.code,
                "command": shlex.join([*shlex.split(command), *style.arguments]),
            }

        report = {
            "model": model,
            "options": [facts(choice) for choice in choices],
            "smallest_change": facts(least),
        }
        lines = answer(choices, headers, limit, configs, defaults, style.width, style.verbose)
        if least.fit != "no" and choices[0].fit == "no":
            changes = " ".join(f"{flag_of(k)} {value}" for k, value in least.changes.items())
            lines.insert(-1, f"fits    with {changes}: {size(least.plan.peak_bytes)}")
        if machines is not None:
            needed = plan_machines(headers, limit, recipe.lora, recipe.train, machines)

    if needed is not None:
        for each in report["options"]:
            each["machines"] = needed.to_json()
        lines[-1:-1] = hanging(needed.line(), style.width).split("\n")
    if headers.code is not None:
        lines.insert(1, _HAS_CODE.format(headers.code))
    if style.arguments and lines[-1].startswith("try:    packs"):
        lines[-1] = f"{lines[-1]} {shlex.join(style.arguments)}"
    if names & DATA_SETTINGS:
        lines[1:1] = _data_lines(recipe.data.data, rows, choices[0])

    fits = any(choice.fit != "no" for choice in choices)
    fits = fits or (needed is not None and needed.needed != "none")
    return RunPlan(fits, choices[0], {**report, "fits": fits}, lines)


def _data_lines(
    data: str | None,
    rows: RowShapes | None,
    best: PlanOption,
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
