"""Longer hunts: ``python -m tests.fuzz --kind pack --cases 5000 --seed 7``."""

import sys
from collections import Counter
from pathlib import Path

import click

from tests.fuzz.kinds import KINDS
from tests.fuzz.runner import HEADER, Report, fuzz, supervise


@click.command()
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    type=click.Choice(list(KINDS)),
    help="Repeatable; all by default.",
)
@click.option("--cases", default=200, help="Number of mutants of each kind.")
@click.option("--seed", default=0, help="Seed of the mutants.")
@click.option("--first", default=0, help="Number of the first mutant.")
@click.option(
    "--only", type=int, help="Run this mutant alone, in this process, and show its traceback."
)
@click.option(
    "--journal", type=click.Path(path_type=Path), hidden=True, help="Write a line for each mutant."
)
def main(
    kinds: tuple[str, ...],
    cases: int,
    seed: int,
    first: int,
    only: int | None,
    journal: Path | None,
) -> None:
    """Run mutants of each kind, and print a table and the first failure at each place."""
    if journal is not None:
        fuzz(kinds[0], range(first, first + cases), seed, journal)
        return
    reports = []
    for name in kinds or KINDS:
        if only is None:
            reports.append(supervise(name, cases, seed, first))
        else:
            reports.append(fuzz(name, range(only, only + 1), seed))
        _print_failures(reports[-1], only is not None)
    click.echo("\n".join([HEADER, *(report.row() for report in reports)]))
    sys.exit(any(report.failures for report in reports))


def _print_failures(report: Report, details: bool) -> None:
    count = Counter((f.fault, f.where) for f in report.failures)
    for failure in {(f.fault, f.where): f for f in reversed(report.failures)}.values():
        click.echo(f"{report.kind}: {count[failure.fault, failure.where]} x {failure.line()}")
        if details:
            click.echo(f"{failure.details!r}" if failure.fault == "control" else failure.details)


main()
