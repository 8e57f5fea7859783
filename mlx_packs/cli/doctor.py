"""`packs doctor`: this machine, and whether every kernel is correct and faster on it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..display import Display
from ..errors import PackError
from . import options
from .options import option
from .output import exit_if_failed, print_report, text_table

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn

    from ..bases.geometry import Group
    from ..ops._backend import Instance


@click.command()
@option(
    "--report",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the full report to FILE as JSON, to attach to an issue.",
)
@option(
    "--model",
    metavar="DIR",
    help="Measure the kernels at the sizes of this base model instead of the usual ones.",
)
@option("--rank", type=int, default=16, show_default=True, help="Rank of the adapters on --model.")
@options.backend
@option("-v", "--verbose", is_flag=True, help="List every kernel instance, on a CPU too.")
@options.as_json
def doctor(file: Path | None, model: str | None, rank: int, verbose: bool) -> None:
    """Check this machine and its kernels.

    The usual instances of every kernel are compared with plain MLX and timed. The times are stored
    for this device, and an operation whose kernel is slower uses plain MLX from then on. The exit
    code is 1 if a kernel is wrong; its operation then uses plain MLX.
    """
    from ..files import atomic_write, to_json
    from ..offload.disk import examine_disk
    from ..ops.diagnostics import examine_all, kernel_instances

    if file is not None and not file.parent.is_dir():
        raise PackError(f"--report {file}: there is no folder {file.parent}.", "not-found")

    instances = kernel_instances() if model is None else instances_of(model, rank)
    with Display().task("kernels", len(instances), "instances") as bar:
        report = examine_all(instances, bar.advance)
    report["disk_bytes_per_s"] = examine_disk()

    lines = report_lines(report, verbose)
    wrong = [k["op"] for k in report["kernels"] if not k["ok"]]
    lines.append(f"result  {_result(report, wrong)}")
    if file is not None:
        atomic_write(file, to_json(report))
        lines.append(f"report  {file}: attach it to an issue")

    print_report(report, lines)
    if wrong:
        exit_if_failed(["a kernel is wrong on this machine. Please report it."])


def _result(report: dict, wrong: Sequence[str]) -> str:
    """Return what the examination says in a sentence, given the operations that are wrong."""
    kernels = report["kernels"]
    names = " and ".join(dict.fromkeys(wrong))
    if kernels[0]["backend"] == "reference":
        if wrong:
            return f"plain MLX computes {names} wrong here. Install another version of mlx."
        return "this machine computes correctly. Without a GPU, training is slow."
    if wrong:
        return f"the kernels of {names} are wrong here: plain MLX computes it. Commands work."
    faster = sum(kernel["choice"] != "reference" for kernel in kernels)
    return f"this machine computes correctly. {faster} of {len(kernels)} kernels save time."


def instances_of(model: str, rank: int) -> list["Instance"]:
    """Return the kernel instances that adapters of a rank on all blocks of a base use."""
    from ..bases.geometry import find_groups
    from ..bases.loading import lazy_base
    from ..nn.frozen_weight import frozen_weight
    from ..nn.nf4 import NF4Linear
    from ..ops import grouped_lora_kernel, nf4_kernel
    from ..runtime import mx, on_cpu

    if not 1 <= rank <= grouped_lora_kernel.MAX_RANK:
        most = grouped_lora_kernel.MAX_RANK
        raise PackError(f"--rank {rank}: must be from 1 to {most}.")

    base = lazy_base(model)
    modules = dict(base.model.named_modules())
    instances: dict[str, Instance] = {}
    for group in find_groups(base.model, base.config, (), -1)[0]:
        if any(member.experts is not None for member in group.members):
            continue
        linears = [modules[member.path] for member in group.members]
        if group.members[0].bits is None:
            dtype = linears[0].weight.dtype
        else:
            dtype = frozen_weight(linears[0]).dtype
        if on_cpu():
            dtype = mx.float32

        widths = tuple(width for member in group.members for width in member.widths)
        output_of = tuple(i for i, member in enumerate(group.members) for _ in member.widths)
        sizes = (group.members[0].in_features, (rank,) * len(widths), widths, output_of)

        of_group = []
        if grouped_lora_kernel.fits_launch(sizes[1]):
            of_group += [grouped_lora_kernel.instance_of(dtype, rows, *sizes) for rows in (1, 32)]
        for linear in linears:
            if isinstance(linear, NF4Linear):
                weight = linear.nf4_weight
                form = (weight.shape, weight.block_size, weight.double_quant)
                of_group += [nf4_kernel.instance_of(dtype, rows, *form) for rows in (1, 512)]

        of_group += _decoding_instances(dtype, group, modules, rank)
        instances |= {f"{i.op} {i.name}": i for i in of_group}

    return list(instances.values())


def _decoding_instances(
    dtype: "mx.Dtype", group: "Group", modules: dict[str, "nn.Module"], rank: int
) -> list["Instance"]:
    """Return instances of `lora_qmv` for a group of a base, with 1 row and 8."""
    from ..nn.lora import common_format
    from ..ops import lora_qmv_kernel

    names = [member.path.rpartition(".")[2] for member in group.members]
    form = common_format([modules[member.path] for member in group.members])
    if form is None:
        return []

    block = modules.get(group.block or "", {})
    norms = [block.get(name.replace("_proj", "_norm")) for name in names]
    heads = tuple(0 if norm is None else norm.weight.size for norm in norms)
    widths = tuple(sum(member.widths) for member in group.members)
    gated = names == ["gate_proj", "up_proj"]
    compiled = lora_qmv_kernel.QmvProgram(dtype, *form, 1, (rank,) * len(names), heads, gated)

    if not lora_qmv_kernel.fits_launch(compiled, widths):
        return []
    return [
        lora_qmv_kernel.instance_of(
            compiled._replace(row_tile=rows), group.members[0].in_features, widths
        )
        for rows in (1, 8)
    ]


def report_lines(report: dict, verbose: bool) -> list[str]:
    """Return the machine, and a table of the kernels; on a CPU, which has none, one line."""
    memory = report["memory"]
    blas = report["blas"]

    lines = [
        f"device  {report['device']} · {report['system']}",
        "version " + " · ".join(f"{k} {v}" for k, v in report["versions"].items()),
        f"blas    {blas['library']} · {blas['note']} · "
        f"{blas['threads'] or '?'} threads · {blas['streams']} CPU streams · "
        f"{blas['gflops']:.0f} GFLOP/s fp32",
        f"memory  {memory['total_gb']:.1f} GB · this process {memory['process_peak_gb']:.2f} GB",
    ]

    if rate := report.get("disk_bytes_per_s"):
        lines.append(f"disk    reads {rate / 1e9:.2f} GB/s (for --offload-base)")
    if chip := report["chip"]:
        lines.insert(1, _chip_line(chip))

    kernels = report["kernels"]
    if kernels[0]["backend"] != "reference":
        lines.append(f"kernels {kernels[0]['backend']}, compared with plain MLX")
    else:
        wrong = [f"{k['op']} {k['instance']}: {_verdict(k)}" for k in kernels if not k["ok"]]
        verdict = ", ".join(wrong[:1]) or "ok"
        lines.append(
            f"kernels none on a CPU; plain MLX compared with float64 at {len(kernels)} sizes: "
            f"{verdict}"
        )
        if not verbose:
            return lines

    head = ["", "error", "kernel us", "plain us", "choice", ""]
    return lines + text_table(head, list(map(_row, kernels)))


def _chip_line(chip: dict) -> str:
    """Return the nominal rates that predictions use, which follow from the measured ones."""
    units = "no matrix units"
    if chip["matrix_tflops"] > 2 * chip["vector_tflops"]:
        units = "matrix units"
    bf16 = "native" if chip["native_bf16"] else "emulated"
    return (
        f"chip    {chip['bandwidth_gb_s']:,.0f} GB/s · "
        f"{chip['vector_tflops']:.1f} TFLOP/s float32, {chip['matrix_tflops']:.1f} half · "
        f"bfloat16 {bf16} · {units} (nominal, from measured rates)"
    )


def _row(kernel: dict) -> list[str]:
    error = f"{kernel['max_error']:.1e}" if kernel["max_error"] is not None else "-"
    choice = {None: "-", "reference": "plain"}.get(kernel["choice"], "kernel")
    return [
        f"        {kernel['op']} {kernel['instance']}",
        error,
        _microseconds(kernel["kernel_us"]),
        _microseconds(kernel["reference_us"]),
        choice,
        _verdict(kernel),
    ]


def _microseconds(time: float | None) -> str:
    if time is None:
        return "-"
    return f"{time:,.0f}" if time >= 100 else f"{time:,.1f}"


def _verdict(kernel: dict) -> str:
    return "ok" if kernel["ok"] else kernel["fault"][:160]
