"""One recipe with several seeds: a pack for each, trained one after another, and their mean."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..bases.files import TINY
from ..config.arguments import checked_arguments
from ..config.data import Columns
from ..config.lora import LoRAConfig
from ..config.recipe import RunOptions
from ..config.schema import TrainConfig
from ..data.in_memory import Data
from ..display import Display, display_of
from ..distributed.group import group
from ..errors import PackError
from ..files import atomic_write, to_json
from ..gates import failures
from ..packs.base import Base, load_base
from ..packs.pack import Pack
from ..report.facts import PAGE, unit_of
from ..report.seeds import statistics
from ..tasks.task import task_class
from .observer import Observer
from .result import TrainRun
from .run import train_request
from .run_folder import CONFIG, RunFolder, output_folders, seed_runs
from .run_page import SUMMARY, attempt, write_seeds_page
from .settings import Request, recipe_of


@dataclass(frozen=True, repr=False)
class SeedRuns:
    """The packs of several seeds, and the mean and standard error of every number.

    ``print(runs)`` shows the results as `packs train --seeds` does.

    Attributes:
        folder: Has the packs ``seed-0`` and so on, their run folders, ``seeds.json``, and
            ``report.html``.
        runs: The `TrainRun` of each pack, by its seed.
    """

    folder: Path
    runs: Mapping[int, TrainRun]

    @property
    def packs(self) -> list[Pack]:
        """The packs, the smallest seed first."""
        return [run.pack for run in self.runs.values()]

    @property
    def mean(self) -> dict[str, float]:
        """The mean over the seeds of every number that all reports have, by its name."""
        return self._statistics["mean"]

    @property
    def standard_error(self) -> dict[str, float]:
        """The standard error of each mean: the sample standard deviation by sqrt(seeds)."""
        return self._statistics["standard_error"]

    def __repr__(self) -> str:
        changes = _changes(self.mean, self.standard_error)
        return f"SeedRuns({', '.join([f'{len(self.runs)} seeds', *changes[:1]])}, {self.folder})"

    def __str__(self) -> str:
        return "\n".join(report_lines(self))

    def failures(self) -> list[str]:
        """Return a line for each gate that a pack has failed."""
        lines = []
        for seed, run in self.runs.items():
            lines += failures(run.report["gates"], f"seed-{seed}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return the report of each pack, and mean and standard error of every number in them."""
        reports = [run.report for run in self.runs.values()]
        places = {"folder": str(self.folder), "seeds": list(self.runs)}
        return {**places, **self._statistics, "packs": reports}

    @cached_property
    def _statistics(self) -> dict[str, dict[str, float]]:
        return statistics([run.report for run in self.runs.values()])


@dataclass(frozen=True)
class _Outdated(Observer):
    """Removes files of earlier seeds when the first run starts: one may be rejected before."""

    files: Sequence[Path]

    def on_phase_start(self, batches: int, done: int) -> None:
        for file in self.files:
            file.unlink(missing_ok=True)


@checked_arguments
def train_seeds(  # noqa: PLR0913 (the public face)
    base: Base | str | Path = TINY,
    data: Data | None = None,
    lora: LoRAConfig | Mapping[str, Any] | None = None,
    train: TrainConfig | Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    columns: Columns | None = None,
    *,
    seeds: int = 3,
    overwrite: bool = False,
    resume: bool = False,
    trust_remote_code: bool = False,
    force: bool = False,
    progress: bool | Display = True,
) -> SeedRuns:
    """Train packs with several seeds, one after another on one base, and save each.

    Each equals the pack of `train_pack` with its seed.

    Args:
        base: As of `train_pack`.
        data: As of `train_pack`.
        lora: As of `train_pack`.
        train: As of `train_pack`; its ``seed`` is the first of ``seeds`` successive ones.
        out: Folder for the packs, which are ``seed-0`` and so on. Required.
        columns: As of `train_pack`.
        seeds: Number of packs, from 2 to 64.
        overwrite: Whether to replace packs and runs in ``out``.
        resume: Whether to continue each run in ``out`` from its last checkpoint.
        trust_remote_code: As of `train_pack`.
        force: As of `train_pack`.
        progress: As of `train_pack`.

    Returns:
        The packs with their runs and reports, and the mean and standard error of every number.

    Raises:
        PackError: As of `train_pack`. If the loss of a pack is not finite, the others are trained
            and saved first.
        RunStopped: As of `train_pack`; the packs of earlier seeds are saved.
    """
    RunOptions(seeds=seeds)  # raises if that number is invalid
    recipe = recipe_of(
        *(base, data, lora, train, columns),
        out=out,
        seeds=seeds,
        overwrite=overwrite,
        resume=resume,
        trust_remote_code=trust_remote_code,
    )
    return train_with_seeds(Request(recipe, base, display_of(progress), force))


