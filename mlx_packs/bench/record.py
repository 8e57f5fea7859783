"""The record of `packs bench`: JSON that can be shared, a table, the text of a pull request.

It has no path, no name of a user and none of a machine.
"""

import getpass
import os
import platform
import re
import socket
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

import numpy as np

from .. import runtime
from ..bases.files import public_name
from ..chips import BANDWIDTH_REACHED, MATMUL_REACHED
from ..display import hanging
from ..terminal import short
from .implementations import LEARNING_RATE
from .run import BenchResult
from .steps import MIN_ROUNDS, Contest, Side, StepComparison

FORMAT = "mlx_packs bench 1"
CONTRIBUTED = "benchmarks/contributed"  # where a pull request adds the record
_SHORTEST_NAME = 3  # of a user or machine that is taken out of texts
_WIDTH = 80


def to_record(result: BenchResult) -> dict:
    """Return the result as JSON; benchmarks/README.md describes every key."""
    settings = result.settings
    half = None
    if not runtime.on_cpu():  # which emulates half precision
        half = _rounded(result.rates.matrix_tflops * MATMUL_REACHED)

    system = f"macOS {mac}" if (mac := platform.mac_ver()[0]) else platform.system()

    return {
        "format": FORMAT,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {
            "device": runtime.device_name(),
            "system": f"{system} {platform.machine()}",
            "gpu_cores": result.before.gpu_cores,
            "cpu_cores": os.cpu_count(),
            "memory_gb": _rounded(runtime.total_memory() / 1e9),
            "blas": Path(runtime.BLAS.name).name,
            "versions": dict(runtime.versions()),
        },
        "conditions": {
            "before": asdict(result.before),
            "after": asdict(result.after),
            "disturbances": result.disturbances,
        },
        "settings": {
            "minutes": settings.minutes,
            "rank": settings.rank,
            "optimizer": "adam",
            "learning_rate": LEARNING_RATE,
            "targets": "all tokens",
        },
        "seconds": _rounded(result.spent_s),
        "rates": {
            "copied_gb_s": _rounded(result.rates.bandwidth_gb_s * BANDWIDTH_REACHED),
            "float32_tflops": _rounded(result.rates.vector_tflops * MATMUL_REACHED),
            "half_tflops": half,
            "launch_us": _rounded(result.rates.launch_us),
        },
        "steps": [_step(of, c) for of, comparisons in result.comparisons for c in comparisons],
        "kernels": [
            kernel | {"fault": kernel["fault"] and anonymous(kernel["fault"])}
            for kernel in result.kernels
        ],
        "calibrated": result.calibrated > 0,
        "notes": notes(result),
    }


def notes(result: BenchResult) -> list[str]:
    notes = [f"The machine {what}: it can do more." for what in result.disturbances]
    if result.after.thermal not in (None, "nominal", result.before.thermal):
        notes.append(f"At the end the thermal pressure was {result.after.thermal}.")
    if runtime.on_cpu():
        notes.append(
            "This is a CPU: both sides multiply by the BLAS that mlx_packs binds, and neither is "
            "compiled by mx.compile. Figures of a Mac's GPU are others."
        )
    notes += [anonymous(of.note) for of, _ in result.comparisons if of.note]

    compared = [c for _, comparisons in result.comparisons for c in comparisons]
    if any(0 < len(c.ratios) < MIN_ROUNDS for c in compared):
        notes.append(f"Fewer than {MIN_ROUNDS} rounds: raise --minutes for figures to rely on.")
    return notes


def failures(result: BenchResult) -> list[str]:
    """Return what should be reported: losses that differ, kernels that are wrong."""
    differing = [
        f"{of.name} {c.shape[0]} x {c.shape[1]}: {c.fault}"
        for of, comparisons in result.comparisons
        for c in comparisons
        if c.differs
    ]
    wrong = [
        f"the kernel {kernel['op']} ({kernel['instance']}) is wrong"
        for kernel in result.kernels
        if not kernel["ok"]
    ]
    return [f"{fault}. Please report it." for fault in (*differing, *wrong)]


def table(record: dict) -> list[str]:
    """Return a record for people, in lines of at most 80 columns."""
    machine = record["machine"]
    versions = machine["versions"]
    cores = f" · {machine['gpu_cores']} GPU cores" if machine["gpu_cores"] else ""
    lines = [
        f"device  {machine['device']}{cores} · {machine['memory_gb']:g} GB",
        f"system  {machine['system']} · mlx {versions['mlx']} · mlx-lm {versions['mlx-lm']}",
        f"state   {_state(record['conditions']['before'])}",
        f"        after {record['seconds']:,.0f} s: {_state(record['conditions']['after'])}",
    ]

    wrong = sum(not kernel["ok"] for kernel in record["kernels"])
    count = len(record["kernels"])
    kernels = f"{wrong} of {count} wrong" if wrong else f"{count} instances right"
    lines.append(f"kernels {kernels}")

    for model in dict.fromkeys(step["model"] for step in record["steps"]):
        steps = [step for step in record["steps"] if step["model"] == model]
        lines += ["", *_model_lines(steps)]

    notes = (hanging(f"note    {note}", _WIDTH) for note in record["notes"])
    return [*lines, "", *"\n".join(notes).splitlines()]


