"""The `packs` command: parse, call one function of the library, print, exit.

Exit codes: 0 done, 1 a gate failed, 2 wrong use or bad input (in one line), 128 + n ended by
signal n (130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP). A defect ends it with 70, since
Python's code for one, 1, means a failed gate.
"""

import importlib
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches

import click
from click.shell_completion import get_completion_class

from .. import signals
from ..config.choices import TASKS
from ..config.fields import flags_of
from ..config.other_names import OTHER_COMMANDS, OTHER_VALUES, ours_for, removal, value_hint
from ..cores import blas_threads
from ..distributed.link import launched
from ..errors import CRASHED, PackError, any_of, as_pack_error, did_you_mean, flag_of
from ..terminal import echo, guard, guarded
from .examples import epilog
from .options import SETTINGS
from .output import JSON, errors_in_json

_EXTRA = re.compile(r"Got unexpected extra arguments? \((.*)\)")
_NEAR = 0.75  # similarity of names, as of `difflib`
# By section of `packs --help`: the module of each command.
COMMANDS = {
    "Train": {"train": "train", "sweep": "sweep", "learn": "learn"},
    "Prepare": {"init": "init", "data": "data", "plan": "plan", "doctor": "doctor"},
    "Use": {"generate": "generate", "chat": "generate", "classify": "classify", "serve": "serve"},
    "Evaluate": dict.fromkeys(("eval", "eval-batch", "eval-tasks"), "evaluate"),
    "Inspect": {
        **dict.fromkeys(("inspect", "list", "diff", "report"), "inspect"),
        "studio": "studio",
    },
    "Share": {"push": "share", "pull": "share"},
    "Convert": dict.fromkeys(("merge", "combine", "quantize", "export", "import"), "convert"),
    "Benchmark": {"bench": "bench"},
}
HIDDEN = {"apply": "inspect", "completion": "main"}  # which `packs -h` does not list

# Commands that were removed: a sentence that says what to use now.
REMOVED_COMMANDS: Mapping[str, str] = {
    "bench-serve": "Use python -m benchmarks serve --url URL in a clone of the repository.",
    "logits": "Use packs train --task distill --teacher MODEL --teacher-cache DIR, which writes "
    "the cache before the run.",
}