def train_with_seeds(request: Request) -> SeedRuns:
    """Train a pack for each of ``seeds`` seeds in the folder ``out``, as `train_seeds`."""
    recipe = request.recipe
    if group().size > 1:
        raise PackError(
            "--seeds: trains on one machine. Leave --hosts out, or train one pack at a time.",
            "conflict",
            "seeds",
        )
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
    requests = _requests_of_seeds(request, folder, seeds)
    for each in requests.values():  # before the first one is trained
        options = [each.option(name) for name in ("overwrite", "resume")]
        with output_folders(each.option("out"), recipe.data, *options):
            pass

    outdated = _Outdated([folder / SUMMARY, folder / PAGE])
    requests[first] = replace(requests[first], callbacks=(*request.callbacks, outdated))
    names = f"{folder}/seed-{seeds[0]} to seed-{seeds[-1]}"
    request.display.line("seeds", f"{len(seeds)} packs, {names}")
    try:
        runs = _train_in_turn(requests)
    except BaseException:
        if any((run / CONFIG).is_file() for run in seed_runs(folder)):
            _write_page(folder, request.display)
        raise

    result = SeedRuns(folder, runs)
    atomic_write(folder / SUMMARY, to_json(result.to_json()))
    _write_page(folder, request.display)
    return result


def _write_page(folder: Path, display: Display) -> None:
    if attempt(lambda: write_seeds_page(folder, folder / PAGE), folder / PAGE, display):
        display.line("page", str(folder / PAGE))


def _load_once() -> Callable[..., Base]:
    """Return `load_base` that gives all seeds the base of the first one."""
    loaded: dict[str, Base] = {}

    def load(*args: Any, **options: Any) -> Base:
        key = repr((args, options))
        if key not in loaded:
            loaded.clear()  # two of them may not fit into memory
            loaded[key] = load_base(*args, **options)
        return loaded[key]

    return load


def _requests_of_seeds(request: Request, folder: Path, seeds: Sequence[int]) -> dict[int, Request]:
    """Return the request of each seed; a run that has no checkpoint yet cannot be resumed."""
    recipe = request.recipe
    open_base = _load_once()
    outs = {seed: folder / f"seed-{seed}" for seed in seeds}
    has_begun = {seed: bool(RunFolder.of(out).checkpoints()) for seed, out in outs.items()}
    resumes = request.option("resume") and any(has_begun.values())

    requests = {}
    for seed, out in outs.items():
        run = {**recipe.run, "out": str(out)}
        del run["seeds"]
        if resumes:
            run |= {"resume": has_begun[seed], "overwrite": not has_begun[seed]}
        requests[seed] = replace(
            request,
            recipe=replace(recipe, train=replace(recipe.train, seed=seed), run=run),
            open_base=open_base,
        )
    return requests


def _train_in_turn(requests: Mapping[int, Request]) -> dict[int, TrainRun]:
    """Train the packs of all seeds; one that diverges is an error after the others are trained."""
    runs = {}
    failed: PackError | None = None
    for seed, request in requests.items():
        request.display.line("seed", str(seed))
        try:
            runs[seed] = train_request(request)
        except PackError as error:
            if error.code != "diverged":
                raise
            failed = failed or PackError(f"seed-{seed}: {error.message}", error.code, error.flag)
            request.display.line("note", failed.message)
    if failed is not None:
        raise failed
    return runs


def _changes(mean: Mapping[str, float], errors: Mapping[str, float]) -> list[str]:
    """Return the held-out numbers before and after training in words, with their errors."""
    changes = []
    for name in mean:
        before = name.replace("_after", "_before")
        if name.endswith("_after") and before in mean:
            change = f"{name.removesuffix('_after')} {mean[before]:.4g} → {mean[name]:.4g}"
            changes.append(f"{change} ± {errors[name]:.2g}")
    return changes


def report_lines(result: SeedRuns) -> list[str]:
    """Return the results of seeds for people: their mean, a line for each pack, and the files."""
    values = result.to_json()
    mean = values["mean"]
    errors = values["standard_error"]

    changes = _changes(mean, errors)
    unit = unit_of(mean)
    speed = f"{unit}_per_s"
    lines = [f"mean    {' · '.join(changes)} (± standard error of {len(result.runs)} seeds)"]
    if "last_loss" in mean:  # GRPO has none
        loss = f"{mean['first_loss']:.4g} → {mean['last_loss']:.4g} ± {errors['last_loss']:.2g}"
        lines.append(f"loss    {loss}")
    lines.append(
        f"speed   {mean[speed]:.4g} ± {errors[speed]:.2g} {unit.replace('tokens', 'tok')}/s of "
        f"each pack · peak {mean['peak_gb']:.2g} GB"
    )

    for seed, run in result.runs.items():
        task = task_class(run.report["task"], TrainConfig())
        done = next(line for line in task.report_lines(run.report) if line.startswith("done"))
        lines.append(f"seed-{seed:<3}{done.removeprefix('done').lstrip()}")
    lines.append(f"packs   {result.folder} · every number: {result.folder / SUMMARY}")
    return lines
