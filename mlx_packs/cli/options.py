"""Options that several commands share."""

import dataclasses
import sys
from collections.abc import Sequence

import click

from ..config.recipe import RENAMED_KEYS
from ..errors import PackError


def of_field(f: dataclasses.Field, default: str | None):
    """An option from a field of a config; `config.build` types its value.

    default: what stands in brackets after the field's sentence.
    """
    name = "--" + f.name.replace("_", "-")
    sentence = f.metadata["help"] + (f" [{default}]" if default else "")
    if f.metadata["choices"]:
        return click.option(
            name, metavar="{" + ",".join(f.metadata["choices"]) + "}", help=sentence
        )
    if isinstance(f.default, bool):
        return click.option(f"{name}/--no-{name[2:]}", default=None, help=sentence)
    return click.option(name, metavar=f.name.split("_")[-1].upper(), help=sentence)


def default_of(f: dataclasses.Field) -> str | None:
    """A field's default as help shows it, None if it goes without saying."""
    unsaid = f.default is False or f.default in (None, (), dataclasses.MISSING)
    return None if unsaid else str(f.default)


configs = click.option(
    "-c",
    "--config",
    "configs",
    metavar="FILE",
    multiple=True,
    help="YAML of these options, or a recipe of QLoRA, PEFT, bitsandbytes.",
)


def trust_remote_code(default: bool | None = False):
    """None where a recipe may say it too."""
    return click.option(
        "--trust-remote-code", is_flag=True, default=default, help="Run code of the checkpoint."
    )


def gates(command):
    """The limits of `gates`, as flags."""
    for flag, text in (
        ("--max-pack-mb", "a pack is larger than this"),
        ("--min-tps-ratio", "a pack decodes at less than this share of the base's tokens/s"),
        ("--max-ppl-ratio", "a pack's PPL is above this share of the base's"),
    ):
        option = click.option(flag, type=float, metavar="X", help=f"Gate: exit with 1 if {text}.")
        command = option(command)
    return command


def exit_by(failures: Sequence[str]) -> None:
    """Exit code 1 and a line for each gate that failed; nothing if none did."""
    for failure in failures:
        click.echo(f"packs: {failure}", err=True)
    if failures:
        sys.exit(1)


def _use_backend(ctx: click.Context, _, name: str | None) -> None:
    """Force the backend while the command runs; a wrong one shows before anything is loaded."""
    from ..ops import _backend

    if name is not None:
        ctx.with_resource(_backend.backend(name))
    else:
        _backend.forced()


backend = click.option(
    "--backend",
    metavar="{reference,metal,cuda}",
    expose_value=False,
    callback=_use_backend,
    help="Compute every op by plain MLX (reference), or by kernels. [as the device has it]",
)


def no_such_option(error: click.NoSuchOption) -> PackError:
    """The error for an option that a command lacks; it names the nearest one, or the new name."""
    name = error.option_name
    renamed = RENAMED_KEYS.get(name.lstrip("-").replace("-", "_"), "").replace("_", "-")
    near = [f"--{renamed}"] if renamed else error.possibilities
    hint = f" Use {' or '.join(near)}." if near else ""
    return PackError(f"{name}: no such option.{hint}", "unknown")
