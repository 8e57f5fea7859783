"""Whether the blocks of a base stay on disk in a run, and how many of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .. import runtime
from ..bases.geometry import is_named
from ..display import size
from ..errors import PackError
from ..memory.disk import plan_disk
from ..memory.estimate import check_least, least
from ..memory.headers import Headers
from ..memory.plan import ERROR, MemoryChoice, MemoryPlan, verdict
from ..memory.read import read_headers
from ..nn.surgery import block_prefixes
from ..offload.placing import put_on_disk
from ..packs.base import Base
from ..runtime import mx
from ..tasks.phases import PhaseData
from .planning import check_disk_of, estimate_of, plan_training, show_plan
from .settings import Request, Run, RunSettings


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
