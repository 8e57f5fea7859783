"""Options that several commands share, and the sections of `packs train --help`."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import click

from ..config.fields import SECTIONS, facts_of, flags_of
from ..errors import flag_of
from ..gates import MEANING
from .output import JSON

if TYPE_CHECKING:
    from click.types import OptionHelpExtra

    from ..packs.pack import Pack


class Option(click.Option):
    """An option of a command.

    Args:
        names: flags, and perhaps the parameter of the function.
        section: where `SectionedCommand` lists it.
        default_text: the default in words, where its value explains nothing.
        settings: as of `click.Option`.
    """

    def __init__(
        self,
        names: Sequence[str],
        section: str = "Output",
        default_text: str | None = None,
        **settings,
    ) -> None:
        super().__init__(names, **settings)
        self.section = section
        self.default_text = default_text

    def get_help_extra(self, ctx: click.Context) -> "OptionHelpExtra":
        """Return the text in brackets after the help."""
        extra = super().get_help_extra(ctx)
        if self.default_text:
            extra["default"] = self.default_text
        return extra


class SectionedCommand(click.Command):
    """A command whose help lists its options in sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, section by section."""
        records = {name: [] for name in SECTIONS}
        for param in self.get_params(ctx):
            if record := param.get_help_record(ctx):
                records[getattr(param, "section", "Output")].append(record)
        for section, rows in records.items():
            if rows:
                with formatter.section(section):
                    formatter.write_dl(rows)


def option(*names: str, **settings) -> Callable:
    """Add an `Option` to a command."""
    return click.option(*names, cls=Option, **settings)


def add(*decorators: Callable) -> Callable:
    """Add several options to a command, in this order in its help."""

    def decorate(command: Callable) -> Callable:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def of_setting(field: dataclasses.Field, default: str | None) -> Callable:
    """Add the option of a setting; `config.parse.build` types its value.

    Args:
        field: of a configuration.
        default: what the help shows as the default.
    """
    facts, names = facts_of(field), flags_of(field)
    settings: dict = {"section": facts.section, "help": facts.help, "default_text": default}
    if isinstance(field.default, bool):
        names = names if facts.flags else (f"{names[0]}/--no-{names[0][2:]}",)
        return option(*names, is_flag=True, default=None, **settings)
    if facts.choices:
        metavar = "{" + ",".join(facts.choices) + "}"
    else:
        kinds = {int: "N", float: "X", tuple[str, ...]: "NAMES"}
        metavar = facts.metavar or kinds.get(field.type, "TEXT")
    return option(*names, metavar=metavar, **settings)


def default_text(field: dataclasses.Field) -> str | None:
    """Return the default of a setting as help shows it; None if it goes without saying."""
    shown, default = facts_of(field).shown_default, field.default
    if shown is not None or default is False or default in (None, (), dataclasses.MISSING):
        return shown
    return flags_of(field)[0][2:] if default is True else str(default)


recipes = option(
    "-c",
    "--config",
    "configs",
    section="Model and data",
    metavar="FILE",
    multiple=True,
    help="YAML file of these options, or a recipe of QLoRA, PEFT or bitsandbytes.",
)
model = option(
    "--model",
    default="tiny",
    metavar="MODEL",
    help="Base model: a folder, a Hub id, or 'tiny'.",
)
trust_remote_code = option(
    "--trust-remote-code",
    is_flag=True,
    help="Allow executing Python code shipped with the model.",
)


def _use_json(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.meta[JSON] = value


as_json = option(
    "--json", is_flag=True, expose_value=False, callback=_use_json, help="Print the result as JSON."
)
overwrite = option("--overwrite", is_flag=True, help="Replace what is at --out.")
max_shard_gb = option("--max-shard-gb", default=1.0, metavar="GB", help="Largest file of weights.")
split = option(
    "--split",
    default="test",
    metavar="NAME",
    help="Split of a data folder; valid where there is no test split.",
)
loss_on = option(
    "--loss-on",
    type=click.Choice(["all", "completion", "assistant"]),
    help="Tokens that count.",
    default_text="as the pack was trained",
)
limit = option("--limit", default=-1, metavar="N", help="Examples to evaluate; -1 is all of them.")


def out(sentence: str) -> Callable:
    """The place where a command writes."""
    return option("--out", required=True, metavar="DIR", help=sentence)


def data(sentence: str = "Examples to evaluate on") -> Callable:
    """The examples that a command measures on."""
    return option(
        "--data",
        default="tiny",
        metavar="DATA",
        help=f"{sentence}: a folder, a file, or 'tiny'.",
    )


def packs(sentence: str, metavar: str = "PACK") -> Callable:
    """Packs, each with a weight if it is not 1."""
    return option("--pack", "packs", multiple=True, metavar=metavar, help=sentence)


def batch_size(default: int) -> Callable:
    """How many examples are computed together."""
    return option(
        "--batch-size",
        default=default,
        metavar="N",
        type=click.IntRange(1),
        help="Examples per batch.",
    )


def matmul_path(default: str, *others: str) -> Callable:
    """How a command that does not train multiplies frozen weights."""
    return option(
        "--matmul-path",
        default=default,
        type=click.Choice([default, *others]),
        help="How frozen weights are used: quantized, dequantized on the fly (transient), or dense.",
    )


_GATES = {
    "max_ppl_ratio": "a pack's PPL is above this share of the base's",
    "min_tps_ratio": "a pack decodes at less than this share of the base's tokens/s",
    "max_pack_mb": "the pack is larger than this",
}


def gate(name: str) -> Callable:
    """A limit of `gates`, as a flag."""
    return option(
        flag_of(name),
        type=float,
        metavar="MB" if MEANING[name] == "MB" else "RATIO",
        help=f"Gate: exit with 1 if {_GATES[name]}.",
    )


def one_pack(texts: Iterable[str]) -> "Pack | None":
    """Return the pack that ``DIR`` or ``DIR=0.7`` texts name together; None if there is none."""
    from ..packs.weighted_sum import open_weighted, weighted_sum

    weighted = [open_weighted(text) for text in texts]
    return weighted_sum(weighted) if weighted else None


def names(text: str | None) -> tuple[str, ...]:
    """Return the names in a list that is separated by commas."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def _use_backend(ctx: click.Context, _: click.Parameter, name: str | None) -> None:
    """Force the backend while the command runs; a wrong one shows before anything is loaded."""
    from ..ops import _backend

    if name is not None:
        ctx.with_resource(_backend.backend(name))
    else:
        _backend.forced()


backend = option(
    "--backend",
    section="Memory and speed",
    metavar="{reference,metal,cuda}",
    expose_value=False,
    callback=_use_backend,
    help="Op implementation: reference (plain MLX), or metal or cuda kernels.",
    default_text="chosen for the device",
)


# of every command that loads a model
execution = add(trust_remote_code, backend, as_json)
