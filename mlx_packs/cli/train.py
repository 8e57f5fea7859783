"""`packs train`: what it does is `mlx_packs.train_pack`."""

import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from ..config.choices import TASKS
from ..config.recipe import Recipe, RunOptions, base_defaults
from ..config.schema import TrainConfig
from ..display import NORMAL, QUIET, VERBOSE, Display
from ..errors import PackError, RunStopped
from ..gates import failures
from . import options
from .options import option
from .output import exit_if_failed, print_report
from .recipe import read_recipes, recipe_of
from .topics import TopicCommand

if TYPE_CHECKING:
    from ..training.settings import Request

_OF_A_FRESH_RUN = ("--overwrite", "--resume", "--resume-adapter-file")


def _default_text(name: str, *task: str) -> str:
    """Return the default of a setting, and that for the bundled model where it is another one."""
    texts = [options.shown_default(name, *task)]

    default = options.SETTINGS[name].default
    tiny = base_defaults(RunOptions.model, *task or [TrainConfig.task], TrainConfig.method)
    if tiny.get(name, default) != default:
        texts.append(f"tiny: {tiny[name]}")
    return "; ".join(text for text in texts if text)


@click.command(cls=TopicCommand)
@options.recipes
@options.add(*(options.setting(name, partial(_default_text, name)) for name in options.SETTINGS))
@option(
    "--mask-prompt",
    section="Model and data",
    is_flag=True,
    default=None,
    help="Same as --loss-on completion, as in mlx-lm.",
)
@option(
    "--fine-tune-type",
    section="Adapter",
    metavar="{lora,dora,full}",
    help="Same as --method, as in mlx-lm.",
)
@option(
    "--train", is_flag=True, default=None, help="Accepted as in mlx-lm; this command always trains."
)
@option(
    "--test",
    section="Evaluation and gates",
    is_flag=True,
    default=None,
    help="Accepted as in mlx-lm; held-out examples are always evaluated.",
)
@options.backend
@option(
    "--force",
    section="Memory and speed",
    is_flag=True,
    help="Train even if the plan says that the run cannot fit into memory or on the disk.",
)
@option(
    "--show-mask",
    section="Model and data",
    is_flag=True,
    help="Show which tokens of the first examples are trained on, and exit.",
)
@option(
    "--hosts",
    section="Several machines",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Run on all machines of a host file of MLX, as mlx.distributed_config writes it; each "
    "takes its share of every batch.",
)
@options.as_json
@option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Also print details of data and adapters, and the reasons for automatic choices.",
    common=True,
)
@option(
    "-q",
    "--quiet",
    is_flag=True,
    help="Print the result line only.",
    common=True,
)
def train(
    configs: tuple[str, ...],
    force: bool,
    show_mask: bool,
    verbose: bool,
    quiet: bool,
    **flags,
) -> None:
    """Fine-tune a model and write the result as a pack.

    Without arguments, the bundled Qwen3 is trained on the bundled data in a minute or two.

    A data folder contains train.jsonl, and optionally valid.jsonl and test.jsonl, with one JSON
    object per line: {"messages": [{"role", "content"}]}, {"prompt", "completion"} or {"text"}. With
    --task embedding, each object is {"sentence1", "sentence2", "score"} or {"anchor", "positive"},
    optionally with "negative".

    Every flag and YAML key of mlx_lm.lora keeps its meaning or is rejected with the equivalent.
    "tiny:" marks the defaults for the bundled model.
    """
    from ..distributed.group import group
    from ..distributed.link import launched
    from ..tasks.phases import check_overridden
    from ..tasks.task import task_class
    from ..training.run import train_request
    from ..training.settings import Request

    flags = {k: v for k, v in flags.items() if v is not None}
    hosts = flags.pop("hosts", None)
    recipe = recipe_of(flags, read_recipes(configs))
    check_overridden(recipe.train, recipe.specified)
    level = NORMAL
    if quiet:
        level = QUIET
    elif verbose:
        level = VERBOSE
    display = Display(level)

    if show_mask:
        if not TASKS[recipe.train.task].masks:
            raise PackError(
                "--show-mask: shows the tokens that the loss is on. Examples of "
                f"--task {recipe.train.task} have none.",
                "conflict",
            )

        from . import mask

        mask.show_mask(recipe, display)
        return

    if hosts is not None and launched() is None:
        _launch_on(hosts, recipe)

    request = Request(recipe, recipe.model, display=display, force=force)
    if recipe.run.get("seeds"):
        _train_seeds(request)
        return

    try:
        result = train_request(request)
    except RunStopped as stopped:
        stopped.continue_with(resume_command("out" in recipe.run, stopped.pack))
        raise
    if not group().is_first:  # which prints
        return

    train = recipe.train
    lines = task_class(train.last_task, train).report_lines(result.report)
    if quiet:
        lines = lines[:1]
    print_report(result.to_json(), lines)
    exit_if_failed(failures(result.report["gates"]))


def _train_seeds(request: "Request") -> None:
    """Train the packs of several seeds, and print what became of them."""
    from ..training.seeds import report_lines, train_with_seeds

    try:
        result = train_with_seeds(request)
    except RunStopped as stopped:
        stopped.continue_with(resume_command(True, stopped.pack))
        raise

    lines = report_lines(result)
    if request.display.level == QUIET:
        lines = lines[:1]
    print_report(result.to_json(), lines)
    exit_if_failed(result.failures())


def _launch_on(hosts: Path, recipe: Recipe) -> NoReturn:
    """Train on several machines, and exit as the first of them does."""
    from .hosts import launch

    if recipe.run.get("seeds"):
        raise PackError(
            "--seeds: cannot be combined with --hosts. Leave one of them out.", "conflict", "seeds"
        )
    if "out" not in recipe.run:
        text = "needs a folder for the pack. Name it with --out DIR."
        raise PackError(f"--hosts: {text}", "conflict", "out")
    arguments = options.arguments_without(("--hosts",))
    raise click.exceptions.Exit(launch(hosts, ["train", *arguments]))


def resume_command(names_pack: bool, pack: Path) -> str:
    """Return the shell command that continues this run, with ``--out`` unless ``names_pack``."""
    command = click.get_current_context().command_path.split()
    command += options.arguments_without(_OF_A_FRESH_RUN)
    if not names_pack:
        command += ["--out", str(pack)]
    return shlex.join([*command, "--resume"])
