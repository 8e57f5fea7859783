"""Help of commands with many options: the common ones, all of them, or the options of a task."""

import copy
import inspect
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

import click

from ..config.choices import TASKS
from ..errors import PackError, did_you_mean
from ..terminal import echo
from .options import ARGUMENTS, HELP_TOPIC, Option, SectionedCommand

COMMON = "common"
ALL = "all"


class TopicCommand(SectionedCommand):
    """A command whose help has topics: ``-h``, ``-h --all``, and ``-h --task dpo`` if by task."""

    def __init__(self, *args, common: Sequence[str], by_task: bool = False, **settings) -> None:
        super().__init__(*args, add_help_option=False, **settings)
        self.by_task = by_task  # whether a task is a topic
        self.common = {"help", *common}  # names of the options that short help has
        flags = {"is_flag": True, "expose_value": False}
        text = "Show all options; only together with -h."
        self.params.append(Option(["--all"], help=text, callback=_check_alone, **flags))
        text = "Show the common options, all of them (-h --all)"
        if by_task:
            text += " or the options of a task (-h --task dpo)"
        text += ", and exit."
        helps = Option(["-h", "--help"], help=text, callback=_show, is_eager=True, **flags)
        self.params.append(helps)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the description; only its first paragraphs unless all options are shown."""
        if _topic(ctx) == ALL:
            super().format_help_text(ctx, formatter)
            return

        paragraphs = inspect.cleandoc(self.help or "").split("\n\n")
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text("\n\n".join(paragraphs[:2]))

    def shown_options(self, ctx: click.Context) -> Iterator[click.Parameter]:
        """Yield the options of the topic; common ones with the first clause of their help."""
        topic = _topic(ctx)
        for param in super().shown_options(ctx):
            if topic == ALL or topic in param.tasks:
                yield param
            elif param.name in self.common and (topic == COMMON or not param.tasks):
                shortened = copy.copy(param)
                shortened.help = re.split(r"[.;:](?= |$)", param.help)[0] + "."
                yield shortened

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, and how to see the options that are not shown."""
        super().format_epilog(ctx, formatter)
        if _topic(ctx) == ALL:
            return

        hidden = len(list(super().shown_options(ctx))) - len(list(self.shown_options(ctx)))
        formatter.write_paragraph()
        text = f"{hidden} more options: {ctx.command_path} -h --all."
        if not self.by_task:
            formatter.write_text(text)
            return

        names = ", ".join(TASKS)
        text += f" The options of a task: {ctx.command_path} -h --task NAME ({names})."
        if added := [f"{name} ({each.label})" for name, (each, *_) in TASKS.added().items()]:
            text += f" Tasks of installed packages: {', '.join(added)}."

        formatter.write_text(text)


def _topic(ctx: click.Context) -> str:
    return ctx.meta.get(HELP_TOPIC, ALL)


def _show(ctx: click.Context, param: click.Parameter, shown: bool) -> None:
    """Print the help that the arguments ask for and exit."""
    if shown and not ctx.resilient_parsing:
        by_task = isinstance(ctx.command, TopicCommand) and ctx.command.by_task
        ctx.meta[HELP_TOPIC] = _asked_topic(ctx.meta[ARGUMENTS], by_task)
        echo(ctx.get_help())
        ctx.exit()


def _asked_topic(arguments: Sequence[str], by_task: bool) -> str:
    """Return the topic of a command line whose other options are not parsed yet."""
    task = None
    for word, following in pairwise([*arguments, ""]):
        flag, equals, value = word.partition("=")
        if flag == "--task":
            task = value if equals else following

    if "--all" in arguments:
        return ALL
    if task is None or not by_task:
        return COMMON
    if task not in TASKS:
        hint = did_you_mean(task, list(TASKS))
        raise PackError(f"--task {task}: no such task. {hint}", "unknown", "task")
    return task


def _check_alone(_: click.Context, param: click.Parameter, is_set: bool) -> None:
    if is_set:
        raise PackError(f"{param.opts[0]}: shows all options with -h. Pass -h --all.", "conflict")
