"""Options that several commands share."""

import click


def trust_remote_code(default: bool | None = False):
    """None where a recipe may say it too."""
    return click.option(
        "--trust-remote-code", is_flag=True, default=default, help="Run code of the checkpoint."
    )


def _use_backend(ctx: click.Context, _, name: str | None) -> None:
    """Force the backend while the command runs; a wrong one shows before anything is loaded."""
    from .ops import _backend

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
