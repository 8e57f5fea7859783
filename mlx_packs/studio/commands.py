"""Commands of `packs` as child processes of the studio, which itself loads no model."""

import sys


def command_of(*arguments: str) -> list[str]:
    """Return the command line of `packs` with these arguments, by this Python."""
    return [sys.executable, "-m", "mlx_packs", *arguments]
