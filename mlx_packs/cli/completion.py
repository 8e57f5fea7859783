"""`packs completion`: what a shell needs to complete commands and options."""

import click
from click.shell_completion import get_completion_class

from ..terminal import echo

_VARIABLE = "_PACKS_COMPLETE"  # click's, by the name of the program


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
    script = get_completion_class(shell)(ctx.find_root().command, {}, "packs", _VARIABLE)
    echo(script.source())
