"""`packs doctor`: this machine, and whether every kernel is correct on it."""

from pathlib import Path

import click

from ..display import Display
from ..errors import PackError
from . import options
from .options import option
from .output import exit_if_failed, print_report


@click.command()
@option(
    "--report",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the full report to FILE as JSON, to attach to an issue.",
)
@options.backend
@option("-v", "--verbose", is_flag=True, help="List every kernel instance, on a CPU too.")
@options.as_json
def doctor(file: Path | None, verbose: bool) -> None:
    """Check this machine and its kernels.

    The usual instances of every kernel are compared with plain MLX and timed, alone and with their
    gradients. The times are kept for this device, and where a kernel is slower plain MLX computes
    from then on. The exit code is 1 if a kernel is wrong; its operation then takes plain MLX.
    """
    from ..files import atomic_write, to_json
    from ..ops.diagnostics import examine_all, kernel_instances

    if file is not None and not file.parent.is_dir():
        raise PackError(f"--report {file}: there is no folder {file.parent}.", "not-found")
    with Display().task("kernels", len(kernel_instances()), "instances") as bar:
        report = examine_all(bar.advance)
    lines = report_lines(report, verbose)
    if file is not None:
        atomic_write(file, to_json(report))
        lines.append(f"report  {file}: attach it to an issue")
    print_report(report, lines)
    if not all(kernel["ok"] for kernel in report["kernels"]):
        exit_if_failed(["a kernel is wrong on this machine. Please report it."])


def report_lines(report: dict, verbose: bool) -> list[str]:
    """Return the machine and a table of kernels, or a line for each op and dtype without any."""
    memory, blas = report["memory"], report["blas"]
    lines = [
        f"device  {report['device']} · {report['system']}",
        "version " + " · ".join(f"{k} {v}" for k, v in report["versions"].items()),
        f"blas    {blas['library']} · {blas['note']} · "
        f"{blas['threads'] or '?'} threads · {blas['streams']} CPU streams · "
        f"{blas['gflops']:.0f} GFLOP/s fp32",
        f"memory  {memory['total_gb']:.1f} GB · this process {memory['process_peak_gb']:.2f} GB",
    ]
    if chip := report["chip"]:
        lines.insert(1, _chip_line(chip))
    kernels = report["kernels"]
    if kernels[0]["backend"] != "reference":
        lines.append(f"kernels {kernels[0]['backend']}, compared with plain MLX")
    else:
        lines.append("kernels none on a CPU; plain MLX compared with float64")
        if not verbose:
            return lines + _group_lines(kernels)
    return lines + _instance_lines(kernels)


def _chip_line(chip: dict) -> str:
    """Return the rates that the cost model takes, from what programs reached just now."""
    units = (
        "matrix units" if chip["matrix_tflops"] > 2 * chip["vector_tflops"] else "no matrix units"
    )
    bf16 = "native" if chip["native_bf16"] else "emulated"
    return (
        f"chip    {chip['bandwidth_gb_s']:,.0f} GB/s · {chip['vector_tflops']:.1f} TFLOP/s float32, "
        f"{chip['matrix_tflops']:.1f} half · bfloat16 {bf16} · {units} (nominal, from measured rates)"
    )


def _instance_lines(kernels: list[dict]) -> list[str]:
    width = max(len(kernel["instance"]) for kernel in kernels)
    lines = [
        f"        {'op':<13} {'instance':<{width}}  error    kernel us  plain us  with gradients"
        "       choice"
    ]
    for k in kernels:
        error = "-      " if k["max_error"] is None else f"{k['max_error']:.1e}"
        kernel_us, plain_us, kernel_gradient, plain_gradient = (
            "-" if k[key] is None else f"{k[key]:,.{0 if k[key] >= 100 else 1}f}"
            for key in ("kernel_us", "reference_us", "kernel_gradient_us", "reference_gradient_us")
        )
        choice = {None: "-", "reference": "plain"}.get(k["choice"], "kernel")
        lines.append(
            f"        {k['op']:<13} {k['instance']:<{width}}  {error}  {kernel_us:>9}"
            f"  {plain_us:>8}  {kernel_gradient:>9} {plain_gradient:>9}  {choice:<6}  {_verdict(k)}"
        )
    return lines


def _group_lines(kernels: list[dict]) -> list[str]:
    """Return a line for each op and dtype: its instances, the worst error, what is wrong."""
    groups: dict[tuple[str, str], list[dict]] = {}
    for kernel in kernels:
        groups.setdefault((kernel["op"], kernel["instance"].split()[0]), []).append(kernel)
    lines = []
    for (op, dtype), group in groups.items():
        worst = max((k["max_error"] for k in group if k["max_error"] is not None), default=None)
        error = "-" if worst is None else f"{worst:.1e}"
        wrong = next((k for k in group if not k["ok"]), None)
        verdict = "ok" if wrong is None else f"{wrong['instance']}: {_verdict(wrong)}"
        lines.append(f"        {op:<13} {dtype:<9} {len(group):>2} sizes  error {error}  {verdict}")
    return lines


def _verdict(kernel: dict) -> str:
    return "ok" if kernel["ok"] else kernel["fault"][:160]
