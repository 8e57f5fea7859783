"""Options that several commands share."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from ..config.choices import AUTO_ON_OFF, MATMUL_PATHS, TASKS
from ..config.data import DataConfig
from ..config.fields import SECTIONS, default_in_words, facts_of, flags_of
from ..config.functions import FUNCTION
from ..config.lora import LoRAConfig
from ..config.recipe import RunOptions
from ..config.sampling import Sampling
from ..config.schema import TrainConfig
from ..config.tasks import tasks_of
from ..config.values import bytes_of
from ..display import Display
from ..errors import PackError
from .output import JSON

if TYPE_CHECKING:
    from click.types import OptionHelpExtra

    from ..packs.base import Base
    from ..packs.pack import Pack


_PATHS = ("DIR", "FILE", "DATA", "MODEL", "PACK", "PACK[=WEIGHT]")  # metavars
ARGUMENTS = "mlx_packs.arguments"  # in `click.Context.meta`
HELP_TOPIC = "mlx_packs.help_topic"  # likewise; all where help is not asked for by a flag
DefaultText = str | Callable[..., str | None] | None

# The settings of a run by name, in the order of the help; without those that only files specify.
SETTINGS = {
    field.name: field
    for config in (RunOptions, DataConfig, LoRAConfig, TrainConfig)
    for field in dataclasses.fields(config)
    if flags_of(field)
}


class Option(click.Option):
    """An option in a section of help, of some tasks or (without any) of all.

    Its default may be a text, or a function that returns one, for a task in the help of that task.
    """

    def __init__(
        self,
        names: Sequence[str],
        section: str = "Output",
        default_text: DefaultText = None,
        tasks: Sequence[str] = (),
        **settings,
    ) -> None:
        super().__init__(names, **settings)
        self.tasks = tuple(tasks)
        self.section = section
        self.default_text = default_text

        if isinstance(self.type, click.Choice):
            self.metavar = one_of(self.type.choices)
        elif isinstance(self.type, click.types.IntParamType):
            self.metavar = self.metavar or "N"

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the completions: the values that the help shows, a file, or a folder."""
        shown = self.metavar or ""
        if shown.startswith("{"):
            values = shown.strip("{}").split(",")
            return [CompletionItem(v) for v in values if v.startswith(incomplete)]
        if shown in _PATHS:
            return [CompletionItem(incomplete, type="dir" if shown == "DIR" else "file")]
        return super().shell_complete(ctx, incomplete)

    def get_help_extra(self, ctx: click.Context) -> "OptionHelpExtra":
        extra = super().get_help_extra(ctx)
        text = self.default_text
        if callable(text):
            text = text(*filter(TASKS.__contains__, [ctx.meta.get(HELP_TOPIC)]))
        if text:
            extra["default"] = text
        return extra


def arguments_without(flags: Collection[str]) -> list[str]:
    """Return the arguments of a `SectionedCommand` without some flags and their values."""
    context = click.get_current_context()
    takes_value = set()
    for parameter in context.command.params:
        if not getattr(parameter, "is_flag", True):
            takes_value.update(parameter.opts)

    others = []
    arguments = iter(context.meta[ARGUMENTS])
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        words = [argument]
        if name in takes_value and not equals:
            words.append(next(arguments))
        if name not in flags:
            others += words

    return others


