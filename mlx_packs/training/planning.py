"""What is chosen before a run: dtype, memory plan, matmul path, and whether blocks stay on disk.

A dtype is kept when the run is resumed, and changed after an overflow.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from .. import runtime
from ..bases.files import weight_files
from ..bases.geometry import is_named
from ..bases.precision import ComputeDtype, choose_compute_dtype
from ..bases.turns import images_of
from ..config.choices import MATMUL_PATHS
from ..config.schema import TrainConfig
from ..display import VERBOSE, Display, size
from ..distributed.group import group
from ..errors import PackError
from ..memory.estimate import (
    Estimate,
    check_disk,
    check_least,
    disk_summary,
    estimate,
    least,
    plan_disk,
    plan_run,
)
from ..memory.headers import Headers
from ..memory.matmul_path import choose_matmul_path
from ..memory.pipeline import of_stages
from ..memory.plan import ERROR, DiskPlan, MatmulPathChoice, MemoryChoice, MemoryPlan, verdict
from ..memory.read import read_headers
from ..nn.surgery import block_prefixes
from ..offload.disk import plan_line, remote_note
from ..offload.placing import put_on_disk
from ..packs.base import Base
from ..runtime import mx
from ..tasks.phases import PhaseData
from .checkpoint import has_loss_scale
from .run_folder import RunFolder
from .settings import Place, Request, Run, RunSettings


def estimate_of(train: TrainConfig) -> Estimate:
    if train.pipeline:
        return of_stages(group().size)
    return estimate


def check_disk_of(run: Path, disk: DiskPlan) -> None:
    """Check that a run fits on the disk in the place of its own earlier checkpoints."""
    files = (file for folder in RunFolder(run).checkpoints() for file in folder.iterdir())
    check_disk(disk, run, sum(file.stat().st_size for file in files))


def plan_training(run: Run, base: Base, target: Base, data: Sequence[PhaseData]) -> MemoryChoice:
    """Return the memory plan, the matmul path and the activation checkpointing of a run.

    The loss goes through ``target``. Raises PackError if nothing fits into memory, unless forced.
    """
    ranks = group()
    task = data[-1].task
    planned = task.planned_settings(run.train)
    planned = replace(planned, batch_size=planned.batch_size // ranks.batch_shares)
    headers = replace(Headers.of(base), **task.planned_facts())
    if images := images_of(base.tokenizer):
        headers = replace(headers, image_tokens=images.counts()["tokens"])

    plans = {}
    unplanned = ""
    shapes = {shape for each in data for shape in each.shapes()}
    try:
        plans = plan_run(
            headers, run.lora, planned, shapes, run.request.force, estimate_of(run.train)
        )
    except PackError as error:
        if error.code == "memory":
            raise
        unplanned = error.message

    choice = choose_path(run, target, task.typical_rows(data[-1]), plans)
    plan = plans.get(choice.matmul_path)
    if plan and plan.offload:
        plan = plan.with_batches_together(runtime.total_memory())
        if run.request.recipe.train.offload_base != "on":
            plan = plan.with_blocks_in_memory(runtime.total_memory())

    recompute = run.train.recomputes
    if recompute == "auto":
        recompute = plan.recompute if plan else task.unplanned_recompute
        recompute = ranks.from_first(recompute.encode()).decode()

    return MemoryChoice(plan, choice, recompute, plan and plan_disk(plan, planned), unplanned)


def choose_path(
    run: Run,
    base: Base,
    rows: tuple[int | tuple[int, ...], int] | None,
    plans: Mapping[str, MemoryPlan],
) -> MatmulPathChoice:
    """Return the specified matmul path, a resumed run's, or the fastest of the planned ones.

    ``rows`` are the rows of a typical batch that go through a weight and through the head; None if
    the base is dense for the task.
    """
    ranks = group()
    if rows is None:
        return MatmulPathChoice("dense", {}, "the base is not quantized")

    if run.train.matmul_path != "auto":
        return MatmulPathChoice(run.train.matmul_path, {}, "as specified")
    if run.place.resume and not run.place.overflow:  # in another dtype, others may be faster
        resumed = run.files.matmul_path()
        if resumed in (plans or MATMUL_PATHS):
            return MatmulPathChoice(resumed, {}, "as at the start of the run")

    choice = None
    with run.display.working("path", "measuring how frozen weights are used fastest"):
        planned = frozenset(plans) or None
        if ranks.is_first:
            choice = choose_matmul_path(base.model, *rows, planned, run.last_phase.stop)
        path = ranks.from_first(choice.matmul_path.encode() if choice else b"").decode()
    return choice or MatmulPathChoice(path, {}, "as the first rank has chosen")


def show_plan(base: Base, run: Run, memory: MemoryChoice) -> None:
    """Show the choices of a run: its estimates, what is tight, and how much of its base is read."""
    display = run.display
    plan = memory.plan
    if memory.unplanned:
        display.line("plan", f"{memory.unplanned} Memory and disk are not checked.")
    display.line("path", memory.choice.line(), VERBOSE)
    if plan is None:
        return

    method = f"LoRA r{run.lora.rank}"
    if base.quantization:
        method = f"Q{method}"
    if run.train.trains_base:
        method = "full fine-tuning"

    error = f"± {ERROR:.0%}"
    if runtime.on_cuda():  # docs/kernels.md
        error = "on a Mac; CUDA takes more"

    available = runtime.total_memory()
    display.line(
        "plan",
        f"{method} · {size(plan.peak_bytes)} of {size(available)} ({error}) · "
        f"disk {size(memory.disk.total_bytes)}",
    )
    display.line("", f"recompute {plan.recompute} · disk {disk_summary(memory.disk)}", VERBOSE)

    warnings = {"tight": f"tight: {ERROR:.0%} more would not fit", "no": "does not fit, forced"}
    if warning := warnings.get(verdict(plan, available)):
        display.line("plan", warning)

    blocks = base.blocks_on_disk
    if blocks is not None and plan.offload is not None:
        # the plan has the dtypes of memory, which are wider on a CPU
        stored = replace(plan.offload, stored_bytes=blocks.stored_block_bytes)
        display.line("offload", plan_line(stored))
        if note := remote_note(weight_files(base.path)[0]):
            display.line("note", note)


def run_dtype(train: TrainConfig, place: Place, config: Mapping) -> ComputeDtype:
    """Return the dtype of a run; a resumed one stays in float16 or out of it."""
    if place.overflow:
        return ComputeDtype("bfloat16", place.overflow, "bfloat16")

    dtype = choose_compute_dtype(config, train.compute_dtype, train.trains_base)
    if place.resume_point is None or dtype.name == "float32":
        return dtype

    checkpoint = place.resume_point.folder
    was_float16 = has_loss_scale(checkpoint)
    if was_float16 == (dtype.name == "float16"):
        return dtype
    name = "float16" if was_float16 else "bfloat16"
    return ComputeDtype(name, f"as of {checkpoint.name}", name)


def show_dtype(display: Display, dtype: ComputeDtype, requested: str) -> None:
    """Show the dtype of a run, unless it is float32 and no other was requested."""
    if dtype.name == "float32" and requested in ("auto", "float32"):
        return

    text = dtype.name
    if requested not in ("auto", dtype.name):
        text += f" instead of {requested}"
    text += f": {dtype.why}"
    if dtype.name == "float16":
        text += " · the loss is scaled"
    display.line("dtype", text)


def checked_by_headers(request: Request, settings: RunSettings, folder: Path) -> RunSettings:
    """Return settings with ``on`` in the place of ``--offload-base auto`` if nothing else fits.

    Raises a PackError, before a weight is read, if a base cannot fit whatever the examples are.
    Where headers cannot be read or no plan is possible, loading reports what is wrong.
    """
    base = request.base
    if isinstance(base, Base):
        if base.blocks_on_disk is None:
            return settings
        return settings.with_settings({"offload_base": "on"}, {})
    if request.force:
        return settings

    planned = estimate_of(settings.train)
    try:
        headers = read_headers(base)
        in_memory = least(headers, settings.lora, settings.train, planned)
        if verdict(in_memory, runtime.total_memory()) == "no":
            settings = _with_base_on_disk(request, settings, headers, in_memory)
        plan = check_least(headers, settings.lora, settings.train, planned)
    except PackError as error:
        if error.code == "memory":
            raise
        return settings

    check_disk_of(folder, plan_disk(plan, settings.train))
    return settings


def _with_base_on_disk(
    request: Request, settings: RunSettings, headers: Headers, in_memory: MemoryPlan
) -> RunSettings:
    """Return settings with the base on disk, the same ones if that does not fit either."""
    if settings.train.offload_base != "auto":
        return settings

    memory = runtime.total_memory()
    try:
        offloaded = settings.with_settings({"offload_base": "on"}, {})
        plan = least(headers, settings.lora, offloaded.train)
    except PackError:  # it cannot be combined with another setting
        return settings

    if verdict(plan, memory) == "no":
        return settings
    request.display.line(
        "offload",
        f"a run with the base in memory would take {size(in_memory.peak_bytes)} of {size(memory)}",
    )
    return offloaded


def fit_run(
    run: Run, base: Base, target: Base, data: Sequence[PhaseData]
) -> tuple[Run, MemoryChoice]:
    """Return a run and its memory plan, with the base on disk if it does not fit otherwise.

    Raises PackError if nothing is within memory and disk, unless forced.
    """
    try:
        memory = plan_training(run, base, target, data)
    except PackError as error:
        can_change = run.train.offload_base == "auto" and not isinstance(run.request.base, Base)
        if error.code != "memory" or not can_change:
            raise
        try:
            run = run.with_settings({"offload_base": "on"}, {})
            check_offload(base, run)
        except PackError:  # it cannot be combined with another setting
            raise error from None

        run.display.line("offload", "the run does not fit into memory with all of the base")
        if base.blocks_on_disk is None:
            put_on_disk(base)
        memory = plan_training(run, base, target, data)

    plan = memory.plan
    if base.blocks_on_disk is not None and plan and plan.offload:
        base.blocks_on_disk.keep_in_memory(plan.offload.blocks - plan.offload.on_disk)
        base.blocks_on_disk.together = plan.offload.together
    show_plan(base, run, memory)
    if memory.disk and not run.request.force:
        check_disk_of(run.folder, memory.disk)
    return run, memory


@contextmanager
def reads_limited(base: Base, plan: MemoryPlan | None) -> Iterator[None]:
    """Return a context in which MLX computes before it reads more than the plan has room for."""
    if base.blocks_on_disk is None or plan is None:
        yield
        return

    limit = mx.set_memory_limit(int(plan.peak_bytes * (1 + ERROR)))
    try:
        yield
    finally:
        mx.set_memory_limit(limit)


def check_offload(base: Base, settings: RunSettings) -> None:
    """Raise a PackError if a setting needs weights of blocks that are on disk."""
    if not settings.train.offloads:
        return

    if settings.train.matmul_path == "dense" and base.quantization:
        raise PackError(
            "--matmul-path: dense cannot be combined with --offload-base on. Leave one of them "
            "out.",
            "conflict",
            "matmul_path",
        )
    prefixes = tuple(f"{prefix}." for prefix in block_prefixes(base.model))
    paths = [path for path, _ in base.model.named_modules() if path.startswith(prefixes)]
    for name in settings.lora.modules_to_save:
        if any(is_named(path, name) for path in paths):
            raise PackError(
                f"--modules-to-save: {name} is in the blocks, which are on disk and cannot be "
                "trained in full. Leave it out, or use --offload-base off.",
                "conflict",
                "modules_to_save",
            )
