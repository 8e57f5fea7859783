"""The page of a run, a pack or several seeds: what their folders have, collected and written."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ..config.arguments import checked_arguments
from ..display import Display
from ..errors import PackError, file_errors, reason_of
from ..files import atomic_write, to_json
from ..packs.facts import (
    all_changes,
    figures_of,
    held_out_line,
    manifest_facts,
    memory_of,
)
from ..packs.pack import Pack
from ..reading import check_seal, read_json, sealed, without_seal
from ..report.facts import (
    PAGE,
    Page,
    curve_of,
    loss_name,
    name_alone,
    number,
    recipe_sections,
    samples_of,
    text,
    unit_of,
)
from ..report.page import render
from ..report.seeds import SeedFacts, SeedsFacts, numbers_of
from ..report.seeds import render as render_seeds
from .run_folder import CONFIG, REPORT, RunFolder, name_of_run, run_folder, seed_runs
from .state import batches_of

SUMMARY = "seeds.json"  # beside the packs


def write_seeds_page(folder: Path, file: Path) -> Path:
    """Write the page of the seeds in a folder; it links to their own pages if it is there, too."""
    is_beside = file.absolute().parent == folder.absolute()
    atomic_write(file, render_seeds(seeds_facts(folder, is_beside)))
    return file


def seeds_facts(folder: Path, has_links: bool) -> SeedsFacts:
    """Return the facts of the runs that are as the first one but for their seed."""
    runs = [run for run in seed_runs(folder) if (run / CONFIG).is_file()]
    if not runs:
        raise PackError(f"{folder}: no run of a seed has started.", "not-found")

    identities = {run: RunFolder(run).read_identity() for run in runs}
    first = identities[runs[0]]
    alike = [run for run in runs if _common_identity(identities[run]) == _common_identity(first)]
    seeds = [_seed(run, identities[run], has_links) for run in alike]
    notes = []
    finished = sum(bool(seed.numbers) for seed in seeds)
    if finished < max(2, len(seeds)):
        notes.append(f"{finished} of {len(seeds)} seeds finished; means are of two or more")
    if others := [name_of_run(run) for run in runs if run not in alike]:
        notes.append(f"{', '.join(others)}: other settings or examples, left out")

    recipe = {key: value for key, value in first["recipe"].items() if key != "seed"}
    return SeedsFacts(
        title=text(folder.resolve().name),
        seeds=seeds,
        sub=f"{name_alone(recipe.get('model'))} · {', '.join(seed.name for seed in seeds)}",
        status=" · ".join(notes),
        recipe=recipe_sections(recipe),
    )


def _seed(run: Path, identity: Mapping, has_links: bool) -> SeedFacts:
    name = name_of_run(run)
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
    return SeedFacts(name, note, link, curve, numbers_of(report), all_changes(report))


def _common_identity(identity: Mapping) -> dict:
    """Return what runs have in common whose numbers have a mean."""
    recipe = {key: value for key, value in identity["recipe"].items() if key != "seed"}
    return {"recipe": recipe, "base": identity["base"], "data": identity["data"]}


@checked_arguments
def write_page(of: str | Path, out: str | Path | None = None) -> Path:
    """Write a self-contained HTML page about a run, a pack or several seeds; return its file.

    The page shows the loss curve, the results with their errors, samples, memory, and the recipe.
    For an unfinished run it shows the available parts, and
    for a pack without its run the contents of the manifest. Folders appear without their paths. The
    page of the output folder of `train_seeds` has the mean and standard error of every number.

    Args:
        of: A run folder, a pack's folder, the output folder of `train_seeds`, or the Hub id of a
            pack that was pulled.
        out: File to write; by default ``report.html`` in the run folder or the folder of the
            seeds, or ``<pack>-report.html`` in the current folder for a pack without a run.

    Raises:
        PackError: If there is no such run or pack, it is damaged, or the file cannot be written.
    """
    folder = Path(of).expanduser()
    if seed_runs(folder):
        return write_seeds_page(folder, page_file(out or folder / PAGE))

    if (folder / CONFIG).is_file():
        facts = run_facts(folder)
        default = folder / PAGE
    else:
        pack = Pack.open(of)
        run = run_folder(pack.path)
        if _is_run_of(run, pack):
            facts = run_facts(run)
            default = run / PAGE
        else:
            name = pack.short_name.replace("/", "-")
            facts = manifest_facts(pack.manifest, pack.short_name)
            default = Path(f"{name}-{PAGE}")

    file = page_file(out or default)
    atomic_write(file, render(facts))
    return file


def page_file(out: str | Path) -> Path:
    """Return the file of a page; a PackError if it is a folder."""
    file = Path(out).expanduser()
    if file.is_dir():
        raise PackError(f"--out {file}: is a folder. Name a file.", "exists")
    return file


def run_facts(run: Path) -> Page:
    """Return the facts of a run folder for a page, with its pack once the run is over."""
    identity = RunFolder(run).read_identity()
    lines = RunFolder(run).metrics()
    report = read_report(run)
    title = name_of_run(run.resolve())

    facts = None
    if report is not None and (pack := _pack_of(run)) is not None:
        facts = manifest_facts(pack.manifest, title)
    facts = facts or run_stage(run, identity)
    facts = facts_of_run(title, identity["recipe"], lines, report, facts)
    return facts if report is not None else with_answers(facts, run)


def facts_of_run(
    title: str,
    recipe: Mapping,
    lines: Sequence[Mapping],
    report: Mapping | None,
    facts: Page,
) -> Page:
    """Return the facts of a pack, or of a run without one, with what the run itself knows."""
    facts = replace(
        facts,
        title=text(title),
        curve=curve_of(lines) or facts.curve,
        unit=unit_of(key for line in lines for key in line),
        loss_name=loss_name(recipe.get("task")),
    )
    if not facts.recipe:
        facts = replace(facts, recipe=recipe_sections(recipe))

    if report is None:
        return facts

    held_out = report.get("held_out")
    if not isinstance(held_out, dict):
        held_out = {}

    changes = all_changes(report)
    samples = report.get("samples") or [report.get("sample")]
    return replace(
        facts,
        changes=changes,
        figures=facts.figures or figures_of(changes, report),
        held_out=held_out_line({**report, **held_out}),
        best=number(report.get("best_batch")),
        samples=samples_of(samples) or facts.samples,
        memory_gb=memory_of(report),
    )


def with_answers(facts: Page, run: Path) -> Page:
    """Return facts with the first and last answers to validation prompts, if the run has any."""
    lines = RunFolder(run).samples()
    if not lines:
        return facts

    last = lines[-1]["batch"]
    now = {line["prompt"]: line["answer"] for line in lines if line["batch"] == last}
    answers = []
    for line in lines:
        if line["batch"] == lines[0]["batch"]:
            after = now.get(line["prompt"])
            ends = {"wanted": line.get("expected"), "before": line["answer"], "after": after}
            answers.append({"prompt": line["prompt"], **ends})
    return replace(facts, samples=samples_of(answers), answered=last)


def attempt(write: Callable[[], object], file: Path, display: Display) -> bool:
    """Write a file; if it cannot be written, there is a note, since a run is worth more."""
    try:
        write()
    except Exception as error:
        reason = error.message if isinstance(error, PackError) else reason_of(error)
        display.line("note", f"{file}: is not written ({reason.rstrip('.')})")
        return False
    return True


def write_report(run: Path, report: Mapping) -> None:
    """Write what a run reported into its folder."""
    atomic_write(run / REPORT, to_json(sealed(dict(report))))


def read_report(run: Path) -> dict | None:
    """Return the report that `write_report` wrote; None if the run is not over."""
    file = run / REPORT
    if not file.is_file():
        return None

    report = read_json(file)
    with file_errors(file, "Remove it."):
        check_seal(report)
    return without_seal(report)


def run_stage(run: Path, identity: Mapping) -> Page:
    """Return what a run without its pack has come to."""
    batches = [line["batch"] for line in RunFolder(run).metrics()]
    batches += [batches_of(folder) for folder in RunFolder(run).checkpoints()]
    done = max(batches, default=0)

    recipe = identity["recipe"]
    total = ""
    if not recipe.get("phases") and recipe.get("epochs") is None:
        total = f" of {number(recipe.get('iters')) or 0:,.0f}"
    status = f"Not finished: the last entry is of batch {done:,}{total}"
    if read_report(run) is not None:
        status = "The pack of this run is not next to it"
    return Page(title="", status=status)


def _pack_of(run: Path) -> Pack | None:
    """Return the pack beside a run if it is that run's, else None."""
    folder = run.resolve().with_name(name_of_run(run.resolve()))
    if folder == run.resolve():
        return None
    try:
        pack = Pack.open(folder)
        return pack if _is_run_of(run, pack) else None
    except PackError:
        return None


def _is_run_of(run: Path, pack: Pack) -> bool:
    """Return whether a run folder has the base and the data of a pack."""
    try:
        identity = RunFolder(run).read_identity()
    except PackError:
        return False

    fingerprints = (pack.manifest["base"]["fingerprint"], pack._part("data").get("fingerprint"))
    return fingerprints == (identity["base"], identity["data"])