class SectionedCommand(click.Command):
    """A command whose help has its options in sections, and whose context keeps its arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[ARGUMENTS] = tuple(args)
        return super().parse_args(ctx, args)

    def shown_options(self, ctx: click.Context) -> Iterator[click.Parameter]:
        yield from (param for param in self.get_params(ctx) if isinstance(param, click.Option))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = {name: [] for name in SECTIONS}
        for param in self.shown_options(ctx):
            if record := param.get_help_record(ctx):
                records[getattr(param, "section", "Output")].append(record)

        for section, rows in records.items():
            if rows:
                with formatter.section(section):
                    formatter.write_dl(rows)


def option(*names: str, **settings) -> Callable:
    return click.option(*names, cls=Option, **settings)


def add(*decorators: Callable) -> Callable:
    """Add several options to a command, in this order in its help."""

    def decorate(command: Callable) -> Callable:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def setting(name: str, default_text: DefaultText = None, **overrides) -> Callable:
    """Add the option of a setting of a run, as its field describes it but for ``overrides``.

    Without a ``type`` its value is a text, which `Settings.from_mapping` converts.
    """
    return _of_field(SETTINGS[name], default_text, tasks=tasks_of(name), **overrides)


def _of_field(field: dataclasses.Field, default_text: DefaultText, **overrides) -> Callable:
    facts = facts_of(field)
    flags = flags_of(field)
    described: dict = {"section": facts.section, "help": facts.help, "default_text": default_text}

    if isinstance(field.default, bool):
        described |= {"is_flag": True, "default": None}
        flags = facts.flags or (f"{flags[0]}/--no-{flags[0][2:]}",)
    elif facts.choices:
        values = list(facts.choices)
        if facts.function:
            values.append(FUNCTION)
        described["metavar"] = one_of(values)
    else:
        kinds = {int: "N", int | None: "N", float: "X", tuple[str, ...]: "NAMES"}
        described["metavar"] = facts.metavar or kinds.get(field.type, "TEXT")

    return option(*flags, field.name, **described | overrides)


def one_of(values: Iterable[str]) -> str:
    """Return the metavar of a value that is one of several: ``{a,b}``."""
    return "{" + ",".join(values) + "}"


def shown_default(name: str, *tasks: str) -> str | None:
    """Return the default of a setting as help shows it; None if it goes without saying."""
    field = SETTINGS[name]
    shown = default_in_words(field, *tasks)
    if shown == "true":
        return flags_of(field)[0][2:]
    if shown in ("", "false"):
        return None
    return shown


recipes = option(
    "-c",
    "--config",
    "configs",
    section="Model and data",
    metavar="FILE",
    multiple=True,
    help="YAML file with these options, repeatable; it may have the parts bnb_4bit and lora of "
    "QLoRA projects.",
)
model = setting("model", default="tiny")
model_of_pack = setting("model", "the one that the pack was trained on", default=None)
trust_remote_code = setting("trust_remote_code", default=False)


def template_kwargs(help: str, default_text: str | None = "as the pack was trained") -> Callable:
    """Add the variables of the chat template; the command is given a mapping."""
    return setting("template_kwargs", default_text, help=help, default=None, callback=_variables)


def _variables(ctx: click.Context, param: click.Parameter, text: str | None) -> dict:
    values = {}
    if text is not None:
        values["template_kwargs"] = text
    return DataConfig.from_mapping(values).template_kwargs


def _use_json(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.meta[JSON] = value


def printed_as_json(sentence: str) -> Callable:
    """Add --json, which `output.wants_json` reads."""
    return option("--json", is_flag=True, expose_value=False, callback=_use_json, help=sentence)


as_json = printed_as_json("Print the result as JSON.")
overwrite = option("--overwrite", is_flag=True, help="Replace the folder --out if it exists.")
max_shard_gb = option(
    "--max-shard-gb",
    default=1.0,
    metavar="GB",
    help="Maximum size of a file of weights, in 10^9 bytes.",
)
split = option(
    "--split",
    section="Model and data",
    default="test",
    metavar="NAME",
    help="Split of a data folder to evaluate; valid is used if there is no test split.",
)
loss_on = setting(
    "loss_on",
    "as the pack was trained",
    type=click.Choice(facts_of(SETTINGS["loss_on"]).choices),
    help="Tokens to evaluate: all, only the completion (the last answer), or every assistant "
    "message.",
)
metric = setting(
    "metric",
    help="Criterion for a right answer, of which the share is reported: it is the expected text "
    "(exact), contains it (contains), or is the same JSON value (json); FILE.py:NAME is a function "
    "of your own, which scores an answer from 0 to 1 by the expected one.",
    default_text="exact for the bundled data, none otherwise",
)
limit = option(
    "--limit",
    section="Evaluation and gates",
    default=-1,
    help="Number of examples to evaluate; -1 uses all.",
)


def out(sentence: str) -> Callable:
    """Add the folder that a command writes."""
    return option("--out", required=True, metavar="DIR", help=sentence)


def data(sentence: str = "Examples to evaluate on", **overrides) -> Callable:
    """Add the examples that a command evaluates on."""
    described = {"default": "tiny", "help": f"{sentence}: a folder, a file, or 'tiny'."}
    return option("--data", section="Model and data", metavar="DATA", **described | overrides)


class _PackOption(Option):
    """The flag of what a command takes as arguments, too."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        _, text = super().get_help_record(ctx)
        return f"{self.metavar}, {self.opts[0]}", text


