"""A machine model of Apple GPUs: seconds of a dispatch, predicted. No Mac was timed here.

    seconds = launch + max(bytes / (bandwidth x share), operations / (rate x share))

summed over dispatches, each of which waits for the one before it, and a fixed time a step. Rates
and launches are those of `mlx_packs.chips`. Products of few rows, and 4-bit products where
bfloat16 is emulated (M1 and M2), reach smaller shares.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

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
    "floating gradient": 0.64,
    "attention": 0.55,
    "kernel": 0.30,
    "kernel product": 0.45,
}
# Of 4-bit products in bfloat16 where it is emulated. Times of training on an M1 Max give it
# (`published`); ml-explore/mlx#4216 has 1.8 times as long as in float16 there, this is 1.3 times.
EMULATED_QUANTIZED = 0.48
# Of what products of 256 rows and more reach: ml-explore/mlx#3584, an M3 Max of 30 cores, 4-bit and
# float16 alike, 4.5, 5.6 and 6.6 TFLOP/s at 64, 128 and 256 rows.
_ROWS = (64, 128, 256)
_OF_ROWS = (0.68, 0.85, 1.0)
_FLOAT32 = ("float32 product", "kernel")
# MLX 0.32.4 has kernels for the matrix units of M5 for products x @ W.T with weights in mxfp4 and
# nvfp4, and for both directions of affine ones, but none for x @ W (names in its metallib).
_WITHOUT_MATRIX_UNITS = "floating gradient"
CHIPS = {
    name.removeprefix("Apple "): chip
    for name, chip in chips.CHIPS.items()
    if name.startswith("Apple ")
}
# `packs train` computes in float16 where bfloat16 is emulated.
CHIPS |= {
    f"{name} in float16": replace(chip, native_bf16=True)
    for name, chip in CHIPS.items()
    if not chip.native_bf16
}
DEFAULT_CHIPS = ("M2 Pro", "M3 Max", "M4 Max")


def seconds(op: Op, chip: Chip) -> float:
    """Return the predicted seconds of an op; a view takes none."""
    if not op.dispatches:
        return 0.0
    memory = op.bytes / (1e9 * chip.bandwidth_gb_s * BANDWIDTH_REACHED)
    compute = op.operations / rate(op.rate, chip, op.rows) if op.operations else 0.0
    return 1e-6 * chip.launch_us * op.dispatches + max(memory, compute)


def rate(kind: str, chip: Chip, rows: int | None = None) -> float:
    """Return the operations a second that an op of a kind (`SHARES`) reaches.

    ``rows`` are those of a product; None of what has none.
    """
    nominal = chip.matrix_tflops
    if kind in _FLOAT32 or kind == _WITHOUT_MATRIX_UNITS:
        nominal = chip.vector_tflops
    share = SHARES[kind]
    if kind in ("quantized product", "floating gradient") and not chip.native_bf16:
        share = EMULATED_QUANTIZED
    if rows:
        share *= float(np.interp(np.log2(rows), np.log2(_ROWS), _OF_ROWS))
    return 1e12 * share * nominal


def assumptions(names: Sequence[str], fixed_s: float = STEP_S) -> str:
    """Return the constants of the model, for the chips that it is asked about."""
    rates = [
        f"{name} {CHIPS[name].bandwidth_gb_s:g} GB/s, {CHIPS[name].matrix_tflops:g} TFLOP/s"
        for name in names
    ]
    launches = ", ".join(dict.fromkeys(f"{CHIPS[name].launch_us:g} us" for name in names))
    shares = [f"{kind} {share:g}" for kind, share in SHARES.items()]
    shares.append(f"quantized product in emulated bfloat16 {EMULATED_QUANTIZED:g}")
    shares.append(f"products of 64 rows {_OF_ROWS[0]:g} of these")
    return (
        f"{'; '.join(rates)}; reached: bandwidth {BANDWIDTH_REACHED:g}, {', '.join(shares)}; "
        f"{launches} a dispatch, {1e3 * fixed_s:g} ms a step, {1e6 * TRACE_S:g} us a primitive to compile"
    )
