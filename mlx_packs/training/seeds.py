"""One recipe with several seeds: a pack for each, trained in one batch, and the mean of them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config.schema import TrainConfig
from ..config.together import SETTINGS, check_together
from ..display import QUIET, Display
from ..errors import PackError
from ..files import atomic_write, to_json
from ..gates import failures
from ..report.facts import number
from ..tasks.task import task_class
from .result import TrainRun
from .settings import Request
from .together import train_together

SUMMARY = "seeds.json"  # beside the packs


@dataclass(frozen=True)
class Seeds:
    """What became of the packs of several seeds, by the seed."""

    folder: Path
    runs: Mapping[int, TrainRun]

    def failures(self) -> list[str]:
        lines = []
        for seed, run in self.runs.items():
            lines += failures(run.report["gates"], f"seed-{seed}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return the report of each pack, and mean and standard error of every number in them."""
        reports = [run.report for run in self.runs.values()]
        return {
            "folder": str(self.folder),
            "seeds": list(self.runs),
            **statistics(reports),
            "packs": reports,
        }


def train_seeds(request: Request) -> Seeds:
    """Train a pack for each of ``seeds`` seeds, from that of the recipe on.

    Each is a pack of its own in ``out``: ``seed-0``, and its run ``seed-0-run``. The first shows
    its progress. Errors are as of `train_together`.
    """
    recipe = request.recipe
    check_together(recipe)
    if request.option("out") is None:
        raise PackError(
            "--seeds: needs a folder for the packs. Name it with --out DIR.", "conflict", "out"
        )

    folder = Path(request.option("out")).expanduser()
    if (folder / "pack.json").exists():
        raise PackError(
            f"--out {folder}: is a pack, and --seeds writes a folder of packs. Choose another "
            "path.",
            "exists",
            "out",
        )

    first = recipe.train.seed
    seeds = range(first, first + request.option("seeds"))
    request.display.line(
        "seeds",
        f"{len(seeds)} packs in one batch, {folder}/seed-{seeds[0]} to seed-{seeds[-1]}; what "
        f"follows is of seed-{first}",
    )

    runs = train_together([_of_seed(request, folder, seed) for seed in seeds])
    result = Seeds(folder, dict(zip(seeds, runs, strict=True)))
    atomic_write(folder / SUMMARY, to_json(result.to_json()))
    return result


def _of_seed(request: Request, folder: Path, seed: int) -> Request:
    recipe = request.recipe
    options = {name: value for name, value in recipe.run.items() if name != "seeds"}
    options["out"] = str(folder / f"seed-{seed}")
    train = replace(recipe.train, seed=seed, **SETTINGS)

    display = request.display
    if seed != recipe.train.seed:
        display = Display(QUIET)
    return replace(request, recipe=replace(recipe, train=train, run=options), display=display)


def statistics(reports: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return ``mean`` and ``standard_error`` of every number that all reports have, by its name.

    Names of numbers in other mappings are joined by dots. The standard error is that of the mean
    of independent runs: the sample standard deviation by the root of their number.
    """
    numbers = [dict(_numbers(report)) for report in reports]
    names = [name for name in numbers[0] if all(name in each for each in numbers)]

    means = {}
    errors = {}
    for name in names:
        values = [each[name] for each in numbers]
        mean = sum(values) / len(values)
        squares = sum((value - mean) ** 2 for value in values)

        means[name] = mean
        errors[name] = math.sqrt(squares / (len(values) - 1) / len(values))
    return {"mean": means, "standard_error": errors}


def _numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.")
        elif (known := number(value)) is not None:
            yield prefix + name, known


def report_lines(result: Seeds) -> list[str]:
    """Return the results of seeds for people: their mean, a line for each pack, and the files."""
    values = result.to_json()
    mean = values["mean"]
    errors = values["standard_error"]

    changes = []
    for name in mean:
        before = name.replace("_after", "_before")
        if name.endswith("_after") and before in mean:
            error = errors[name]
            changes.append(f"{name.removesuffix('_after')} {mean[before]:.4g} → {mean[name]:.4g}")
            changes[-1] += f" ± {error:.2g}"

    lines = [
        f"mean    {' · '.join(changes)} (± standard error of {len(result.runs)} seeds)",
        f"loss    {mean['first_loss']:.4g} → {mean['last_loss']:.4g} ± {errors['last_loss']:.2g}",
    ]

    for seed, run in result.runs.items():
        task = task_class(run.report["task"], TrainConfig())
        own = next(line for line in task.report_lines(run.report) if line.startswith("done"))

        lines.append(f"seed-{seed:<3}{own.removeprefix('done').lstrip()}")
    lines.append(f"packs   {result.folder} · every number: {result.folder / SUMMARY}")
    return lines
