"""Errors that a user can act on; the command line prints them as one line and exits with 2."""

import re


class PackError(Exception):
    """Wrong use or bad input; the message names the place, the rule, the value, the next step."""


class Interrupted(PackError):
    """The user stopped a run, and it was kept; the command line exits with 130."""


def printable(text: str) -> str:
    """One line for a terminal: what a stranger's file says cannot steer it."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", "?", text)


def did_you_mean(name: str, valid: list[str]) -> str:
    """A sentence that names the nearest valid spelling, or lists the valid ones."""
    import difflib

    if near := difflib.get_close_matches(name, valid, n=1, cutoff=0.5):
        return f"Did you mean '{near[0]}'?"
    return f"Valid: {', '.join(sorted(valid))}."
