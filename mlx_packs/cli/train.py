"""`packs train`: what it does is `mlx_packs.train_pack`."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from .. import signals
from ..config.choices import TASKS
from ..config.recipe import Recipe, RunOptions, base_defaults
from ..config.schema import TrainConfig
from ..config.values import typed_value
from ..display import NORMAL, QUIET, VERBOSE, Display
from ..errors import PackError, RunStopped, errors_of
from ..gates import failures
from ..reading import read_json
from ..terminal import pass_on
from . import options
from .options import option
from .output import exit_if_failed, print_report
from .recipe import read_recipes, recipe_of
from .studio import run_shown
from .topics import TopicCommand

if TYPE_CHECKING:
    from ..training.settings import Request

_OF_A_FRESH_RUN = ("--overwrite", "--resume", "--resume-adapter-file")
# Handlers that do nothing, not SIG_IGN, which the ranks would inherit: only they handle a signal,
# save and end together.
_LAUNCH = (
    "import signal; [signal.signal(n, lambda *_: None) for n in (1, 2, 15)]; "
    "from mlx._distributed_utils.launch import main; main()"
)
_ENDED = re.compile(rb"\[WARN\] Node with rank (\d+) (?:exited with code (-?\d+)|was killed)")
_OF_MLX = b"[ring] "  # begins what MLX prints of lost connections
_LOCAL = ("127.0.0.1", "localhost")
_REACH_S = 5
# The options that the short help has.
COMMON = """
configs model data task out method rank alpha target_modules iters epochs learning_rate batch_size
max_seq_length grad_accumulation_steps seed quantize loss_on packing grad_checkpoint offload_base
metric time resume overwrite report_to json verbose quiet
""".split()


def _default_text(name: str, *task: str) -> str:
    """Return the default of a setting, and that for the bundled model where it is another one."""
    texts = [options.shown_default(name, *task)]

    default = options.SETTINGS[name].default
    tiny = base_defaults(RunOptions.model, *task or [TrainConfig.task], TrainConfig.method)
    if tiny.get(name, default) != default:
        texts.append(f"tiny: {tiny[name]}")
    return "; ".join(text for text in texts if text)


@click.command(cls=TopicCommand, common=COMMON, by_task=True)
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
    "--rows",
    section="Model and data",
    metavar="N,N",
    help="Examples that --show-mask shows instead, by their numbers in messages: 17 of "
    "train.jsonl:17.",
)
@option(
    "--hosts",
    section="Several machines",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Run on all machines of a host file of MLX, as mlx.distributed_config writes it; each "
    "takes its share of every batch.",
)
@option(
    "--open",
    "opens",
    is_flag=True,
    help="Open the live page of the run in the browser, as `packs studio` shows it.",
)
@options.as_json
@option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Also print details of data and adapters, and the reasons for automatic choices.",
)
@option("-q", "--quiet", is_flag=True, help="Print the result line only.")
def train(
    configs: tuple[str, ...],
    force: bool,
    show_mask: bool,
    rows: str | None,
    verbose: bool,
    quiet: bool,
    opens: bool,
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

        from .data import show_mask

        numbers = typed_value(rows or (), tuple[int, ...], "rows")
        show_mask(recipe, display, numbers)
        return
    if rows is not None:
        raise PackError("--rows: applies to --show-mask only.", "conflict", "rows")

    if opens and (hosts or recipe.run.get("seeds")):
        raise PackError("--open: cannot be combined with --hosts or --seeds.", "conflict", "open")
    if hosts is not None and launched() is None:
        _launch_on(hosts, recipe)

    request = Request(recipe, recipe.model, display=display, force=force)
    if recipe.run.get("seeds"):
        _train_seeds(request)
        return

    with run_shown(recipe.run.get("out")) if opens else nullcontext():
        with continuing("out" in recipe.run):
            result = train_request(request)
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

    with continuing(names_pack=True):
        result = train_with_seeds(request)

    lines = report_lines(result)
    if request.display.level == QUIET:
        lines = lines[:1]
    print_report(result.to_json(), lines)
    exit_if_failed(result.failures())


def _launch_on(hosts: Path, recipe: Recipe) -> NoReturn:
    """Train on several machines, and exit as the first of them does."""
    if recipe.run.get("seeds"):
        raise PackError(
            "--seeds: cannot be combined with --hosts. Leave one of them out.", "conflict", "seeds"
        )
    if "out" not in recipe.run:
        text = "needs a folder for the pack. Name it with --out DIR."
        raise PackError(f"--hosts: {text}", "conflict", "out")
    arguments = options.arguments_without(("--hosts",))
    raise click.exceptions.Exit(launch(hosts, ["train", *arguments]))


@contextmanager
def continuing(names_pack: bool) -> Iterator[None]:
    """Name the command that continues a run that stops, with ``--out`` unless ``names_pack``."""
    try:
        yield
    except RunStopped as stopped:
        command = click.get_current_context().command_path.split()
        command += options.arguments_without(_OF_A_FRESH_RUN)
        if not names_pack:
            command += ["--out", str(stopped.pack)]
        stopped.continue_with(shlex.join([*command, "--resume"]))
        raise


def launch(file: Path, arguments: Sequence[str]) -> int:
    """Run `packs` on the machines of a host file; return the exit code of the first rank.

    Raises:
        PackError: the file is no host file, or a machine cannot be reached.
    """
    hosts = _read_hosts(file)
    _check_reachable(hosts)

    command = [sys.executable, "-m", "mlx_packs", *arguments]
    process = subprocess.Popen(
        [sys.executable, "-c", _LAUNCH, "--hostfile", str(file), "--", *command],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )

    code = 0
    with signals.forwarded(lambda number: os.killpg(process.pid, number)):
        for line in process.stderr:
            if ended := _ENDED.search(line):
                if ended[1] == b"0":
                    code = int(ended[2] or -signal.SIGKILL)
            elif not line.startswith(_OF_MLX):  # the ranks say it themselves
                pass_on(line)
        launched = process.wait()

    return code or launched


def _read_hosts(file: Path) -> list[str]:
    if not file.is_file():
        raise PackError(f"--hosts {file}: no such file.", "not-found", "hosts")

    with errors_of("hosts"):
        content = read_json(file, object)

    hosts = content.get("hosts") if isinstance(content, dict) else content
    if not isinstance(hosts, list) or len(hosts) < 2:
        raise PackError(f"--hosts {file}: must list two machines or more.", "invalid", "hosts")

    for number, host in enumerate(hosts):
        if not isinstance(host, dict) or not all(host.get(key) for key in ("ssh", "ips")):
            raise PackError(
                f'--hosts {file}: machine {number} needs "ssh" and "ips". '
                "`mlx.distributed_config` writes such files.",
                "invalid",
                "hosts",
            )

    return [str(host["ssh"]) for host in hosts]


def _check_reachable(hosts: Sequence[str]) -> None:
    for host in dict.fromkeys(hosts):
        if host not in _LOCAL and (why := _fault_of(host)):
            raise PackError(
                f"--hosts: {host} cannot be reached by ssh without a password ({why}). Try "
                f"`ssh {host} true`.",
                "network",
                "hosts",
            )


def _fault_of(host: str) -> str:
    """Return why a machine cannot be reached; empty if it can."""
    options = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={_REACH_S}")
    try:
        done = subprocess.run(
            ["ssh", *options, host, "true"], capture_output=True, text=True, timeout=4 * _REACH_S
        )
    except FileNotFoundError:
        return "there is no ssh"
    except subprocess.TimeoutExpired:
        return "no answer"

    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[-1]