class Commands(click.Group):
    """A group whose commands are imported when they are called; `packs inspect` stays quick.

    Every error that a user can correct leaves it as a `PackError`, so that the group behaves alike
    as a program, under `click.testing.CliRunner` and inside a group of another program.
    """

    listed = {name: file for section in COMMANDS.values() for name, file in section.items()}
    lazy = {**listed, **HIDDEN}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.listed, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import the module of a command and return the command; None if there is none."""
        if name not in self.lazy:
            return super().get_command(ctx, name)

        module = importlib.import_module(f".{self.lazy[name]}", __package__)
        commands = (each for each in vars(module).values() if isinstance(each, click.Command))
        command = next(each for each in commands if each.name == name)
        command.epilog = epilog(name)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read ``help [COMMAND]`` and ``version`` as the options that they are here."""
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        elif args == ["version"]:
            args = ["--version"]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the arguments name; an unknown one gets the nearest name."""
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            if sentence := REMOVED_COMMANDS.get(name):
                raise PackError(
                    f"{name}: this command was removed. {sentence}", "unknown", "command"
                )
            ours = OTHER_COMMANDS.get(name.replace("-", "_"))
            if name in TASKS:
                ours = f"train --task {name}"
            hint = f"Use packs {ours}." if ours else did_you_mean(name, self.list_commands(ctx))
            raise PackError(f"no such command '{name}'. {hint}", "unknown", flag="command")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.listed))
        limit = formatter.width - width - 4

        for section, names in COMMANDS.items():
            rows = [
                (name.ljust(width), self.get_command(ctx, name).get_short_help_str(limit))
                for name in names
            ]
            with formatter.section(section):
                formatter.write_dl(rows)

    def make_context(
        self, info_name: str | None, args: list[str], *others, **settings
    ) -> click.Context:
        # read here, since arguments that are wrong may keep a command from reading its --json
        wants_json = {JSON: "--json" in args}
        with errors_in_json(wants_json), user_errors():
            context = super().make_context(info_name, args, *others, **settings)
        context.meta.update(wants_json)
        return context

    def invoke(self, ctx: click.Context) -> object:
        """Parse and run a command; a signal that ends it lets it clean up."""
        with guarded(), errors_in_json(ctx.meta), first_rank_speaks(), user_errors():
            with signals.handled():
                return super().invoke(ctx)


@contextmanager
def user_errors() -> Iterator[None]:
    """Raise every error that a user can correct as a `PackError`; others keep their traceback."""
    try:
        yield
    except (PackError, BrokenPipeError, click.exceptions.NoArgsIsHelpError):
        raise  # click's own ways: one line, a quiet exit, the help

    except click.ClickException as error:
        raise _usage_error(error) from error

    except BaseException as error:
        if (ours := as_pack_error(error)) is None:
            raise
        raise ours from error


@contextmanager
def first_rank_speaks() -> Iterator[None]:
    """Let ranks other than the first end silently; the first one prints the error."""
    try:
        yield
    except PackError as error:
        here = launched()
        if here is None or here.rank == 0:
            raise
        raise click.exceptions.Exit(error.exit_code) from None


def _option_hint(error: click.NoSuchOption) -> str:
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

    step = OTHER_COMMANDS.get(name)
    if step and step != error.ctx.info_name:
        return f"Use packs {step}."
    if "--config" in flags and ours in SETTINGS:
        flag = flags_of(SETTINGS[ours])[0]
        command = error.ctx.command_path
        return f"packs train takes {flag}; {command} reads it only from a file of --config."

    near = get_close_matches(flag_of(name), sorted(flags), n=2, cutoff=_NEAR)
    if not near:
        return ""
    return f"Use {any_of(near)}."


def _usage_error(error: click.ClickException) -> PackError:
    """Turn an error of click into a PackError that begins with the option or argument."""
    if isinstance(error, click.NoSuchOption):
        name = error.option_name.lstrip("-").replace("-", "_")
        text = removal(name) or f"no such option. {_option_hint(error)}"
        complaint = f"{error.option_name}: {text}"
        return PackError(complaint.rstrip(), "unknown")

    message = " ".join(error.format_message().split())
    if isinstance(error, click.BadOptionUsage):
        complaint = message.removeprefix(f"Option {error.option_name!r} ")
        return PackError(f"{error.option_name}: {complaint}")

    param = getattr(error, "param", None)
    if param is None:
        hint = ""
        if error.ctx and error.ctx.info_name == "merge":
            hint = " Use packs combine to make one pack of several."
        return PackError(_EXTRA.sub(rf"\1: one argument too many.{hint}", message))
    name = param.opts[0] if isinstance(param, click.Option) else param.human_readable_name
    if isinstance(error, click.MissingParameter):
        return PackError(f"{name}: is required.", flag=param.name)

    text = error.message
    value = re.match(r"'([^']*)' is not one of", text)
    if value and param.name and (hint := value_hint(param.name, value[1])):
        text += hint
    return PackError(f"{name}: {text}", flag=param.name)


@click.group(
    cls=Commands,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "show_default": True,
        "max_content_width": 100,
    },
)
@click.version_option(package_name="mlx-packs")
def packs() -> None:
    """Fine-tune LLMs with LoRA and QLoRA on MLX.

    Each run produces a pack: a small, verified, hot-swappable adapter.
    """


@click.command()
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    \b
    bash  echo 'eval "$(packs completion bash)"' >> ~/.bashrc
    zsh   echo 'eval "$(packs completion zsh)"' >> ~/.zshrc
    fish  packs completion fish > ~/.config/fish/completions/packs.fish

    The script completes commands, options, their choices, files and folders in a new shell. zsh
    requires compinit, and bash version 4.4 or later.
    """  # noqa: D301 - click keeps the lines after \b
    script = get_completion_class(shell)(ctx.find_root().command, {}, "packs", "_PACKS_COMPLETE")
    echo(script.source())


def main(args: Sequence[str] | None = None) -> None:
    """Run the `packs` command as a program."""
    guard()  # to the end: the traceback of a defect may quote a file

    # NumPy is imported later. With all cores, other busy programs made its SVDs in `packs combine`
    # 2 to 24 times slower; MLX's OpenBLAS uses half of them, too (cpu/blas.py).
    if sys.platform == "linux" and (threads := blas_threads("OPENBLAS_NUM_THREADS")):
        os.environ["OPENBLAS_NUM_THREADS"] = str(threads)

    try:
        packs(args, prog_name="packs")
    except Exception:
        traceback.print_exc()
        sys.exit(CRASHED)


if __name__ == "__main__":
    main()
