"""`packs bench`: what this machine is and does, ours against mlx-lm on it, in one record."""

import os
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from statistics import median
from time import monotonic

from .. import chips, macos, measurements
from ..bases.files import TINY, check_files, resolve_checkpoint
from ..bases.model import check_forward
from ..bases.precision import choose_compute_dtype
from ..display import Display
from ..errors import Float16Overflow
from ..files import CACHE_VARIABLE, cache_folder
from ..memory.step_time import remember_steps
from ..ops._backend import Instance
from ..ops.diagnostics import examine_all
from ..packs.base import Base, load_base
from ..runtime import on_cpu
from .steps import Contest, Shape, StepComparison, compare_steps, contest

SHAPES = {"gpu": ((1, 512), (4, 512), (1, 2048)), "cpu": ((1, 64), (4, 64), (1, 256))}
_PROBED = 64  # tokens of a forward pass in float16
_TINY_SHARE = 0.2  # of the time, beside another base
BUSY_GPU = 20  # percent; the window server alone takes a few
BUSY_CPU = 0.5  # of the cores


@dataclass(frozen=True)
class Conditions:
    """The state of a machine at one moment; None is what cannot be known there.

    Attributes:
        power: ``AC`` or ``battery``.
        low_power_mode: Whether macOS saves energy.
        thermal: The thermal pressure, one of `macos.THERMAL`.
        gpu_utilization: Percent of the GPU that is in use.
        gpu_cores: Of the GPU.
        load: Programs that compute, per core: the average of the last minute.
    """

    power: str | None = None
    low_power_mode: bool | None = None
    thermal: str | None = None
    gpu_utilization: int | None = None
    gpu_cores: int | None = None
    load: float | None = None


@dataclass(frozen=True)
class BenchSettings:
    """What to time: ``model`` beside the embedded base, for ``minutes`` in all."""

    model: str = TINY
    shapes: tuple[Shape, ...] = ()
    minutes: float = 10.0
    rank: int = 16  # of the adapters, which are on all projections
    trust_remote_code: bool = False


@dataclass(frozen=True)
class BenchResult:
    """The result of a benchmark.

    Attributes:
        kernels: Of `ops.diagnostics.examine_kernel`, for each instance.
        comparisons: By contest, one for each shape.
        calibrated: How many steps `packs plan` predicts from now.
        uncalibrated: Why none was kept.
    """

    settings: BenchSettings
    before: Conditions
    after: Conditions
    rates: chips.Chip
    kernels: list[dict]
    comparisons: list[tuple[Contest, list[StepComparison]]]
    calibrated: int
    uncalibrated: str
    spent_s: float

    @property
    def disturbances(self) -> list[str]:
        """Conditions that made the machine slower: before anything ran, or its power since."""
        since = Conditions(power=self.after.power, low_power_mode=self.after.low_power_mode)
        return list(dict.fromkeys([*disturbances(self.before), *disturbances(since)]))


def run_bench(
    settings: BenchSettings,
    before: Conditions,
    instances: Sequence[Instance],
    display: Display,
) -> BenchResult:
    """Examine this machine and time training steps on it.

    ``before`` is the state of the machine now. A PackError if a base cannot be loaded, or not be
    trained by both.
    """
    start = monotonic()
    end = start + 60 * settings.minutes
    settings = replace(settings, shapes=settings.shapes or SHAPES["cpu" if on_cpu() else "gpu"])
    contests = _contests(settings, display)

    measuring = nullcontext()
    if disturbances(before):  # what is measured now is not kept
        measuring = measurements.discarded()
    with measuring:
        with display.task("kernels", len(instances), "instances") as bar:
            kernels = examine_all(instances, bar.advance)["kernels"]
        rates = chips.measure()
        comparisons = _compare(contests, settings.shapes, end, display)

    spent_s = monotonic() - start
    after = read_conditions()
    return _calibrated(
        BenchResult(settings, before, after, rates, kernels, comparisons, 0, "", spent_s)
    )


