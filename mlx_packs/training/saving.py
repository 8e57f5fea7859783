"""The end of a run: its pack is saved, checked against its gates, and reported."""

from typing import Any

from .. import runtime
from ..adapters.trainable import Trainable
from ..data.in_memory import InMemoryRows
from ..evaluation.images import images_report
from ..gates import Gates, evaluate_gates, gate_limits
from ..ops import _backend
from ..packs.making import pack_of
from ..packs.pack import Pack
from ..tasks.phases import counts_of
from ..tasks.task import Summary
from .fit import Fit
from .initial_adapters import compare_with_initial_pack
from .prepare import PreparedRun
from .result import losses_of, measured


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
    pack = pack.save(run.pack, overwrite=replace)
    compare_with_initial_pack(run, pack)
    return pack


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


def report_of(prepared: PreparedRun, fit: Fit, pack: Pack, summary: Summary) -> dict[str, Any]:
    """Return the report of a run; the results of its gates go into the pack's manifest, too."""
    described = ("split", "rows", "available", "targets")
    run = prepared.run
    memory = prepared.memory
    gates = _check_gates(prepared, pack, summary)  # first: they change its size

    offload = {}
    if (blocks := prepared.base.blocks_on_disk) is not None:
        offload["offload"] = blocks.to_json(fit.measured["train_s"])

    return {
        "gates": gates,
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
        **images_report(prepared.base),
        "bad_rows": {key: bad.counts() for key, bad in prepared.left_out.items()},
        "compute_dtype": prepared.dtype.to_json(),
        "base_weights": prepared.base_weights,
        **offload,
    }
