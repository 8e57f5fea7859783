"""A plan in lines for people: whether it fits, what it takes, and the command to run."""

from collections.abc import Sequence
from functools import partial

from .. import runtime
from ..config.choices import MATMUL_PATHS
from ..config.recipe import Recipe
from ..display import hanging, shown_count, size
from ..errors import any_of
from ..offload.disk import plan_line
from .decoder_sizes import has_images
from .estimate import disk_summary, estimate, plan_disk, remedies
from .headers import Headers
from .plan import ERROR, has_logits
from .recommend import PlanOption
from .step_time import slow_in_place


def answer(
    options: list[PlanOption],
    headers: Headers,
    memory: int,
    configs: Sequence[str] = (),
    defaults: Recipe | None = None,
    width: int = 100,
    verbose: bool = False,
) -> list[str]:
    """Return whether the best option fits, its notes, and the next command in one line.

    Other lines have at most ``width`` columns. ``verbose`` adds the other options, and details.
    """
    best = options[0]
    fits = {"fits": "yes", "tight": "only just"}.get(best.fit, "no")
    kind, _, rank, batch, *_ = best.cells
    peak = size(best.plan.peak_bytes)
    way = f"{kind}, rank {rank}, batch {batch}"
    text = f"fits    {fits}: {peak} (± {ERROR:.0%}) of {size(memory)} · {way}"

    lines = [f"base    {headers.name} · {shown_count(best.plan.base_weights)} weights"]
    lines += hanging(text, width).split("\n")
    if verbose:
        lines += _table(options, headers)
        lines += ["", f"parts of {best.kind} at the peak"]
        for name, part in best.plan.parts().items():
            lines.append(f"  {name:<22} {size(part) if part else 0:>12}")
        lines += [f"  {'peak, at ' + best.plan.moment:<22} {peak:>12}", ""]
    lines += _notes(best, headers, width, verbose)
    if best.fit == "no":
        ways = remedies(headers, best.lora, best.train, partial(estimate, headers))
        return [*lines, f"try:    {any_of([*ways, 'more memory'])}"]
    return [*lines, f"try:    {best.command(headers.name, configs, defaults)}"]


def _table(options: list[PlanOption], headers: Headers) -> list[str]:
    dtype = options[0].dtype(headers.config)
    has_times = any(option.step for option in options)
    seconds_title = "s/step " if has_times else ""
    indent = max(13, *(len(option.kind) for option in options))

    lines = [
        f"dtype   {dtype.name}: {dtype.why}",
        "",
        f"{'method':<{indent}} {'path':<9}{'rank':>4} {'batch':>8} {'recompute':>9} {'peak':>8} "
        f"{seconds_title}fits",
    ]

    for o in options:
        kind, path, rank, batch, recompute, peak, fit = o.cells
        seconds = ""
        if has_times:
            step_s = f"{o.step.seconds:.3g}" if o.step else "-"
            seconds = f"{step_s:>6} "
        lines.append(
            f"{kind:<{indent}} {path:<9}{rank:>4} {batch:>8} {recompute:>9} {peak:>8} "
            f"{seconds}{fit}"
        )

    return lines


def _notes(best: PlanOption, headers: Headers, width: int, verbose: bool) -> list[str]:
    notes = {"run": best.run.line()} if best.run else {}
    if best.plan.offload is not None:
        notes["offload"] = plan_line(best.plan.offload)
    notes["disk"] = disk_summary(plan_disk(best.plan, best.train))
    if verbose:
        notes |= _details(best, headers)
    lines = (hanging(f"{label:<8}{text}", width) for label, text in notes.items())
    return "\n".join(lines).splitlines()


def _details(best: PlanOption, headers: Headers) -> dict[str, str]:
    assumed = ""
    if best.longest is None and has_logits(best.train):
        of_images = ", and as one of an image" if has_images(headers.config) else ""
        assumed = f"Every token is taken as a target{of_images}."

    notes = {
        "why": f"{best.kind}: {best.why}",
        "error": f"± {ERROR:.0%} against runs on a CPU (benchmarks/plan_accuracy.py), ± 20 % on an "
        f"NVIDIA GPU; not measured on a Mac. {assumed}".strip(),
        "cache": "not counted: the buffers that MLX has freed and keeps; it gives them back when "
        "memory is short.",
    }

    if MATMUL_PATHS[best.plan.matmul_path].dequantizes and not runtime.on_cpu():
        if reason := slow_in_place(headers, best.train):
            notes["path"] = f"{best.plan.matmul_path}: {reason}"
    if best.step:
        time = f"seconds per step: {best.step.source}"
        if best.step.error:
            time += f", ± {best.step.error:.0%} on those steps"
        notes["time"] = f"{time}. Every example is of full length."
    return notes
