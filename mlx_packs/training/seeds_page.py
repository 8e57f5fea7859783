"""The page of a folder of several seeds: what the run folders have, collected and written."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import PackError
from ..files import atomic_write
from ..packs.facts import changes_of
from ..reading import read_json
from ..report.facts import PAGE, curve_of, name_alone, number, text, unit_of
from ..report.recipe import recipe_sections
from ..report.seeds import SeedFacts, SeedsFacts, numbers_of, render, render_fragment
from .run_folder import CONFIG, RunFolder, seed_runs
from .run_page import read_report, run_stage

SUMMARY = "seeds.json"  # beside the packs


def write_seeds_page(folder: Path, file: Path) -> Path:
    """Write the page of the seeds in a folder; it links to their own pages if it is there, too.

    Raises:
        PackError: If no run has started, a run folder is damaged, or the file cannot be written.
    """
    is_beside = file.absolute().parent == folder.absolute()
    atomic_write(file, render(seeds_facts(folder, is_beside)))
    return file


def seeds_facts(folder: Path, has_links: bool) -> SeedsFacts:
    """Return the facts of the runs that are the same but for their seed.

    These are the runs that ``seeds.json`` names; without it, those that are as the first one.
    """
    runs, notes = _runs_of(folder)
    identities = {run: RunFolder(run).read_identity() for run in runs}
    first = identities[runs[0]]
    alike = [run for run in runs if _shared(identities[run]) == _shared(first)]
    others = [_name(run) for run in runs if run not in alike]
    if others:
        notes.append(f"{_listed(others)}: other settings or examples, left out")

    seeds = [_seed(run, identities[run], has_links) for run in alike]
    recipe = {key: value for key, value in first["recipe"].items() if key != "seed"}
    unit = unit_of(key for line in RunFolder(runs[0]).metrics() for key in line)
    return SeedsFacts(
        title=text(folder.resolve().name),
        seeds=seeds,
        sub=f"{name_alone(recipe.get('model'))} · {_listed([seed.name for seed in seeds])}",
        status=" · ".join([*_missing(seeds), *notes]),
        unit=unit,
        recipe=recipe_sections(recipe),
    )


def notebook_html(title: str, reports: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Return the held-out results of reports by seed as a table; None if they have no results."""
    seeds = [
        SeedFacts(f"seed-{seed}", numbers=numbers_of(report), changes=changes_of(report))
        for seed, report in reports.items()
    ]
    if not any(seed.changes for seed in seeds):
        return None
    return render_fragment(SeedsFacts(title, seeds))


def _runs_of(folder: Path) -> tuple[list[Path], list[str]]:
    """Return the run folders of the seeds in ``seeds.json``, or all, and a note on missing ones."""
    runs = [run for run in seed_runs(folder) if (run / CONFIG).is_file()]
    if not runs:
        raise PackError(f"{folder}: no run of a seed has started.", "not-found")

    file = folder / SUMMARY
    if not file.is_file():
        return runs, []

    seeds = read_json(file).get("seeds")
    if not isinstance(seeds, list):
        raise PackError(f"{file}: has no list of seeds. Remove it.", "unreadable")

    names = [f"seed-{seed}" for seed in seeds]
    named = [run for run in runs if _name(run) in names]
    if not named:
        raise PackError(f"{file}: no run of its seeds is in {folder}. Remove it.", "not-found")

    missing = [name for name in names if name not in map(_name, named)]
    notes = []
    if missing:
        notes.append(f"{_listed(missing)}: the run folder is not here")
    return named, notes


def _seed(run: Path, identity: Mapping, has_links: bool) -> SeedFacts:
    name = _name(run)
    link = f"{run.name}/{PAGE}" if has_links and (run / PAGE).is_file() else ""

    curve = curve_of(RunFolder(run).metrics())
    report = read_report(run)
    if report is None:
        return SeedFacts(name, run_stage(run, identity).status, link, curve)

    batches = number(report.get("batches")) or 0
    note = f"Trained for {batches:,.0f} batches"
    gates = report.get("gates")
    if isinstance(gates, Mapping):
        for gate, result in gates.items():
            if not isinstance(result, Mapping) or result.get("passed") is not True:
                note += f" · gate {text(gate)} failed"
    return SeedFacts(name, note, link, curve, numbers_of(report), changes_of(report))


def _shared(identity: Mapping) -> dict:
    """Return what runs have in common whose numbers have a mean."""
    recipe = {key: value for key, value in identity["recipe"].items() if key != "seed"}
    return {"recipe": recipe, "base": identity["base"], "data": identity["data"]}


def _missing(seeds: Sequence[SeedFacts]) -> list[str]:
    finished = sum(bool(seed.numbers) for seed in seeds)
    if finished == len(seeds) > 1:
        return []
    status = f"{finished} of {len(seeds)} seeds finished"
    if finished < 2:
        return [f"{status}; results have a mean if two are"]
    return [f"{status}; the means are of these"]


def _name(run: Path) -> str:
    return run.name.removesuffix("-run")


def _listed(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} and {names[-1]}"