def packs(sentence: str, metavar: str = "PACK") -> Callable:
    """Add the packs of a command: arguments, or values of ``--pack``, which is repeatable."""
    flag = click.option(
        "--pack",
        "flagged",
        cls=_PackOption,
        section="Model and data",
        metavar=metavar,
        multiple=True,
        help=sentence,
    )
    argument = click.argument("packs", nargs=-1, metavar=f"[{metavar}]...", type=click.Path())

    def decorate(command: Callable) -> Callable:
        @functools.wraps(command)
        def with_both(packs: tuple[str, ...], flagged: tuple[str, ...], **settings) -> None:
            return command(packs=(*packs, *flagged), **settings)

        return add(argument, flag)(with_both)

    return decorate


def images(sentence: str) -> Callable:
    """Add ``--image``, which is repeatable."""
    return option("--image", "images", multiple=True, metavar="FILE", help=sentence)


def matmul_path(*auto: str) -> Callable:
    """Add ``--matmul-path`` to a command that does not train."""
    choices = (*auto, *MATMUL_PATHS)
    return option(
        "--matmul-path",
        default=choices[0],
        type=click.Choice(choices),
        help="How frozen weights are used: quantized, dequantized on the fly (transient), or "
        "dense.",
    )


def sampling(**defaults) -> Callable:
    """Add the settings of `Sampling` with the ``defaults`` of a command."""
    decorators = []
    for field in dataclasses.fields(Sampling):
        default = defaults.get(field.name, field.default)
        text = None if default in (0, 1) and field.name != "temperature" else f"{default:g}"
        decorators.append(_of_field(field, text))
    return add(*decorators)


def one_pack(texts: Iterable[str]) -> "Pack | None":
    """Return the pack that ``DIR`` or ``DIR=0.7`` texts name together; None if there is none."""
    from ..packs.weighted_sum import open_weighted, weighted_sum

    weighted = [open_weighted(text) for text in texts]
    return weighted_sum(weighted) if weighted else None


def writable_file(file: str | None, flag: str) -> Path | None:
    """Return the path of an output; a place that cannot be written shows before the work."""
    if file is None:
        return None
    path = Path(file).expanduser()
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise PackError(f"{flag} {file}: {what}.", "unwritable")
    return path


def size_of(flag: str, text: str) -> int:
    """Return the bytes of a size; a number alone is of GB."""
    if not (count := bytes_of(text, "GB")):
        raise PackError(f"{flag} {text}: must be a size such as 24 or 24GB.")
    return count


def text_pack(texts: Iterable[str]) -> "Pack | None":
    """As `one_pack`, of packs that text can be generated with."""
    from ..packs.compatibility import check_generates

    pack = one_pack(texts)
    if pack is not None:
        check_generates(pack)
    return pack


def base_of(model: str | None, pack: "Pack | None") -> str:
    """Return the base that was named, or else the pack's."""
    from ..packs.compatibility import find_base

    return model or find_base(pack)


def load_base(model: str | None, pack: "Pack | None", *options: Any) -> "Base":
    """Load the base that was named, or else the pack's; ``options`` of `load_base_for`."""
    from ..packs.base import load_base_for

    name = base_of(model, pack)
    with Display().working("base", f"loading {name}"):
        return load_base_for(pack, name, *options)


def names(text: str | None) -> tuple[str, ...]:
    """Return the names in a list that is separated by commas."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def _use_backend(ctx: click.Context, _: click.Parameter, name: str | None) -> None:
    """Force the backend while the command runs; a wrong one shows before anything is loaded."""
    from ..ops import dispatch

    if name is not None:
        ctx.with_resource(dispatch.backend(name))
    else:
        dispatch.forced()


backend = option(
    "--backend",
    section="Memory and speed",
    metavar="{reference,metal,cuda}",
    expose_value=False,
    callback=_use_backend,
    help="Implementation of the operations: plain MLX (reference), or metal or cuda kernels.",
    default_text="chosen for the device",
)


offload_base = setting("offload_base", default="auto", type=click.Choice(AUTO_ON_OFF))


# Options of every command that loads a model.
execution = add(trust_remote_code, backend, as_json)
