"""The result of a training run: its pack, the report, and how Python and notebooks show them."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import runtime
from ..adapters.trainable import Trainable
from ..data.in_memory import InMemoryRows
from ..errors import PackError, pip_install
from ..evaluation.images import images_report
from ..gates import Gates, evaluate_gates, gate_limits
from ..ops import _backend
from ..packs.facts import format_change, notebook_html, report_html
from ..packs.making import pack_of
from ..packs.manifest import task_of
from ..packs.pack import Pack
from ..report.facts import Points, curve_of, loss_name, progress_series, short_curve, thinned
from ..tasks.phases import counts_of
from ..tasks.task import Summary
from .fit import Fit
from .prepare import PreparedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..memory.plan import MemoryChoice


_COLOURS = ("#2b63c6", "#b4490f")  # of training and validation


def measured(fit: Fit, memory: "MemoryChoice") -> dict:
    """Return the part of a manifest that differs from run to run."""
    return {
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **fit.measured,
        "curve": short_curve(fit.curve),
        "plan_peak_gb": memory.peak_gb,
        "matmul_path": memory.choice.matmul_path,
        "matmul_path_ms": memory.choice.step_ms,
        "ops": _backend.record(),
    }


def losses_of(curve: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the first and the last training loss of a run; nothing if it reported none."""
    losses = [line["loss"] for line in curve if isinstance(line.get("loss"), float)]
    if not losses:
        return {}
    return {"first_loss": losses[0], "last_loss": losses[-1]}


class RunReport(dict):
    """The measurements of a run, by name, as ``packs train --json`` prints them."""

    def __repr__(self) -> str:
        """Return the result and the number of updates in one line; ``dict(report)`` has all."""
        updates = f"{self.get('steps', 0):,} updates"
        held_out = self.get("held_out")
        if not held_out:
            return f"RunReport({updates})"

        change = format_change(self)
        examples = f"{held_out.get('rows')} {held_out.get('split')} examples"
        return f"RunReport({change} on {examples}, {updates})"

    def _repr_html_(self) -> str:
        name = Path(str(self.get("pack", "run"))).name
        return report_html(self, name)


