"""A run before its first step: settings, base, examples and memory plan, loaded and checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..adapters.trainable import find_method
from ..bases.files import check_files, resolve_checkpoint
from ..bases.precision import STORED, ComputeDtype
from ..config.lora import LoRAConfig
from ..config.recipe import Recipe
from ..data.bad_rows import LeftOut
from ..data.json_layout import json_layout
from ..data.rows import Splits
from ..errors import PackError
from ..evaluation.images import images_of_run
from ..memory.memory_choice import MemoryChoice
from ..nn.quantized import count_weights
from ..packs.base import Base, load_base
from ..tasks.phases import PhaseData, counts_of, left_out_rows
from ..tasks.task import Task, make_tasks, task_class
from .identity import check_resume, public_recipe, run_identity, with_template_date
from .initial_adapters import initial_adapters, with_initial_template
from .observers.trackers import check_report_to
from .planning import check_headers, fit_into_memory, run_dtype, show_dtype
from .ranks import check_examples, check_same_on_all_ranks
from .rates import note_rates
from .run_folder import RunFolder
from .settings import Place, Request, Run, RunSettings, with_batches
from .watch import check_validated


@dataclass(frozen=True)
class PreparedRun:
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
    base_weights: int
    memory: MemoryChoice

    @property
    def task(self) -> Task:
        """The task of the last phase, which the pack and its results are of."""
        return self.tasks[self.run.last_phase.train.task]


def prepared_request(request: Request, settings: RunSettings) -> Request:
    """Return a request after what has to be written before its base is loaded."""
    task = task_class(settings.train.last_task, settings.train)
    return replace(request, recipe=task.prepared_recipe(request.recipe, request.display))


def prepare(request: Request, settings: RunSettings, place: Place) -> PreparedRun:
    """Return a run with its base loaded and its examples encoded, as it began if it is resumed."""
    check_report_to(request.option("report_to"), request.option("project_name"))
    display = request.display
    folder = place.folder
    earlier = None
    if place.resume:
        earlier = RunFolder(folder).check_resumable()
        place = replace(place, resume_point=RunFolder(folder).resume_point())
    settings = settings.as_it_began(earlier)
    adapters = initial_adapters(request.option("resume_adapter_file"), earlier)

    tasks = make_tasks(settings.phases, settings.train, settings.lora, request.calls)
    splits = [phase.load_rows() for phase in settings.phases]
    check_validated(settings.train, splits[-1])
    base, dtype = _open_base(request, settings, place, tasks)
    settings = with_initial_template(settings, request.option("resume_adapter_file"))
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

    base_weights = count_weights(base.model)
    memory = fit_into_memory(run, base, target, data)
    if run.train.matmul_path == "auto":
        identity["matmul_path"] = memory.choice.matmul_path

    return PreparedRun(
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
        base_weights=base_weights,
        memory=memory,
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
