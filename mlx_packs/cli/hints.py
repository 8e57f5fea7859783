"""What to write in place of an option that a command does not have."""

from difflib import get_close_matches

import click

from ..config.fields import flags_of
from ..config.other_names import COMMANDS, OTHER_VALUES, ours_for
from ..errors import any_of, flag_of
from .options import SETTINGS

_NEAR = 0.75  # similarity of names, as of `difflib`


def option_hint(error: click.NoSuchOption) -> str:
    """Return a sentence that says what to write; empty if nothing is similar."""
    if error.ctx is None:
        return ""

    name = error.option_name.lstrip("-").replace("-", "_")
    parameters = error.ctx.command.params
    flags = {flag for each in parameters for flag in each.opts if flag.startswith("--")}
    options = {flag[2:].replace("-", "_") for flag in flags}
    arguments = {each.name for each in parameters if isinstance(each, click.Argument)}

    ours = ours_for(name, options | arguments) or name
    if ours in options:
        return f"Use {flag_of(ours)} {OTHER_VALUES.get(name, '')}".rstrip() + "."
    if ours in arguments:
        return "Pass it without a flag."

    if step := COMMANDS.get(name):
        return f"Use packs {step}."
    if "--config" in flags and ours in SETTINGS:
        flag = flags_of(SETTINGS[ours])[0]
        command = error.ctx.command_path
        return f"packs train takes {flag}; {command} reads it only from a file of --config."

    near = get_close_matches(flag_of(name), sorted(flags), n=2, cutoff=_NEAR)
    if not near:
        return ""
    return f"Use {any_of(near)}."
