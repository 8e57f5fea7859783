"""Help of commands with many options: the common ones, all of them, or the options of a task."""

import copy
import inspect
from collections.abc import Iterator

import click

from ..config.choices import TASKS
from ..terminal import echo
from .options import Option, SectionedCommand

COMMON = "common"
ALL = "all"
# In `click.Context.meta`; all where help is not asked for by a flag.
_TOPIC = "mlx_packs.help_topic"


class TopicCommand(SectionedCommand):
    """A command whose help has topics: ``-h``, ``-h all``, ``-h dpo``."""

    def __init__(self, *args, **settings) -> None:
        super().__init__(*args, **settings)
        flag = {"is_flag": True, "is_eager": True, "expose_value": False}
        text = "Show all options and exit, as -h all does."
        self.params.append(Option(["--help-all"], help=text, callback=_show_all, **flag))

    def get_help_option(self, ctx: click.Context) -> click.Option:
        """Return the option ``-h`` with its optional topic."""
        names = self.get_help_option_names(ctx)

        if self._help_option is None or set(self._help_option.opts) != set(names):
            option = Option(
                names,
                is_flag=False,
                flag_value=COMMON,
                type=click.Choice((COMMON, ALL, *TASKS)),
                is_eager=True,
                expose_value=False,
                callback=_show,
                help="Show the common options, all of them (-h all) or the options of a task "
                "(-h dpo), and exit.",
                common="Show this help; -h all shows all options, -h dpo the options of a task.",
            )
            option.metavar = "[all|TASK]"
            self._help_option = option

        return self._help_option

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
        """Yield the options of the topic; common ones with one line of help, extras among all."""
        topic = _topic(ctx)
        for param in self.get_params(ctx):
            if getattr(param, "extra", False) and topic != ALL:
                continue

            tasks = getattr(param, "tasks", ())
            summary = getattr(param, "common", False)

            if topic == ALL or topic in tasks:
                yield param
            elif summary and (topic == COMMON or not tasks):
                shortened = copy.copy(param)
                shortened.help = param.help if summary is True else summary
                shortened.metavar = param.common_metavar or param.metavar
                yield shortened

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, and how to see the options that are not shown."""
        super().format_epilog(ctx, formatter)
        if _topic(ctx) == ALL:
            return

        hidden = len(self.get_params(ctx)) - len(list(self.shown_options(ctx)))
        formatter.write_paragraph()
        text = (
            f"{hidden} more options: {ctx.command_path} -h all. The options of a task: "
            f"{ctx.command_path} -h TASK ({', '.join(TASKS)})."
        )
        if added := [f"{name} ({each.label})" for name, (each, *_) in TASKS.added().items()]:
            text += f" Tasks of installed packages: {', '.join(added)}."

        formatter.write_text(text)


def _topic(ctx: click.Context) -> str:
    return ctx.meta.get(_TOPIC, ALL)


def _show(ctx: click.Context, _: click.Parameter, topic: str | None) -> None:
    """Print the help of a topic and exit; nothing without one."""
    if topic and not ctx.resilient_parsing:
        ctx.meta[_TOPIC] = topic
        echo(ctx.get_help())
        ctx.exit()


def _show_all(ctx: click.Context, param: click.Parameter, shown: bool) -> None:
    _show(ctx, param, ALL if shown else None)
