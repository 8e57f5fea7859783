"""Tables and records of steps, of epochs, and of the ops of a block."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..history import Environment, Record, record
from .capture import MLX_LM, OURS
from .epoch import Epoch
from .seconds import STEP_S, assumptions
from .step import Step

CHECKPOINTED = f"{MLX_LM} --grad-checkpoint"


def predicted(chips: Sequence[str], fixed_s: float = STEP_S) -> str:
    """Return what figures are, and the constants that they depend on."""
    constants = assumptions(chips, fixed_s)
    return f"Predicted from the lazy graph by a machine model; no Mac was timed. {constants}."


def ratio(own: dict[str, float], other: dict[str, float], chips: Sequence[str]) -> float:
    """Return the time over another's on the chip where that is most."""
    return max(own[chip] / other[chip] for chip in chips)


def step_table(steps: Sequence[Step], chips: Sequence[str]) -> str:
    """Return a table of steps, of which mlx-lm's default and checkpointed ones are the first."""
    default, checkpointed = (step.whole.seconds for step in steps[:2])
    rows = [["", "prims", "kernels", "GB", "TFLOP", "peak", "most", *chips, "ratio", "ckpt"]]
    for step in steps:
        whole = step.whole
        rows.append(
            [
                _short(step.name),
                f"{whole.primitives:,.0f}",
                f"{whole.dispatches:,.0f}",
                f"{whole.bytes / 1e9:.0f}",
                f"{whole.operations / 1e12:.1f}",
                f"{whole.peak_bytes / 1e9:.1f}",
                f"{(whole.peak_bytes + step.in_flight_bytes) / 1e9:.1f}",
                *(f"{whole.seconds[chip]:.2f}" for chip in chips),
                f"{ratio(whole.seconds, default, chips):.3f}",
                f"{ratio(whole.seconds, checkpointed, chips):.3f}",
            ]
        )
    return aligned(rows)


STEP_LEGEND = """\
prims: primitives that dispatch. kernels: dispatches. GB: read and written. peak: GB of arrays of
the step alive together, without weights; most: with what ten command buffers in flight still hold.
Chips: seconds a step. ratio, ckpt: time over mlx-lm's and over its --grad-checkpoint's, on the chip
where that is most."""


def step_records(
    here: Environment,
    steps: Sequence[Step],
    shape: str,
    chips: Sequence[str],
    task: str = "graph",
) -> list[Record]:
    """Return what the table of steps shows."""
    default, checkpointed = (step.whole.seconds for step in steps[:2])
    make, records = _recorder(here, task, shape, chips), []
    for step in steps:
        whole = step.whole
        values = {
            ("primitives", ""): whole.primitives,
            ("dispatches", ""): whole.dispatches,
            ("moved", "GB"): whole.bytes / 1e9,
            ("operations", "TFLOP"): whole.operations / 1e12,
            ("peak activations", "GB"): whole.peak_bytes / 1e9,
            ("with command buffers in flight", "GB"): (whole.peak_bytes + step.in_flight_bytes)
            / 1e9,
            **{(chip, "s"): whole.seconds[chip] for chip in chips},
            (f"time over {MLX_LM}", ""): ratio(whole.seconds, default, chips),
            (f"time over {CHECKPOINTED}", ""): ratio(whole.seconds, checkpointed, chips),
        }
        records += [make(step.name, *metric, value) for metric, value in values.items()]
    return records


def epoch_table(epochs: Sequence[Epoch], chips: Sequence[str]) -> str:
    """Return a table of epochs, of which mlx-lm's is the first."""
    rows = [["", "batches", "steps", "fill", *(f"{chip} us" for chip in chips), "ratio"]]
    for epoch in epochs:
        rows.append(
            [
                _short(epoch.name),
                f"{epoch.batches:,}",
                f"{epoch.steps}",
                f"{epoch.fill:.2f}",
                *(f"{epoch.target_us(chip):,.0f}" for chip in chips),
                f"{ratio(epoch.seconds, epochs[0].seconds, chips):.3f}",
            ]
        )
    return aligned(rows)


EPOCH_LEGEND = """\
One epoch; lengths of examples are lognormal, mean 300 tokens, sigma 0.7. fill: share of the inputs
that are no padding. us: microseconds a supervised token, with the compilation of every step.
ratio: time over mlx-lm's, on the chip where that is most."""


def epoch_records(
    here: Environment, epochs: Sequence[Epoch], shape: str, chips: Sequence[str]
) -> list[Record]:
    """Return what the table of epochs shows."""
    make, records = _recorder(here, "graph batches", shape, chips), []
    for epoch in epochs:
        values = {
            ("batches", ""): epoch.batches,
            ("compiled steps", ""): epoch.steps,
            ("fill", ""): epoch.fill,
            **{(chip, "us a target"): epoch.target_us(chip) for chip in chips},
            (f"time over {MLX_LM}", ""): ratio(epoch.seconds, epochs[0].seconds, chips),
        }
        records += [make(epoch.name, *metric, value) for metric, value in values.items()]
    return records


def ops_table(ours: Step, theirs: Step, chip: str) -> str:
    """Return the kinds of ops of a block, ours beside mlx-lm's, those that take longest first."""
    kinds = {**theirs.block_kinds, **ours.block_kinds}

    def ms(step: Step, kind: str) -> float:
        return 1e3 * step.block_kinds[kind].seconds[chip] if kind in step.block_kinds else 0.0

    rows = [["", "ours: kernels", "MB", "ms", "mlx-lm: kernels", "MB", "ms", "ms more"]]
    for kind in sorted(kinds, key=lambda kind: -max(ms(ours, kind), ms(theirs, kind))):
        cells = [kind]
        for step in (ours, theirs):
            costs = step.block_kinds.get(kind)
            cells += (
                [f"{costs.dispatches:,.0f}", f"{costs.bytes / 1e6:,.0f}", f"{ms(step, kind):.2f}"]
                if costs
                else ["-", "-", "-"]
            )
        rows.append([*cells, f"{ms(ours, kind) - ms(theirs, kind):+.2f}"])
    return aligned(rows)


def _short(name: str) -> str:
    return name.removeprefix(f"{OURS} ").replace("recompute ", "")


def aligned(rows: list[list[str]]) -> str:
    """Return rows of cells as lines, the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *numbers in rows:
        right = [n.rjust(w) for n, w in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *right]))
    return "\n".join(lines)


def _recorder(
    here: Environment, task: str, shape: str, chips: Sequence[str]
) -> Callable[[str, str, str, float], Record]:
    """Return what makes a record of an implementation, a metric, its unit and its value."""
    nowhere = replace(here, device="Apple GPUs, predicted (no Mac timed)")
    fields = {"dtype": "bfloat16", "baseline": MLX_LM, "note": predicted(chips)}

    def make(implementation: str, metric: str, unit: str, value: float) -> Record:
        entry = record(nowhere, task, implementation, shape, metric, unit, [value], **fields)
        return replace(entry, blas="none", blas_threads=None)

    return make
