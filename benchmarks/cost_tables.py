"""Prints the cost-model tables of kernels/*/README.md from benchmarks/kernel_plans.py.

python -m benchmarks.cost_tables            # print
python -m benchmarks.cost_tables --write    # put them into the READMEs, between their marks
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mlx_packs.chips import CHIPS as ALL_CHIPS
from mlx_packs.ops import grouped_lora_kernel, lora_qmv_kernel, multi_lora_kernel, nf4_kernel
from mlx_packs.runtime import mx

from . import kernel_plans
from .kernel_plans import Plans
from .launch_costs import seconds

CHIPS = [
    ALL_CHIPS[name]
    for name in (
        *("Apple M1", "Apple M2 Pro", "Apple M3 Max", "Apple M4 Max", "Apple M5 Max"),
        "NVIDIA H200",
    )
]
KERNELS = Path(__file__).parent.parent / "kernels"
# How the op decides where that is not by the row itself.
DECIDES = {
    "lora_qmv": " Both read the weights, which is left out of the times.",
    "nf4": " At each size the op compares its kernels with what plain MLX would do with them.",
}
BEGIN, END = "<!-- cost table -->", "<!-- end of cost table -->"
WIDTHS = (
    4096,
    1024,
    1024,
)  # q, k and v of Qwen3-4B, whose width is 2560; all in bfloat16, factors too


def cases() -> dict[str, list[tuple[str, Plans]]]:
    """By op, what is computed and its two plans."""
    deltas = []
    for rank in (8, 16, 64):
        for rows in (1, 8, 64):
            for what, factors in (("", mx.bfloat16), (", factors in float32", mx.float32)):
                compiled = grouped_lora_kernel.GroupProgram(
                    mx.bfloat16, factors, (rank,) * 3, (0, 1, 2), 1
                )
                sizes = grouped_lora_kernel.GroupSizes(2560, WIDTHS)
                plans = kernel_plans.grouped_lora(compiled, rows, sizes)
                deltas.append((f"rank {rank}, {rows:,} rows{what}", plans))
    packs = [
        (
            f"rank {rank}, {sequences} x {rows:,} rows",
            kernel_plans.multi_lora(
                multi_lora_kernel.BatchProgram(mx.bfloat16, mx.bfloat16, (rank,) * 3, 1),
                rows,
                multi_lora_kernel.BatchSizes(sequences, 2560, WIDTHS, 4),
            ),
        )
        for rank in (16, 64)
        for sequences, rows in ((1, 1), (8, 1), (64, 1), (4, 128), (4, 1024))
    ]
    products = [(f"rows {rows:,}", nf4_plans(rows)) for rows in (1, 4, 8, 16, 64, 512, 4096)]
    unpacked = kernel_plans.nf4_dequantize(2, (WIDTHS[0], 2560), 64, True)
    decoded = [
        (i.name.removeprefix("bfloat16 "), kernel_plans.lora_qmv(*i.call))
        for i in lora_qmv_kernel.instances()
        if i.call[0].dtype == mx.bfloat16
    ]
    return {
        "grouped_lora": deltas,
        "lora_qmv": decoded,
        "multi_lora": packs,
        "nf4": [*products, ("dequantize", unpacked)],
    }


def nf4_plans(rows: int) -> Plans:
    """Launches of a forward by the q projection: of plain MLX, and kernels with MLX's product."""
    weight = ((WIDTHS[0], 2560), 64, True)
    plain, unpack = kernel_plans.nf4_dequantize(2, *weight)
    by_dense, by_matvec = kernel_plans.nf4_matvec(2, rows, *weight)
    product = by_dense[-1:]
    kernels = by_matvec if rows <= nf4_kernel.MATVEC_ROWS else unpack + product
    return plain + product, kernels


def table(op: str) -> str:
    """Two tables in markdown: launches of the first case of few and of many rows, and times."""
    results = cases()[op]
    lines = [
        "Microseconds, plain MLX / kernel, expected from bytes and operations; not measured. The "
        f"smaller is bold.{DECIDES.get(op, '')}",
        "",
        _row(["", *(chip.name for chip in CHIPS)]),
        _row(["---"] * (len(CHIPS) + 1)),
    ]
    for name, plans in results:
        lines.append(_row([name, *(_times(plans, chip) for chip in CHIPS)]))
    lines += ["", "Chips as the model has them:", ""]
    lines += [
        _row(["chip", "GB/s", "float32 TFLOP/s", "matrix TFLOP/s", "launch us"]),
        _row(["---"] * 5),
    ]
    lines += [
        _row([c.name, c.bandwidth_gb_s, c.vector_tflops, c.matrix_tflops, c.launch_us])
        for c in CHIPS
    ]
    return "\n".join([*_launches(results), "", *lines])


def _launches(results: list[tuple[str, Plans]]) -> list[str]:
    """Bytes and operations of each kernel launch of the first and last case."""
    lines = [
        _row(["launch", "of", "MB from and to memory", "MB again from cache", "MFLOP"]),
        _row(["---"] * 5),
    ]
    for name, (_, kernel) in (results[0], results[-1]):
        lines += [
            _row(
                [
                    x.what,
                    name,
                    f"{x.bytes / 1e6:.3g}",
                    f"{x.cached_bytes / 1e6:.3g}",
                    f"{x.flops / 1e6:.3g}",
                ]
            )
            for x in kernel
        ]
    return lines


def _times(plans: Plans, chip) -> str:
    plain, kernel = (1e6 * seconds(plan, chip) for plan in plans)
    first, second = f"{plain:,.0f}", f"{kernel:,.0f}"
    return f"{first} / **{second}**" if kernel <= plain else f"**{first}** / {second}"


def _row(cells: Sequence) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def with_table(readme: str, op: str) -> str:
    """The README's text with the table between its marks."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{table(op)}\n\n{END}{after}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.cost_tables", allow_abbrev=False)
    parser.add_argument("--write", action="store_true", help="put them into kernels/*/README.md")
    write = parser.parse_args(arguments).write
    for op in cases():
        readme = KERNELS / op / "README.md"
        if write:
            readme.write_text(with_table(readme.read_text(), op))
        else:
            print(f"## {op}\n\n{table(op)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
