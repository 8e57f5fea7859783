"""Longer hunts: ``python -m tests.fuzz --kind pack --cases 5000 --seed 7``."""

import gc
import sys

import click

from tests.fuzz.kinds import KINDS
from tests.fuzz.runner import fuzz, supervise, tell


@click.command()
@click.option("--kind", "kinds", multiple=True, type=click.Choice(list(KINDS)))
@click.option("--cases", default=200, help="Number of mutants of each kind.")
@click.option("--seed", default=0, help="Seed of the mutants.")
@click.option("--first", default=0, help="Number of the first mutant.")
@click.option("--only", type=int, help="Run this mutant in this process; show its traceback.")
@click.option("--told", is_flag=True, hidden=True)  # a line for each mutant
def main(kinds, cases, seed, first, only, told):
    """Run mutants of some kinds, or of each, and print the first failure at each place."""
    gc.freeze()  # as tests are
    if told:
        fuzz(kinds[0], range(first, first + cases), seed, tell)
        return

    failed = False
    for name in kinds or KINDS:
        if only is None:
            report = supervise(name, cases, seed, first)
        else:
            report = fuzz(name, range(only, only + 1), seed)

        click.echo("\n".join(report.lines()))
        if only is not None:
            for failure in report.failures:
                control = failure.fault == "control"
                click.echo(repr(failure.details) if control else failure.details)
        failed = failed or bool(report.failures)

    sys.exit(failed)


main()