def _model_lines(steps: Sequence[dict]) -> list[str]:
    first = steps[0]
    lines = [
        f"{first['model'][:40]} · {first['weights']} · {first['dtype']} · rank {first['rank']}",
        f"{'':10}{'mlx-lm':^12} |{'mlx_packs':^25}|{'':17} |{'s per step':>10}",
        f"{'batch':<10}{'tok/s':>7}{'GB':>5} |{'tok/s':>8}{'GB':>5} {'path':<11}|"
        f"{'speedup':>17} |{'took':>6}{'plan':>5}",
    ]

    for step in steps:
        shape = f"{step['batch_size']} x {step['length']}"
        if step["fault"]:
            lines += textwrap.wrap(
                f"{shape:<10}{step['fault']}", _WIDTH, subsequent_indent=" " * 10
            )
            continue

        theirs = step["mlx_lm"]
        ours = step["mlx_packs"]
        ratio = step["ratio"]
        planned = short(ours["predicted_step_s"]) if ours["predicted_step_s"] is not None else "-"

        times = f"{short(ratio['p50'])} ({short(ratio['p20'])}-{short(ratio['p80'])})"
        lines.append(
            f"{shape:<10}{short(theirs['tokens_per_s']):>7}{short(theirs['peak_gb']):>5} |"
            f"{short(ours['tokens_per_s']):>8}{short(ours['peak_gb']):>5} "
            f"{step['matmul_path']:<11}|{times:>17} |{short(ours['step_s']['p50']):>6}{planned:>5}"
        )

    return lines


def pull_request(record: dict, file: str) -> str:
    """Return the Markdown of a pull request that adds a record, which is in a file of this name."""
    machine = record["machine"]
    name = file_name(record)
    chip = machine["device"].split(" (")[0]
    lines = [
        f"# [benchmarks] Add a record of {chip}",
        "",
        f"`packs bench` on {chip}, {record['date'][:10]}.",
        "",
        "```",
        *table(record),
        "```",
        "",
        f"Read `{file}`: no path, no name of a user and none of a machine should be in it. Then "
        f"copy it to `{CONTRIBUTED}/{name}` in your fork of the repository, and open a pull "
        "request with the text above.",
    ]
    return "\n".join([*lines, ""])


def file_name(record: dict) -> str:
    """Return a name for the file of a record, such as ``apple-m3-max-2026-11-22T1940.json``."""
    chip = re.sub(r"[^a-z0-9]+", "-", record["machine"]["device"].split(" (")[0].lower())
    return f"{chip.strip('-')[:40]}-{record['date'][:16].replace(':', '')}.json"


def _step(of: Contest, compared: StepComparison) -> dict:
    mlx_lm = mlx_packs = ratio = None
    if compared.ours is not None:
        mlx_lm = _side(compared.mlx_lm, compared.targets)
        mlx_packs = _side(compared.ours, compared.targets) | {
            "predicted_step_s": compared.predicted and _rounded(compared.predicted.seconds),
            "predicted_by": compared.predicted and compared.predicted.source,
            "planned_peak_gb": compared.plan and _rounded(compared.plan.peak_gb),
        }
        ratio = _percentiles(compared.ratios)

    weights = "dense"
    if quantization := of.base.quantization:
        weights = f"{quantization.get('mode', 'affine')} {quantization.get('bits', 4)} bits"

    return {
        "model": anonymous(public_name(of.name)),
        "model_type": of.base.config.get("model_type"),
        "weights": weights,
        "blocks": len(of.base.model.layers),
        "dtype": of.dtype,
        "rank": of.adapters.rank,
        "batch_size": compared.shape[0],
        "length": compared.shape[1],
        "targets": compared.targets,
        "matmul_path": compared.choice.matmul_path,
        "matmul_ms": {path: _rounded(ms) for path, ms in compared.choice.step_ms.items()},
        "rounds": len(compared.ratios),
        "mlx_lm": mlx_lm,
        "mlx_packs": mlx_packs,
        "ratio": ratio,
        "fault": anonymous(compared.fault) or None,
    }


def _side(side: Side, targets: int) -> dict:
    return {
        "step_s": _percentiles(side.step_s),
        "steps": len(side.step_s),
        "tokens_per_s": _rounded(targets / median(side.step_s)),
        "peak_gb": _rounded(side.peak_bytes / 1e9),
    }


def _state(conditions: dict) -> str:
    """Return the state of the machine in words; what is not known is left out."""
    parts = []
    if conditions["power"]:
        power = f"on {conditions['power']}"
        if conditions["low_power_mode"]:
            power += ", Low Power Mode"
        parts.append(power)
    if conditions["thermal"]:
        parts.append(f"heat {conditions['thermal']}")
    if conditions["gpu_utilization"] is not None:
        parts.append(f"GPU {conditions['gpu_utilization']} %")
    if conditions["load"] is not None:
        parts.append(f"load {conditions['load']:.2f} per core")
    return " · ".join(parts) or "not known"


def anonymous(text: str) -> str:
    """Return a text without paths, and without the names of this user and this machine."""
    text = re.sub(r"(?<![\w.])(?:~|[A-Za-z]:)?/[^\s'\":,;()]+", "(path)", text)
    for name in _own_names():
        text = re.sub(rf"(?i)(?<![a-z0-9]){re.escape(name)}(?![a-z0-9])", "(name)", text)
    return text


def _own_names() -> list[str]:
    names = {socket.gethostname(), socket.gethostname().split(".")[0], Path.home().name}
    try:
        names.add(getpass.getuser())
    except (KeyError, OSError):  # a user without an entry
        pass
    return sorted((n for n in names if len(n) >= _SHORTEST_NAME), key=len, reverse=True)


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    shares = np.percentile(values, (20, 50, 80))
    return {f"p{p}": _rounded(v) for p, v in zip((20, 50, 80), shares, strict=True)}


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
