"""Train a pack: examples in, adapters on a frozen base (or its own weights), a folder out.

`run` is the one path of every task and every method; it reads from top to bottom.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import runtime, signals
from ..adapters.saved_modules import attach_method
from ..adapters.trainable import Trainable, find_method, round_adapters
from ..bases.files import TINY, check_files, resolve_checkpoint
from ..bases.precision import STORED, ComputeDtype
from ..config.arguments import checked_arguments
from ..config.choices import TASKS
from ..config.data import Columns
from ..config.lora import LoRAConfig
from ..config.recipe import Recipe
from ..config.schema import TrainConfig
from ..data.bad_rows import LeftOut, write_quarantine
from ..data.in_memory import Data, InMemoryRows
from ..data.json_layout import json_layout
from ..data.rows import Splits
from ..display import VERBOSE, Display, display_of, shown_count
from ..errors import Float16Overflow, PackError
from ..evaluation.images import images_of_run, images_report
from ..files import make_folder
from ..gates import Gates, evaluate_gates, gate_limits
from ..late import load
from ..memory.memory_choice import MemoryChoice
from ..nn.quantized import count_weights
from ..objectives.causal_lm import TargetLoss
from ..objectives.reference import PhaseStart
from ..ops import _backend, dispatch, watchdog
from ..packs.adapter_config import adapter_config_of
from ..packs.base import Base, load_base
from ..packs.making import pack_of
from ..packs.pack import Pack
from ..run_clock import RunClock
from ..tasks.phases import PhaseData, counts_of, left_out_rows
from ..tasks.task import Summary, Task, make_tasks, task_class
from .fit import Fit, Objectives, check_scores, score_phases
from .guards import Guarded, make_guards
from .identity import (
    check_resume,
    public_recipe,
    run_identity,
    with_template_date,
)
from .noise import add_noise
from .observer import Observer
from .observers import ObservedRun, make_observers
from .observers.trackers import check_report_to
from .on_nan import OnNan
from .planning import check_headers, fit_into_memory, matmul_paths_by_name, run_dtype, show_dtype
from .ranks import check_examples, check_same_on_all_ranks, folders_of_rank, ranks_of_run
from .rates import note_rates
from .result import RunReport, TrainRun, in_order, losses_of, measured
from .run_folder import check_resumable, clear_run, reference_file, resume_point, write_identity
from .settings import Place, Request, Run, RunSettings, recipe_of, with_batches
from .start_adapters import compare_with_start, load_adapters, start_of, with_start_template
from .step import Steps, take_alone
from .stopping import resumable
from .unattended import unattended
from .watch import check_validated


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
        overwrite: Whether to replace the pack and the run of ``out`` if they exist.
        resume: Whether to continue the run of ``out`` from its last checkpoint; the result is the
            same as of an uninterrupted run. All other arguments must be the original ones.
        resume_adapter_file: Pack to start from, its Hub id, or a file in mlx-lm's names.
        report_to: Services to log to, separated by commas: tensorboard, trackio, wandb, swanlab.
        project_name: Name of the project for ``report_to``.
        trust_remote_code: Whether to allow executing Python code shipped with the base model.
        force: Whether to train even if the run is estimated not to fit into memory or on the disk.
        progress: Whether to show the progress on standard error, as bars in a terminal or a
            notebook.

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
    request = Request(recipe, base, display_of(progress), force, tuple(callbacks), loss, reward)
    return train_request(request)


def train_request(request: Request) -> TrainRun:
    """Train a pack as a caller asks, and save it; errors are as of `train_pack`."""
    request.display.clock = RunClock(compiles=runtime.COMPILES)
    _backend.start_record()
    settings = RunSettings.of(request)

    check_report_to(request.option("report_to"), request.option("project_name"))

    resume = request.option("resume")
    columns = settings.last_phase.sources[0]
    folders = folders_of_rank(request.option("out"), columns, request.option("overwrite"), resume)
    with signals.handled(), folders as (pack, folder):
        if not runtime.on_cpu():  # before MLX uses the GPU
            if line := watchdog.limit_operations(settings.train.max_seq_length):
                request.display.line("gpu", line)
        task = task_class(settings.train.last_task, settings.train)
        request = replace(request, recipe=task.prepared_recipe(request.recipe, request.display))
        return run(request.of_rank(), RunSettings.of(request), Place(pack, folder, resume))


@runtime.memory_limits()
def run(request: Request, settings: RunSettings, place: Place) -> TrainRun:
    """Train as a request and its settings specify, in the run's own folders.

    After an overflow in float16 it continues in bfloat16 from the last update, as if resumed.
    """
    with (
        ranks_of_run(settings.lora, settings.train),
        unattended(settings.train.awake, place.pack, request.display),
    ):
        try:
            return take_alone(steps_of(request, settings, place))
        except Float16Overflow as overflow:
            if isinstance(request.base, Base):  # it is the caller's
                raise
            fault = overflow.fault
            saved = overflow.saved

        request.display.line("dtype", f"{fault}; the run continues in bfloat16")
        gc.collect()  # the base in float16, which the exception referenced
        place = replace(place, resume=place.resume or saved, overflow=fault)
        return take_alone(steps_of(request, settings, place))


@dataclass(frozen=True)
class _Start:
    """A run with its tasks, base and examples, checked; nothing is trained yet."""

    run: Run
    tasks: Mapping[str, Task]
    base: Base
    dtype: ComputeDtype
    target: Base  # that the loss goes through
    lora: LoRAConfig  # which of its modules are adapted
    data: Sequence[PhaseData]
    identity: dict
    recipe: dict  # public
    sources: Sequence[str]  # of each phase, in public
    left_out: Mapping[str, LeftOut]
    json_layout: dict  # of the answers in training rows

    @property
    def task(self) -> Task:
        """The task of the last phase, which the pack and its results are of."""
        return self.tasks[self.run.last_phase.train.task]


def steps_of(request: Request, settings: RunSettings, place: Place) -> Steps[TrainRun]:
    """Yield the steps of a run; return what became of it."""
    start = _start(request, settings, place)
    run = start.run
    task = start.task

    memory = fit_into_memory(
        run,
        start.base,
        start.target,
        start.data,
        task.planned_settings(run.train),
        task.unplanned_recompute,
    )
    if run.train.matmul_path == "auto":
        start.identity["matmul_path"] = memory.choice.matmul_path

    base_weights = count_weights(start.base.model)
    with _attached(start, memory, base_weights) as (trainable, paths):
        with _bound(start, trainable, memory) as (objectives, origin):
            fit = yield from _train(start, trainable, objectives, origin)
            with resumable(run):
                summary = task.summary(trainable, start.data, fit.trained(), start.sources)
        with resumable(run):
            pack = _save(start, trainable, fit, summary, memory)
            compare_with_start(run, pack)

    report = in_order(
        {
            "gates": _check_gates(start, pack, summary, memory),  # first: they change its size
            **_report(run, pack, fit, summary, memory),
            **images_report(start.base),
            "bad_rows": {key: bad.counts() for key, (bad, _) in start.left_out.items()},
            "compute_dtype": start.dtype.to_json(),
            "matmul_paths": paths,
            "method": trainable.method,
            "base_weights": base_weights,
        }
    )
    for observer in fit.observers:  # which may add to it
        observer.on_end(report)
    for guard in fit.guards:
        guard.at_end()
    return TrainRun(pack, run.folder, RunReport(in_order(report)), fit.curve)


def _start(request: Request, settings: RunSettings, place: Place) -> _Start:
    """Return a run with its base loaded and its examples encoded, as it began if it is resumed."""
    display = request.display
    folder = place.folder
    earlier = None
    if place.resume:
        earlier = check_resumable(folder)
        place = replace(place, resume_point=resume_point(folder))
    settings = settings.as_it_began(earlier)
    adapters = start_of(request.option("resume_adapter_file"), earlier)

    tasks = make_tasks(settings.phases, settings.train, settings.lora, request.calls)
    splits = [phase.load_rows() for phase in settings.phases]
    check_validated(settings.train, splits[-1])
    base, dtype = _open_base(request, settings, place, tasks)
    settings = with_start_template(settings, request.option("resume_adapter_file"))
    base = base.with_chat_template(settings.columns.chat_template)
    targets = {name: task.checked_target(base) for name, task in tasks.items()}
    target, lora = targets[settings.last_phase.train.task]

    settings = with_template_date(settings, base, display)
    with images_of_run(base, display):
        data = _encode(tasks, base, settings, splits)
    settings, data = with_batches(settings, data, display)
    run = Run(
        **vars(settings),
        request=request,
        place=place,
        begins_with_adapters=adapters is not None,
    )
    note_rates(run, earlier)

    recipe = Recipe(
        *(run.lora, run.train, run.columns), {"model": base.name, "resume_adapter_file": adapters}
    )
    identity = run_identity(recipe, base, run, splits)
    if earlier is not None:
        check_resume(folder, base.path, identity, earlier)
    check_same_on_all_ranks(identity | {"compute dtype": dtype.name})
    check_examples(counts_of(data))

    return _Start(
        run=run,
        tasks=tasks,
        base=base,
        dtype=dtype,
        target=target,
        lora=lora,
        data=data,
        identity=identity,
        recipe=public_recipe(recipe, base),
        sources=[phase.public_source(read) for phase, read in zip(run.phases, splits, strict=True)],
        left_out=left_out_rows(run.phases, splits),
        json_layout=json_layout(splits[-1], run.last_phase.sources[0]),
    )


def _encode(
    tasks: Mapping[str, Task], base: Base, settings: RunSettings, splits: Sequence[Splits]
) -> list[PhaseData]:
    """Each task encodes the examples of its phases."""
    read = {phase.name: own for phase, own in zip(settings.phases, splits, strict=True)}
    encoded: dict[str, PhaseData] = {}
    for name, task in tasks.items():
        own = [phase for phase in settings.phases if phase.train.task == name]
        data = task.encode(base, own, [read[phase.name] for phase in own])
        encoded |= {each.phase.name: each for each in data}
    return [encoded[phase.name] for phase in settings.phases]


@contextmanager
def _bound(
    start: _Start, trainable: Trainable, memory: MemoryChoice
) -> Iterator[tuple[Objectives, PhaseStart]]:
    """Yield the objective of each phase, by its name, and what the run starts from."""
    run = start.run
    objectives = {}
    starts = {}
    origin = PhaseStart(trainable, reference_file(run.folder, 0), not run.begins_with_adapters)
    origin.take(fresh=not run.place.resume)
    for phase in run.phases:
        starts[phase.name] = origin
        if phase.start:
            file = reference_file(run.folder, phase.start)
            starts[phase.name] = PhaseStart(trainable, file, run=origin)

    with ExitStack() as closes:
        for task in start.tasks.values():
            own = [data for data in start.data if data.task is task]
            bound = task.bind(trainable, own, starts, memory)
            for objective in dict.fromkeys(bound):
                closes.callback(objective.close)
            objectives |= {d.phase.name: each for d, each in zip(own, bound, strict=True)}

        if run.train.neftune_noise_alpha:
            add_noise(trainable, run.train.neftune_noise_alpha)
        yield objectives, origin


@contextmanager
def _attached(
    start: _Start, memory: MemoryChoice, base_weights: int
) -> Iterator[tuple[Trainable, dict]]:
    """Attach what is trained to the base; yield it and how frozen weights are used, by name."""
    run = start.run
    with run.display.working(run.train.method, "attaching"):  # pissa decomposes every weight
        trainable = attach_method(start.target, start.lora, run.train, memory.choice.matmul_path)

    try:
        _describe(trainable, run.display, base_weights)
        paths = matmul_paths_by_name(trainable, memory.choice)

        if (file := run.request.option("resume_adapter_file")) is not None:
            load_adapters(trainable, file)
        trainable.recompute(memory.recompute)
        if run.train.pipeline:
            trainable = load("extras.pipeline.adapters:of_stage")(trainable, run.display)

        yield trainable, paths
    finally:
        trainable.detach()


def _save(
    start: _Start, trainable: Trainable, fit: Fit, summary: Summary, memory: MemoryChoice
) -> Pack:
    run = start.run
    facts = summary.facts
    if fit.end:
        facts = {"end": fit.end} | facts

    objective = summary.objective
    if start.json_layout:
        objective = objective | {"json_layout": start.json_layout}

    data = {
        "source": ", ".join(dict.fromkeys(start.sources)),
        "fingerprint": start.identity["data"],
        "rows": counts_of(start.data),
    }
    if report := images_report(start.base):
        data["images"] = report["images"]["count"]

    pack = pack_of(
        trainable,
        run.train.pack_dtype,
        objective=objective,
        data=data,
        recipe=start.recipe,
        **facts,
        eval=summary.eval,
        measured={"compute_dtype": start.dtype.to_json(), **measured(fit, memory)},
    )
    if isinstance(source := run.last_phase.sources[0].data, InMemoryRows):
        pack.examples = source

    replace = run.request.option("overwrite") or run.place.resume
    return pack.save(run.pack, overwrite=replace)


def _open_base(
    request: Request, settings: RunSettings, place: Place, tasks: Mapping[str, Task]
) -> tuple[Base, ComputeDtype]:
    """Return the base, quantized as requested, and its dtype; reject it unread if it cannot fit."""
    train, base, display = settings.train, request.base, request.display
    if isinstance(base, Base):
        for flag, value, default in (
            ("--quantize", train.quantize, "none"),
            ("--compute-dtype", train.compute_dtype, "auto"),
            ("--pipeline", train.pipeline, False),
        ):
            if value != default:
                raise PackError(
                    f"{flag}: this base is loaded already. Pass the option to load_base instead.",
                    "conflict",
                )
        dtype = ComputeDtype(base.compute_dtype, "the base was loaded in it")
    else:
        config = check_files(resolve_checkpoint(base))
        for task in tasks.values():
            task.check(str(base), config["model_type"])
        if not request.force:
            check_headers(base, settings, place.folder)

        dtype = run_dtype(train, place, config)
        with display.working("base", f"loading {base}"):
            base = (request.open_base or load_base)(
                base,
                train.quantize,
                request.option("trust_remote_code"),
                double_quant=train.double_quant,
                keep=train.keep,
                compute_dtype=dtype.cast,
                lazy=all(task.lazy_base for task in tasks.values()),
            )

        if dtype.cast == "auto" and dtype.why == STORED:  # config.json may not name it
            dtype = replace(dtype, name=base.compute_dtype)

    for task in tasks.values():
        task.check(base.name, base.config["model_type"])
    find_method(train.method).check(base, train.matmul_path)
    display.line("base", base.summary())
    show_dtype(display, dtype, train.compute_dtype)
    return base, dtype


def _describe(trainable: Trainable, display: Display, base_weights: int) -> None:
    count = trainable.parameter_count()
    share = f"{100 * count / base_weights:.3g} % of {shown_count(base_weights)}"
    text = f"{count:,} trainable parameters ({share}) · {trainable.details}"
    display.line(trainable.method, text, VERBOSE)

    if trainable.groups:
        display.line("", f"in {len(trainable.groups)} groups that share an input", VERBOSE)
    for note in trainable.notes:
        display.line("note", note)

    model_type = trainable.base.config["model_type"]
    blocks = len(trainable.base.model.layers)
    if trainable.specs and adapter_config_of(trainable.specs, model_type, blocks) is None:
        display.line(
            "note",
            "ranks or scales differ between projections: stock mlx-lm opens what "
            "`packs export --to mlx-lm` makes of this pack",
        )

    for group in trainable.groups:
        for geometry in group.members:
            display.line("", geometry.describe(), VERBOSE)


def _train(
    start: _Start, trainable: Trainable, objectives: Objectives, origin: PhaseStart
) -> Steps[Fit]:
    """Train, round, and score before and after; the first step waits for no score if it can."""
    run = start.run
    float16 = start.dtype.name == "float16"
    before = None
    generates = any(TASKS[task].generates for task in run.train.tasks)  # which tries the reward
    if float16 or generates or len(run.phases) > 1 or run.begins_with_adapters:
        with origin.active():
            before = score_phases(objectives, start.data, run.display)
        if float16:
            check_scores(before, saved=False)

    unit = objectives[run.last_phase.name].unit
    observed = ObservedRun(run, unit, start.identity["recipe"], masks=start.task.masks)
    observers = make_observers(observed)

    make_folder(run.folder)
    if not run.place.resume:
        clear_run(run.folder)
    write_identity(run.folder, start.identity)
    origin.save()
    if run.columns.on_bad_row == "quarantine":
        write_quarantine(run.folder, start.left_out.values())

    guarded = Guarded(run, start.identity, observed.curve, observers)
    fit = Fit(
        run=run,
        trainable=trainable,
        objectives=objectives,
        data=start.data,
        observers=observers,
        curve=observed.curve,
        float16=float16,
        on_nan=OnNan(run, observers),
        origin=origin,
        guards=make_guards(guarded),
    )

    with resumable(run):
        yield from fit.train(before)
        if dispatch.detect() != "reference":
            run.display.line("kernels", _backend.summary())
        round_adapters(trainable, run.train.pack_dtype)
        if before is None:
            with origin.active():
                fit.scores[0] = fit.score()
        fit.scores.append(fit.score())
    return fit


def _check_gates(start: _Start, pack: Pack, summary: Summary, memory: MemoryChoice) -> Gates:
    """Compare the saved pack with its limits; the results go into its manifest."""
    gates = gate_limits(**start.run.train.gates)
    if not gates:
        return {}

    held_out = start.data[-1].held_out_examples
    values = start.task.gate_values(gates, pack, summary, held_out, memory.choice.matmul_path)
    for _ in range(2):  # the manifest, which has the result, is part of the size
        results = evaluate_gates(gates, {**values, "max_pack_mb": pack.size_mb})
        pack._note(gates=results)
    return results


def _report(run: Run, pack: Pack, fit: Fit, summary: Summary, memory: MemoryChoice) -> dict:
    """Return the part of a run's report that does not depend on its method and task."""
    described = ("split", "rows", "available", "targets")

    return {
        "pack": str(run.pack),
        "run": str(run.folder),
        "task": run.last_phase.train.task,
        **summary.report,
        **losses_of(fit.curve),
        "versions": pack.manifest["versions"],
        "steps": fit.state.updates,
        "batches": fit.state.batches,
        **fit.end,
        **{key: value for key, value in summary.eval.items() if key not in described},
        "held_out": {
            **{key: summary.eval[key] for key in described if key in summary.eval},
            **summary.held_out,
        },
        f"trained_{fit.unit}": fit.state.trained_tokens,
        **fit.measured,
        "process_peak_gb": runtime.peak_process_bytes() / 1e9,
        "pack_mb": pack.size_mb,
        "matmul_path": memory.choice.matmul_path,
        "recompute": memory.recompute,
        "trainable_parameters": pack.manifest["adapters"]["parameters"],
        "ops": _backend.record(),
        "plan_peak_gb": memory.peak_gb,
        "plan_disk": memory.disk.to_json() if memory.disk else None,
        "batch_shapes": len(fit.shapes),
        "traces": fit.traces,
    }
