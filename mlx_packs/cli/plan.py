"""`packs plan`: what fits into memory."""

import math
import shutil

import click

from ..config.fields import facts_of
from ..config.recipe import specified
from ..errors import PackError
from . import options
from .options import option
from .output import print_report
from .recipe import read_recipes, recipe_of

_SEARCHED = {
    "batch_size": "{}, less if necessary",
    "max_seq_length": "{}, less if necessary",
    "rank": "{}, less if necessary",
    "recompute": "{}, block if necessary",
    "matmul_path": "all",
    "quantize": "none, nf4 and affine4",
}
_SETTINGS = [
    name
    for name, field in options.SETTINGS.items()
    if facts_of(field).memory or facts_of(field).disk or name == "model"
]


def _default_text(name: str) -> str:
    """Return the default of a setting, and what the search does with it."""
    return _SEARCHED.get(name, "{}").format(options.shown_default(name) or "")


@click.command()
@option(
    "--memory",
    type=float,
    metavar="GB",
    help="Memory that the run must fit into, in 10^9 bytes.",
    default_text="this machine's",
)
@option(
    "--device",
    type=click.Choice(["cpu", "gpu"]),
    help="Device to plan for; needs --memory.",
    default_text="this machine's",
)
@options.recipes
@options.add(*(options.setting(name, _default_text(name)) for name in _SETTINGS))
@options.as_json
def plan(memory: float | None, device: str | None, configs: tuple[str, ...], **flags) -> None:
    """Estimate peak memory and disk space, and suggest a training command.

    Only config.json and the headers of the tensors are read, also of a model on the Hub. Settings
    from flags and files stay as they are. Of the others, batch size, activation checkpointing,
    sequence length and rank are reduced in this order until the run fits. The command that is
    printed last has the peak that is shown.
    """
    from ..bases.files import TINY
    from ..memory.read import read_headers
    from ..memory.recommend import recommend, table
    from ..runtime import assumed_device, total_memory

    if device is not None and memory is None:
        raise PackError(
            f"--device {device}: needs the memory of that machine. Add --memory GB.", "conflict"
        )
    if memory is not None and not (math.isfinite(memory) and memory > 0):
        raise PackError(f"--memory {memory:g}: must be a positive number of GB.")
    flags = {k: v for k, v in flags.items() if v is not None}
    settings = read_recipes(configs, flags)
    recipe = recipe_of(flags, settings)
    model = recipe.run.get("model", TINY)
    unflagged = recipe_of({"model": model}, settings)
    limit = total_memory() if memory is None else int(memory * 1e9)
    headers = read_headers(model)
    with assumed_device(device):
        choices = recommend(headers, limit, recipe.lora, recipe.train, specified(settings, flags))
        report = [
            {
                **choice.to_json(),
                "compute_dtype": choice.dtype(headers.config).to_json(),
                "command": choice.command(model, configs, unflagged),
                "code": headers.code,
            }
            for choice in choices
        ]
        width = min(100, shutil.get_terminal_size((100, 24)).columns)
        lines = table(choices, headers, limit, configs, unflagged, width)
    if headers.code is not None:
        lines.insert(
            1,
            f"code    the base brings code of its own ({headers.code}), which was not run. Read it; "
            "training needs --trust-remote-code.",
        )
    print_report(report, lines)
