"""Train a pack: examples in, adapters on a frozen base (or its own weights), a folder out.

`_train` is the one path of every task and every method; it reads from top to bottom.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import macos, runtime, signals
from ..bases.files import TINY
from ..config.arguments import checked_arguments
from ..config.data import Columns
from ..config.fields import Settings
from ..config.lora import LoRAConfig
from ..config.recipe import check_method, resolve_new
from ..config.schema import TrainConfig
from ..data.in_memory import Data, columns_of
from ..display import Display, display_of
from ..distributed.group import group
from ..errors import Float16Overflow, PackError
from ..evaluation.metrics import MetricFunction, own_metric, own_metric_of
from ..objectives.causal_lm import TargetLoss
from ..ops import _backend, watchdog
from ..packs.base import Base
from .attached import attached, bound_objectives
from .fit import start_fit
from .observer import Observer
from .prepare import prepare, prepared_request
from .ranks import folders_of_rank, ranks_of_run
from .result import RunReport, TrainRun, report_of, save_pack
from .settings import Place, Request, RunSettings, recipe_of
from .status import followed
from .watch import resumable


@checked_arguments
def train_pack(  # noqa: PLR0913 (the public face)
    base: Base | str | Path = TINY,
    data: Data | None = None,
    lora: LoRAConfig | Mapping[str, Any] | None = None,
    train: TrainConfig | Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    columns: Columns | None = None,
    *,
    callbacks: Sequence[Observer] = (),
    loss: TargetLoss | None = None,
    reward: Callable[..., Sequence[float | None]] | None = None,
    metric: MetricFunction | None = None,
    overwrite: bool = False,
    resume: bool = False,
    resume_adapter_file: str | None = None,
    report_to: str | None = None,
    project_name: str | None = None,
    trust_remote_code: bool = False,
    force: bool = False,
    progress: bool | Display = True,
) -> TrainRun:
    """Train a pack and save it.

    Args:
        base: A loaded base model, or a name as in `load_base`.
        data: A folder, a file, a Hugging Face dataset id, ``"tiny"``, or examples in memory:
            mappings, a DataFrame, a Dataset, or a mapping of split names to these.
        lora: Targets, ranks and scales of the adapters, as a config or a mapping of its settings.
        train: Settings of the training, likewise. For ``"tiny"`` both have defaults of their own.
        out: Folder to write the pack to; by default ``packs/<data>``, with a number if that exists.
            The run folder next to it, ``<out>-run``, has the checkpoints and metrics.
        columns: Names of the columns, likewise, and, without ``data``, the source of the examples.
        callbacks: Observers of the run; one of them can end it with ``stop_reason``.
        loss: A function that replaces the cross-entropy; it maps logits [M, V] in float32 and
            targets [M] to losses [M]. A resumed run requires a function of the same name.
        reward: A function that rewards the completions of ``task="grpo"``: lists of prompts,
            completions and columns by name in, a number for each completion out.
        metric: A function that scores a generated answer, in place of ``metric`` of `TrainConfig`:
            the answer and the expected one in, a number from 0 to 1 out.
        overwrite: Whether to replace the pack and the run of ``out`` if they exist.
        resume: Whether to continue the run of ``out`` from its last checkpoint; the result is the
            same as of an uninterrupted run. All other arguments must be the original ones.
        resume_adapter_file: Pack to start from, its Hub id, or a file in mlx-lm's names.
        report_to: Services to log to, separated by commas: tensorboard, wandb, swanlab.
        project_name: Name of the project for ``report_to``.
        trust_remote_code: Whether to allow executing Python code shipped with the base model.
        force: Whether to train even if the run is estimated not to fit into memory or on the disk.
        progress: Whether to show the progress on standard error, as bars in a terminal.

    Returns:
        The pack, the run folder, the report and the loss curve.

    Raises:
        PackError: If the caller can correct the cause; no incomplete pack is left behind.
        RunStopped: If a signal, memory or the disk ended the run; its checkpoint is saved.
    """
    recipe = recipe_of(
        *(base, data, lora, train, columns),
        out=out,
        overwrite=overwrite,
        resume=resume,
        resume_adapter_file=resume_adapter_file,
        report_to=report_to,
        project_name=project_name,
        trust_remote_code=trust_remote_code,
    )
    functions = {"loss": loss, "reward": reward, "metric": own_metric_of(metric)}
    shown = display_of(progress)
    return train_request(Request(recipe, base, shown, force, tuple(callbacks), **functions))


@checked_arguments
def train(
    model: Base | str | Path,
    data: Data,
    *,
    callbacks: Sequence[Observer] = (),
    force: bool = False,
    progress: bool | Display = True,
    **settings: Any,
) -> TrainRun:
    """Train a pack with settings by name, as ``packs train`` does, and save it.

        run = mp.train("mlx-community/Qwen3-4B-Instruct-2507-4bit", "tickets/", epochs=3, rank=16)

    Args:
        model: A loaded base model, or a name as in `load_base`.
        data: As of `train_pack`.
        callbacks: As of `train_pack`.
        force: As of `train_pack`.
        progress: As of `train_pack`.
        settings: Settings of `LoRAConfig`, `TrainConfig` and `DataConfig`, and the other arguments
            of `train_pack`, named as the flags of ``packs train``, or as in mlx-lm. ``loss``,
            ``reward`` and ``metric`` are a name, or a function as of `train_pack`.

    Returns:
        As of `train_pack`.

    Raises:
        PackError: As of `train_pack`.
        RunStopped: As of `train_pack`.
    """
    if "seeds" in settings:
        raise PackError("seeds: use train_seeds, which trains several packs.", flag="seeds")
    for name in ("lora", "train", "columns"):
        if isinstance(settings.get(name), (Mapping, Settings)):
            text = "give its settings by name, as in rank=16, or use train_pack."
            raise PackError(f"{name}: {text}", flag=name)

    names = [name for name in ("loss", "reward", "metric") if callable(settings.get(name))]
    functions = {name: settings.pop(name) for name in names}
    if "metric" in functions:
        functions["metric"] = own_metric(functions["metric"])
    name = model.name if isinstance(model, Base) else str(model)
    recipe = resolve_new({**settings, "model": name})
    check_method(recipe)
    recipe = replace(recipe, data=columns_of(data, recipe.data), names_data=True)
    shown = display_of(progress)
    return train_request(Request(recipe, model, shown, force, tuple(callbacks), **functions))


def train_request(request: Request) -> TrainRun:
    """Train a pack as a caller asks, and save it; errors are as of `train_pack`.

    After an overflow in float16 it continues in bfloat16 from the last update, as if resumed.
    """
    _backend.start_record()
    settings = RunSettings.of(request)
    request = request.with_own_metric()
    resume = request.option("resume")
    columns = settings.last_phase.columns
    folders = folders_of_rank(request.option("out"), columns, request.option("overwrite"), resume)
    with ExitStack() as closes:
        closes.enter_context(signals.handled())
        pack, folder = closes.enter_context(folders)
        status = None
        if group().is_first:
            status = closes.enter_context(followed(request.display, folder, resume))
        if not runtime.on_cpu():  # before MLX uses the GPU
            if line := watchdog.limit_operations(settings.train.max_seq_length):
                request.display.line("gpu", line)
        request = prepared_request(request, settings).of_rank()
        settings = RunSettings.of(request)
        closes.enter_context(runtime.memory_limits())
        closes.enter_context(ranks_of_run(settings.lora, settings.train))
        if settings.train.awake and macos.is_macos():
            closes.enter_context(macos.kept_awake(request.display.line))

        place = Place(pack, folder, resume, status=status)
        try:
            return _train(request, settings, place)
        except Float16Overflow as overflow:
            if isinstance(request.base, Base):  # it is the caller's
                raise
            fault = overflow.fault
            saved = overflow.saved

        request.display.line("dtype", f"{fault}; the run continues in bfloat16")
        gc.collect()  # the base in float16, which the exception referenced
        place = replace(place, resume=resume or saved, overflow=fault)
        return _train(request, settings, place)


def _train(request: Request, settings: RunSettings, place: Place) -> TrainRun:
    """Train as a request and its settings specify, in the run's own folders."""
    prepared = prepare(request, settings, place)
    run = prepared.run
    with attached(prepared) as trainable:
        with bound_objectives(prepared, trainable) as (objectives, origin):
            fit = start_fit(prepared, trainable, objectives, origin)
            with resumable(run):
                fit.train()
                summary = prepared.task.summary(fit.trained)
        with resumable(run):
            pack = save_pack(prepared, trainable, fit, summary)

    report = report_of(prepared, trainable, fit, pack, summary)
    for observer in fit.observers:  # which may add to it
        observer.on_end(report)
    return TrainRun(pack, run.folder, RunReport(report), fit.curve)
