"""A machine model of Apple GPUs: seconds of a dispatch, predicted. No Mac was timed here.

    seconds = launch + max(bytes / (bandwidth x share), operations / (rate x share))

summed over dispatches, each of which waits for the one before it, and a fixed time a step. Rates
and launches are those of `mlx_packs.chips`.
"""

from collections.abc import Sequence

from mlx_packs import chips
from mlx_packs.chips import BANDWIDTH_REACHED, MATMUL_REACHED, Chip

from .costs import Op

STEP_S = 0.030  # mlx-lm's replay of 36 compiled blocks, on a Linux CPU; of every implementation
TRACE_S = 80e-6  # a primitive of a step that is traced and compiled, on a Linux CPU
# Shares of the nominal rates that are reached. Quantized products are calibrated by published
# timings (benchmarks/README.md); attention and own kernels are assumed.
SHARES = {
    "product": MATMUL_REACHED,
    "float32 product": MATMUL_REACHED,
    "quantized product": 0.64,
    "attention": 0.55,
    "kernel": 0.30,
    "kernel product": 0.45,
}
_FLOAT32 = ("float32 product", "kernel")
CHIPS = {
    name.removeprefix("Apple "): chip
    for name, chip in chips.CHIPS.items()
    if name.startswith("Apple ")
}
DEFAULT_CHIPS = ("M2 Pro", "M3 Max", "M4 Max")


def seconds(op: Op, chip: Chip) -> float:
    """Return the predicted seconds of an op; a view takes none."""
    if not op.dispatches:
        return 0.0
    memory = op.bytes / (1e9 * chip.bandwidth_gb_s * BANDWIDTH_REACHED)
    compute = op.operations / rate(op.rate, chip) if op.operations else 0.0
    return 1e-6 * chip.launch_us * op.dispatches + max(memory, compute)


def rate(kind: str, chip: Chip) -> float:
    """Return the operations a second that an op of a kind (`SHARES`) reaches."""
    nominal = chip.vector_tflops if kind in _FLOAT32 else chip.matrix_tflops
    return 1e12 * SHARES[kind] * nominal


def assumptions(names: Sequence[str]) -> str:
    """Return the constants of the model, for the chips that it is asked about."""
    rates = [
        f"{name} {CHIPS[name].bandwidth_gb_s:g} GB/s, {CHIPS[name].matrix_tflops:g} TFLOP/s"
        for name in names
    ]
    launches = ", ".join(dict.fromkeys(f"{CHIPS[name].launch_us:g} us" for name in names))
    shares = [f"{kind} {share:g}" for kind, share in SHARES.items()]
    return (
        f"{'; '.join(rates)}; reached: bandwidth {BANDWIDTH_REACHED:g}, {', '.join(shares)}; "
        f"{launches} a dispatch, {1e3 * STEP_S:g} ms a step, {1e6 * TRACE_S:g} us a primitive to compile"
    )
