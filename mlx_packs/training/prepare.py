"""A run before its first step: settings, base, examples and memory plan, loaded and checked.

Its identity is its recipe, base, data and date; a resumed run must be the same run.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from ..adapters.trainable import find_method
from ..bases.chat_template import reads_clock
from ..bases.files import check_files, public_name, resolve_checkpoint
from ..bases.fingerprint import changed_texts, fingerprint, text_hashes
from ..bases.precision import STORED, ComputeDtype
from ..config.choices import TASKS
from ..config.fields import fields_where
from ..config.lora import LoRAConfig
from ..config.optimizer import with_arguments
from ..config.recipe import Recipe
from ..config.schema import TrainConfig
from ..data import rows as rows_of
from ..data.json_layout import json_layout
from ..data.row_format import BadRows
from ..data.rows import Splits
from ..data.teacher_cache import TeacherCache
from ..display import Display
from ..errors import PackError, errors_of
from ..evaluation.images import images_of_run
from ..memory.plan import MemoryChoice
from ..nn.quantized import count_weights
from ..packs.base import Base, load_base
from ..packs.manifest import ADAPTERS, MANIFEST, chat_template_of, is_hub_name
from ..packs.pack import Pack
from ..reading import sha256
from ..tasks.phases import PhaseData, counts_of, left_out_rows
from ..tasks.task import Task, make_tasks, task_class
from .observers.trackers import check_report_to
from .planning import check_offload, checked_by_headers, fit_run, run_dtype, show_dtype
from .ranks import check_examples, check_same_on_all_ranks
from .run_folder import RunFolder, check_unchanged
from .settings import Place, Request, Run, RunSettings, notes_on_rates, with_batches
from .watch import check_validated

FLAG = "--resume-adapter-file"


def run_identity(recipe: Recipe, base: Base, run: Run, splits: Sequence[rows_of.Splits]) -> dict:
    """Return the recipe of a run, the fingerprints of its base and its data, and its own loss."""
    identity: dict = {"recipe": recipe.to_json()}
    if run.request.loss:
        identity["loss"] = run.request.calls.loss_name
    if (folder := recipe.train.teacher_cache) is not None:
        identity["teacher"] = TeacherCache.at(folder).facts.digest
    if (teacher := recipe.train.teacher) is not None:
        identity["teacher"] = fingerprint(resolve_checkpoint(teacher))

    data = {
        phase.manifest_key(split): read.fingerprint(split)
        for phase, read in zip(run.phases, splits, strict=True)
        for split in read.present()
    }
    return identity | {
        "base": base.fingerprint,
        "base_text_files": text_hashes(base.path),
        "data": data,
    }


def check_resume(run: Path, base: Path, identity: dict, earlier: dict) -> None:
    """Check that a resumed run is the same run: base, data and everything that shapes a step."""
    teacher = "teacher" if identity["recipe"].get("teacher") else "teacher_cache"
    for key, flag, other in (
        ("base", "model", "another base"),
        ("data", "data", "other examples"),
        ("teacher", teacher, "another teacher"),
        ("loss", "loss", f"the loss {earlier.get('loss', 'cross-entropy')}"),
    ):
        if earlier.get(key) != identity.get(key):
            raise PackError(
                f"--resume: {run} was trained with {other}. Resume with the original {key}.",
                "mismatch",
                flag,
            )

    if names := changed_texts(base, earlier["base_text_files"]):
        raise PackError(
            f"--resume: {run} was trained with another {names[0]} of its base. Resume with the "
            "original base.",
            "mismatch",
            "model",
        )

    # an option that is newer than the run was what it is by default
    newest = json.loads(json.dumps(Recipe().to_json()))
    then = _with_head(with_arguments(newest | earlier["recipe"]))
    now = _with_head(with_arguments(newest | json.loads(json.dumps(identity["recipe"]))))

    may_change = set(fields_where(TrainConfig, resumable=True))
    if not then["dropout"]:  # else other masks would be drawn
        may_change |= set(fields_where(TrainConfig, resumable="without-dropout"))
    if "phases" in then:
        may_change.discard("iters")  # where one phase ends, the next begins

    fixed = sorted((set(now) | set(then)) - may_change)
    check_unchanged("--resume", then, {key: now.get(key) for key in fixed})


def _with_head(recipe: dict) -> dict:
    """Return a recipe with the head that ``auto`` means."""
    task = TASKS.get(str(recipe["task"]))
    if task is None:
        return recipe
    return recipe | {"head": task.head_for(str(recipe["head"]))}


def public_recipe(recipe: Recipe, base: Base) -> dict:
    """Return a recipe as a manifest has it: folders without their paths."""
    public = {**recipe.to_json(), "model": base.public_name, "data": public_name(recipe.data.data)}
    for name in ("teacher_cache", "teacher"):
        if public[name]:
            public[name] = public_name(public[name])
    for phase in public.get("phases", ()):
        if "data" in phase:
            phase["data"] = public_name(phase["data"])
    return public


def with_template_date(settings: RunSettings, base: Base, display: Display) -> RunSettings:
    """Return settings with the date for a template that reads the clock; a resumed run has one."""
    specified = settings.columns.template_date
    if not reads_clock(base.tokenizer):
        if specified is None:
            return settings
        raise PackError(
            f"--template-date: the chat template of {base.name} does not read the clock. Leave it "
            "out.",
            "conflict",
            "template_date",
        )

    if specified is None:
        specified = date.today().isoformat()

    display.line(
        "template",
        f"reads the clock: {specified} in training (--template-date), the current date in use",
    )
    return settings.with_settings({}, {"template_date": specified})


@dataclass(frozen=True)
class InitialAdapters:
    """Adapters that a run starts from: a file, and the pack that it is of, if any."""

    file: Path
    pack: Pack | None

    @classmethod
    def find(cls, start: str) -> "InitialAdapters":
        """Return the adapters that a setting names: in a file, or in a verified pack."""
        path = Path(start).expanduser()
        is_name = is_hub_name(start) and path.suffix != ".safetensors"
        if not path.is_dir() and not is_name and not path.is_file():
            raise PackError(f"{FLAG} {start}: no such file or pack.", "not-found")

        if path.is_dir() and not (path / MANIFEST).is_file() and (path / ADAPTERS).is_file():
            path /= ADAPTERS  # as mlx-lm writes it
        with errors_of("resume_adapter_file"):
            if not path.is_file():
                pack = Pack.open(start)
                pack.verify()
                return cls(pack.path / ADAPTERS, pack)
            is_of_pack = (path.parent / MANIFEST).is_file()
            return cls(path, Pack.open(path.parent) if is_of_pack else None)

    def to_json(self) -> dict:
        return {"name": self.file.name, "sha256": sha256(self.file)}


def initial_adapters(start: str | None, earlier: dict | None) -> InitialAdapters | None:
    """Return the adapters that a new run starts from; ``earlier`` is the identity of a resumed."""
    if start is None:
        return None
    if earlier is not None:
        raise PackError(
            f"--resume and {FLAG}: a resumed run continues from its checkpoint. "
            "Leave one of them out.",
            "conflict",
            "resume_adapter_file",
        )
    return InitialAdapters.find(start)


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
    left_out: Mapping[str, BadRows]
    json_layout: dict  # of the answers in training rows
    base_weights: int
    memory: MemoryChoice
    initial: InitialAdapters | None

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
    initial = initial_adapters(request.option("resume_adapter_file"), earlier)

    tasks = make_tasks(settings.phases, settings.train, settings.lora, request.calls)
    splits = [phase.load_rows() for phase in settings.phases]
    check_validated(settings.train, splits[-1])
    settings = checked_by_headers(request, settings, folder)
    base, dtype = _open_base(request, settings, place, tasks)
    if initial and initial.pack and settings.columns.chat_template is None:
        template = chat_template_of(initial.pack.manifest)
        settings = settings.with_settings({}, {"chat_template": template})
    base = base.with_chat_template(settings.columns.chat_template)
    targets = {name: task.checked_target(base) for name, task in tasks.items()}
    target, lora = targets[settings.last_phase.train.task]

    settings = with_template_date(settings, base, display)
    with images_of_run(base, display):
        data = _encode(tasks, base, settings, splits)
    settings, data = with_batches(settings, data, display)
    adapters = initial and initial.to_json()
    if earlier is not None:
        adapters = earlier["recipe"].get("resume_adapter_file")
    run = Run(
        **vars(settings),
        request=request,
        place=place,
        begins_with_adapters=adapters is not None,
    )
    for note in notes_on_rates(run):
        display.line("note", note)

    recipe = Recipe(
        *(run.lora, run.train, run.columns), {"model": base.name, "resume_adapter_file": adapters}
    )
    identity = run_identity(recipe, base, run, splits)
    if earlier is not None:
        check_resume(folder, base.path, identity, earlier)
    check_same_on_all_ranks(identity | {"compute dtype": dtype.name})
    check_examples(counts_of(data))

    base_weights = count_weights(base.model)
    run, memory = fit_run(run, base, target, data)
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
        sources=[public_name(read.source) for read in splits],
        left_out=left_out_rows(run.phases, splits),
        json_layout=json_layout(splits[-1], run.last_phase.columns),
        base_weights=base_weights,
        memory=memory,
        initial=initial,
    )


def _encode(
    tasks: Mapping[str, Task], base: Base, settings: RunSettings, splits: Sequence[Splits]
) -> list[PhaseData]:
    names = [phase.name for phase in settings.phases]
    by_phase = dict(zip(names, splits, strict=True))
    encoded: dict[str, PhaseData] = {}
    for name, task in tasks.items():
        phases = [phase for phase in settings.phases if phase.train.task == name]
        data = task.encode(base, phases, [by_phase[phase.name] for phase in phases])
        encoded |= {each.phase.name: each for each in data}
    return [encoded[name] for name in names]


def _open_base(
    request: Request, settings: RunSettings, place: Place, tasks: Mapping[str, Task]
) -> tuple[Base, ComputeDtype]:
    """Return the base, quantized as requested, and its dtype; reject it unread if it cannot fit."""
    train = settings.train
    base = request.base
    display = request.display
    if isinstance(base, Base):
        unoffloaded = train.offloads and base.blocks_on_disk is None
        for flag, value, default in (
            ("--offload-base", unoffloaded, False),
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
                offload=train.offloads,
            )

        if dtype.cast == "auto" and dtype.why == STORED:  # config.json may not name it
            dtype = replace(dtype, name=base.compute_dtype)

    for task in tasks.values():
        task.check(base.name, base.config["model_type"])
    find_method(train.method).check(base, train.matmul_path)
    check_offload(base, settings)
    display.line("base", base.summary())
    show_dtype(display, dtype, train.compute_dtype)
    return base, dtype