def _compare(
    contests: Sequence[Contest],
    shapes: Sequence[Shape],
    end: float,
    display: Display,
) -> list[tuple[Contest, list[StepComparison]]]:
    """Time every shape on every base; the remaining time is shared among the remaining ones."""
    weights = [_TINY_SHARE if each.name == TINY else 1.0 for each in contests]
    remaining = sum(weights) * len(shapes)
    compared = []
    for timed, weight in zip(contests, weights, strict=True):
        comparisons = []
        for shape in shapes:
            share_s = max(0.0, end - monotonic()) * weight / remaining
            remaining -= weight
            label = f"{timed.name} {shape[0]} x {shape[1]}"
            with display.working("bench", f"{label}: mlx-lm and mlx_packs, {share_s:.0f} s"):
                comparisons.append(compare_steps(timed, shape, share_s, end))
            display.line("bench", f"{label}: {outcome(comparisons[-1])}")
        compared.append((timed, comparisons))

    return compared


def outcome(comparison: StepComparison) -> str:
    if comparison.fault:
        return comparison.fault
    count = len(comparison.ratios)
    rounds = "rounds" if count > 1 else "round"
    return f"{median(comparison.ratios):.2f}x the speed of mlx-lm, {count} {rounds}"


def _contests(settings: BenchSettings, display: Display) -> list[Contest]:
    """Load the bases, the user's last, and check them before anything is timed."""
    names = list(dict.fromkeys([TINY, settings.model]))
    contests = []
    for name in names:
        with display.working("base", f"loading {name}"):
            base, note = _load(name, settings.trust_remote_code)
            contests.append(contest(name, base, settings.rank, note))
    return contests


def _load(name: str, trust_remote_code: bool) -> tuple[Base, str]:
    """Return a base in the dtype that a run computes it in, and why if it is not the stored one."""
    dtype = choose_compute_dtype(check_files(resolve_checkpoint(name)))
    if dtype.cast != "auto":
        try:
            base = load_base(name, "none", trust_remote_code, compute_dtype=dtype.cast)
            check_forward(base, list(range(_PROBED)))
            return base, f"{dtype.why}: both compute {name} in {dtype.name}, as packs train does."
        except Float16Overflow:  # as a run does, too
            pass

    return load_base(name, "none", trust_remote_code), ""


def _calibrated(result: BenchResult) -> BenchResult:
    """Let `packs plan` predict by what was measured, unless something disturbed it."""
    if result.disturbances:
        return replace(result, uncalibrated=f"the machine {' and '.join(result.disturbances)}")
    if cache_folder("measurements") is None:
        return replace(result, uncalibrated=f"{CACHE_VARIABLE} is off")

    steps = [
        (
            timed.headers,
            timed.lora,
            timed.train(each.shape, each.choice.matmul_path),
            timed.name,
            median(each.ours.step_s),
        )
        for timed, comparisons in result.comparisons
        for each in comparisons
        if each.ours is not None
    ]

    calibrated = remember_steps(steps)
    return replace(
        result, calibrated=calibrated, uncalibrated="" if calibrated else "nothing was timed"
    )


def read_conditions() -> Conditions:
    """Return the state of this machine, without root.

    On a Mac it is read from `pmset`, `notifyutil` and `ioreg`; on Linux only the load is known.
    """
    load = round(os.getloadavg()[0] / (os.cpu_count() or 1), 2)
    if not macos.is_macos():
        return Conditions(load=load)

    gpu = macos.output(["ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator"]) or ""
    battery = macos.output(["pmset", "-g", "batt"]) or ""
    power = re.search(r"Now drawing from '(AC|Battery) Power'", battery)

    return Conditions(
        power=power and {"AC": "AC", "Battery": "battery"}[power[1]],
        low_power_mode=macos.low_power_mode(),
        thermal=macos.thermal_pressure(),
        gpu_utilization=macos.number(r'"Device Utilization %"\s*=\s*(\d+)', gpu),
        gpu_cores=macos.number(r'"gpu-core-count"\s*=\s*(\d+)', gpu),
        load=load,
    )


def disturbances(conditions: Conditions) -> list[str]:
    """Return what makes this machine slower than it can be, as ends of ``the machine …``."""
    causes = []
    if conditions.power == "battery":
        causes.append("runs on battery")
    if conditions.low_power_mode:
        causes.append("is in Low Power Mode")
    if conditions.thermal not in (None, "nominal"):
        causes.append(f"is hot (thermal pressure {conditions.thermal})")
    if (used := conditions.gpu_utilization) is not None and used >= BUSY_GPU:
        causes.append(f"has another program on its GPU ({used} % in use)")
    if on_cpu() and (conditions.load or 0) >= BUSY_CPU:
        causes.append(f"is busy with other programs ({conditions.load:.1f} per core)")
    return causes