@dataclass(repr=False)
class TrainRun:
    """The result of a training run.

    Attributes:
        pack: The pack.
        run: The run folder; `write_page` describes its ``report.html``.
        report: The results, as `packs train --json` prints them.
        curve: The lines of ``metrics.jsonl``.
    """

    pack: Pack
    run: Path
    report: dict
    curve: list[dict] = field(default_factory=list)

    def __repr__(self) -> str:
        """Return the pack, and the length of the run, in one line."""
        return f"TrainRun({self.pack!r}, {self.report['steps']:,} updates, run={str(self.run)!r})"

    def _repr_html_(self) -> str:
        name = Path(self.pack.name).name
        return notebook_html(self.pack.manifest, name, curve_of(self.curve))

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Draw the loss curve with matplotlib and return its axes.

        Args:
            ax: Axes to draw on; by default the current ones.

        Raises:
            PackError: If matplotlib is not installed.
        """
        if ax is None:
            try:
                import matplotlib.pyplot as plt
            except ModuleNotFoundError:
                text = f"plot: matplotlib is not installed. Run `{pip_install('plot')}`."
                raise PackError(text, "dependency") from None
            ax = plt.gca()

        label = loss_name(task_of(self.pack.manifest))
        if "loss" in self.report:  # of the caller's own loss, too
            label = "loss"
        _draw(ax, curve_of(self.curve), label)
        return ax

    def to_json(self) -> dict:
        """Return the report, as `packs train --json` prints it."""
        return self.report


def _draw(axes: "Axes", curve: Mapping[str, Points], loss_label: str) -> None:
    """Draw the losses or rewards of a run over batches; ``loss_label`` names losses."""
    names = progress_series(curve)
    measure = names[0]
    labels = (f"training {measure}", f"validation {measure}")
    styles = ("-", "o-")
    for name, label, style, color in zip(names, labels, styles, _COLOURS, strict=True):
        if series := thinned(curve.get(name, []), 2000):
            xs, ys = zip(*series, strict=True)
            axes.plot(xs, ys, style, label=label, color=color, markersize=4)

    axes.set_xlabel("batch")
    axes.set_ylabel(loss_label if measure == "loss" else measure)
    if axes.lines:
        axes.legend(frameon=False)


def save_pack(prepared: PreparedRun, trainable: Trainable, fit: Fit, summary: Summary) -> Pack:
    """Save the pack of a run in its folder, and return it."""
    run = prepared.run
    facts = summary.facts
    if fit.end:
        facts = {"end": fit.end} | facts

    objective = summary.objective
    if prepared.json_layout:
        objective = objective | {"json_layout": prepared.json_layout}

    data = {
        "source": ", ".join(dict.fromkeys(prepared.sources)),
        "fingerprint": prepared.identity["data"],
        "rows": counts_of(prepared.data),
    }
    if report := images_report(prepared.base):
        data["images"] = report["images"]["count"]

    pack = pack_of(
        trainable,
        run.train.pack_dtype,
        objective=objective,
        data=data,
        recipe=prepared.recipe,
        **facts,
        eval=summary.eval,
        measured={"compute_dtype": prepared.dtype.to_json(), **measured(fit, prepared.memory)},
    )
    if isinstance(source := run.last_phase.columns.data, InMemoryRows):
        pack.examples = source

    replace = run.request.option("overwrite") or run.place.resume
    return pack.save(run.pack, overwrite=replace)


def _check_gates(prepared: PreparedRun, pack: Pack, summary: Summary) -> Gates:
    """Compare the saved pack with its limits; the results go into its manifest."""
    gates = gate_limits(**prepared.run.train.gates)
    if not gates:
        return {}

    held_out = prepared.data[-1].held_out_examples
    values = prepared.task.gate_values(gates, pack, summary, held_out)
    for _ in range(2):  # the manifest, which has the result, is part of the size
        results = evaluate_gates(gates, {**values, "max_pack_mb": pack.size_mb})
        pack._note(gates=results)
    return results


def report_of(
    prepared: PreparedRun, trainable: Trainable, fit: Fit, pack: Pack, summary: Summary
) -> dict[str, Any]:
    """Return the report of a run; the results of its gates go into the pack's manifest, too."""
    described = ("split", "rows", "available", "targets")
    run = prepared.run
    memory = prepared.memory
    gates = _check_gates(prepared, pack, summary)  # first: they change its size

    offload = {}
    if (blocks := prepared.base.blocks_on_disk) is not None:
        offload["offload"] = blocks.to_json(fit.measured["train_s"])

    return {
        "pack": str(run.pack),
        "run": str(run.folder),
        "task": run.last_phase.train.task,
        "method": trainable.method,
        "steps": fit.state.updates,
        "batches": fit.state.batches,
        **fit.end,
        **losses_of(fit.curve),
        **{key: value for key, value in summary.eval.items() if key not in described},
        "held_out": {
            **{key: summary.eval[key] for key in described if key in summary.eval},
            **summary.held_out,
        },
        "gates": gates,
        **fit.measured,
        f"trained_{fit.unit}": fit.state.trained_tokens,
        "process_peak_gb": runtime.peak_process_bytes() / 1e9,
        "plan_peak_gb": memory.peak_gb,
        "plan_disk": memory.disk.to_json() if memory.disk else None,
        "pack_mb": pack.size_mb,
        "trainable_parameters": pack.manifest["adapters"]["parameters"],
        "base_weights": prepared.base_weights,
        "matmul_path": memory.choice.matmul_path,
        "recompute": memory.recompute,
        "compute_dtype": prepared.dtype.to_json(),
        "ops": _backend.record(),
        "batch_shapes": len(fit.shapes),
        "traces": fit.traces,
        **offload,
        **images_report(prepared.base),
        **summary.report,
        "bad_rows": {key: bad.counts() for key, bad in prepared.left_out.items()},
        "versions": pack.manifest["versions"],
    }
