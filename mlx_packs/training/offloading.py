"""Whether the blocks of a base stay on disk in a run, and how many of them."""

from .. import runtime
from ..display import Display, size
from ..errors import PackError
from ..memory.estimate import least
from ..memory.plan import MemoryPlan, verdict
from ..memory.read import read_headers
from ..offload.sizes import disk_rate
from ..packs.base import Base
from .settings import Request, RunSettings


def with_offload(request: Request, settings: RunSettings) -> RunSettings:
    """Return settings with ``on`` in the place of ``--offload-base auto`` if nothing else fits."""
    base = request.base
    if isinstance(base, Base):
        if base.blocks_on_disk is None:
            return settings
        return settings.with_settings({"offload_base": "on"}, {})
    if settings.train.offload_base != "auto" or request.force:
        return settings

    memory = runtime.total_memory()
    try:
        headers = read_headers(base)
        in_memory = least(headers, settings.lora, settings.train)
        if verdict(in_memory, memory) != "no":
            return settings
        offloaded = settings.with_settings({"offload_base": "on"}, {})
        plan = least(headers, settings.lora, offloaded.train)
    except PackError:  # loading the base, or the check before, says why
        return settings

    if verdict(plan, memory) == "no":
        return settings
    request.display.line(
        "offload",
        f"a run with the base in memory would take {size(in_memory.peak_bytes)} of {size(memory)}",
    )
    return offloaded


def show_offload(base: Base, plan: MemoryPlan | None, display: Display) -> None:
    """Show how much of a base is on disk, and the time that a step reads."""
    blocks = base.blocks_on_disk
    if blocks is None:
        return

    text = f"{blocks.on_disk} of {len(base.model.layers)} blocks stay on disk"
    if plan is not None and plan.offload is not None:
        rate = disk_rate()
        text += (
            f" · a step reads {size(plan.offload.step_bytes)}, {plan.offload.step_bytes / rate:.1f} "
            f"s at {rate / 1e9:.1f} GB/s"
        )
        if slow := plan.offload.slow_line(rate):
            display.line("offload", slow)
    display.line("offload", text)


def keep_what_fits(request: Request, base: Base, plan: MemoryPlan | None) -> MemoryPlan | None:
    """Read as many blocks into memory as the plan leaves room for, with ``--offload-base auto``.

    Returns the plan with these blocks.
    """
    asked = request.recipe.train.offload_base
    if base.blocks_on_disk is None or plan is None or plan.offload is None or asked == "on":
        return plan

    plan = plan.with_blocks_in_memory(runtime.total_memory())
    base.blocks_on_disk.keep_in_memory(plan.offload.blocks - plan.offload.on_disk)
    return plan
